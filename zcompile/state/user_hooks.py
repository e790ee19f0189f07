"""Calls users' gradient hooks on DTensors, and detects users' saved-tensor hooks.

Autograd accumulates into leaves, not into DTensors, so it does not call the DTensors' hooks. Each leaf's own
post-accumulate hook calls them.
"""

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def carry_hooks(original: nn.Parameter, parameter: nn.Parameter) -> None:
    """Let `parameter`, which replaces `original`, share the hooks of `original`. Users' handles still remove them."""
    for attribute in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(original, attribute)
        if hooks:
            setattr(parameter, attribute, hooks)


def run_grad_hooks(name: str, parameter: Any, grad: torch.Tensor) -> torch.Tensor:
    """Call the hooks that users registered by `parameter.register_hook`. Return the gradient to be accumulated.

    Hooks get `grad`, this rank's shard of the current backward's gradient, as a DTensor. Raises RuntimeError if one
    returns neither None nor a DTensor of the gradient's shape, dtype and placements.
    """
    dtensor = DTensor(grad, parameter._spec, requires_grad=False)
    for hook in list(parameter._backward_hooks.values()):
        result = hook(dtensor)
        if result is None:
            continue
        if (
            not isinstance(result, DTensor)
            or (result.shape, result.dtype) != (dtensor.shape, dtensor.dtype)
            or result.placements != dtensor.placements
        ):
            raise RuntimeError(
                f"zcompile: a hook on parameter '{name}' returned {_describe(result)}. It must return None, or a "
                f"DTensor like its argument: {_describe(dtensor)}."
            )
        dtensor = result
    return dtensor._local_tensor.clone()  # a hook may have kept this tensor, or may return the same one again


def run_post_accumulate_hooks(name: str, parameter: Any) -> None:
    """Call users' post-accumulate-grad hooks, after `.grad` is set. Raises RuntimeError if one does not return None."""
    for hook in list(parameter._post_accumulate_grad_hooks.values()):
        if hook(parameter) is not None:
            raise RuntimeError(f"zcompile: a post-accumulate-grad hook on parameter '{name}' must return None.")


def _describe(value: Any) -> str:
    if isinstance(value, DTensor):
        return f"a DTensor of shape {tuple(value.shape)}, {value.dtype}, placements {value.placements}"
    if isinstance(value, torch.Tensor):
        return f"a plain tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def saves_by_hooks() -> bool:
    """Whether saved-tensor hooks, as of `save_on_cpu` or checkpointing, apply to tensors that autograd saves now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextlib.contextmanager
def hooks_for_others(storages: Collection[int]) -> Iterator[None]:
    """Keep users' saved-tensor hooks, such as `save_on_cpu`, from shards: tensors over `storages` (values of `_cdata`).

    Why: backward finds the parameter to gather by its shard's storage. A copy that a hook made has other storage.
    """
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)

    is_shard = lambda tensor: tensor.untyped_storage()._cdata in storages
    pack_others = lambda tensor: (tensor, None) if is_shard(tensor) else (None, pack(tensor))
    unpack_others = lambda packed: unpack(packed[1]) if packed[0] is None else packed[0]
    with torch.autograd.graph.saved_tensors_hooks(pack_others, unpack_others):
        yield
