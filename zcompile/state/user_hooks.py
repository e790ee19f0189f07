"""Users' hooks on the DTensors in `model.parameters()`, and for tensors that autograd saves.

Autograd accumulates into leaves, so it calls no hook of a DTensor. `ShardedParameter.post_accumulate_grad` calls them.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def carry_hooks(original: nn.Parameter, parameter: nn.Parameter) -> None:
    """Share the hooks of `original` with `parameter`. Handles of these hooks still remove them."""
    for attribute in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(original, attribute)
        if hooks:
            setattr(parameter, attribute, hooks)


def run_grad_hooks(name: str, parameter: Any, grad: torch.Tensor) -> torch.Tensor:
    """Call the hooks of `parameter.register_hook` on a gradient. Return the gradient that is to accumulate.

    Args:
        grad: this rank's shard of the gradient of this backward alone. Hooks get it as a DTensor.

    Raises:
        RuntimeError: a hook returns something that is not a DTensor of the gradient's shape and placements.
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
    return dtensor._local_tensor


def run_post_accumulate_hooks(name: str, parameter: Any) -> None:
    """Call the hooks of `parameter.register_post_accumulate_grad_hook`; its `.grad` is set.

    Raises:
        RuntimeError: a hook returns something.
    """
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
    """Whether saved-tensor hooks, as of `save_on_cpu` or a checkpoint, apply to tensors that autograd saves here."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
