"""Models on the meta device: each module is materialized just before it is sharded, so at most one is unsharded."""

import functools
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import nn


def materialize(model: nn.Module, path: str, module: nn.Module, device: torch.device, skip: Container[int]) -> None:
    """Give `module`'s own meta parameters and buffers memory on `device` and initialise them, except ids in `skip`.

    Uses the module's `reset_parameters()`, or the `_init_weights(module)` of the nearest Hugging Face model around it.

    Raises:
        RuntimeError: the module has neither, so that nobody knows how to initialise it.
    """
    own: list[tuple[str, torch.Tensor]] = [
        *module.named_parameters(recurse=False),
        *module.named_buffers(recurse=False),
    ]
    meta = [name for name, tensor in own if tensor.is_meta and id(tensor) not in skip]
    if not meta:
        return
    initialise = _initialiser(model, path, module)
    if initialise is None:
        raise RuntimeError(
            f"zcompile.shard: {type(module).__name__} '{path}' has meta tensor '{meta[0]}' but no reset_parameters(). "
            "Define it, or build the model on a real device."
        )
    real = {name: tensor for name, tensor in own if not tensor.is_meta}
    module.to_empty(device=device, recurse=False)
    for name, tensor in real.items():
        table: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        table[name] = tensor
    with torch.no_grad():
        initialise()


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers of `module` itself to `device`."""
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.device != device:
            module._buffers[name] = buffer.to(device)


def _initialiser(model: nn.Module, path: str, module: nn.Module) -> Callable[[], Any] | None:
    """What initialises `module`: its own method, else that of the nearest Hugging Face model around it; or None."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        return reset
    parts = path.split(".") if path else []
    for depth in range(len(parts), -1, -1):
        init_weights = getattr(model.get_submodule(".".join(parts[:depth])), "_init_weights", None)
        if callable(init_weights):
            return functools.partial(init_weights, module)
    return None
