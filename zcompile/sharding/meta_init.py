"""Meta-device models: each module is made whole just before its parameters are sharded, so at most one is whole."""

import torch
from torch import nn


def materialize(model: nn.Module, path: str, module: nn.Module, device: torch.device, keep: set[int]) -> None:
    """Give `module`'s own meta parameters and buffers memory on `device` and initialise them, but for ids in `keep`.

    Uses the module's `reset_parameters()`, or the `_init_weights(module)` of the nearest Hugging Face model around it.

    Raises:
        RuntimeError: the module says of neither kind how it is initialised.
    """
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    meta = [name for name, tensor in own if tensor.is_meta and id(tensor) not in keep]
    if not meta:
        return
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    initialiser = None if callable(reset) else _init_weights(model, path)
    if not callable(reset) and initialiser is None:
        raise RuntimeError(
            f"zcompile.shard: {type(module).__name__} '{path}' has meta tensor '{meta[0]}' but no reset_parameters(). "
            "Define it, or build the model on a real device."
        )
    real = {name: tensor for name, tensor in own if not tensor.is_meta}
    module.to_empty(device=device, recurse=False)
    for name, tensor in real.items():
        (module._parameters if name in module._parameters else module._buffers)[name] = tensor
    with torch.no_grad():
        reset() if callable(reset) else initialiser(module)


def _init_weights(model: nn.Module, path: str):
    parts = path.split(".") if path else []
    for depth in range(len(parts), -1, -1):
        ancestor = model.get_submodule(".".join(parts[:depth]))
        if callable(getattr(ancestor, "_init_weights", None)):
            return ancestor._init_weights
    return None
