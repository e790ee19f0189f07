"""Reads of a parameter that `functional_call` or `zcompile.unshard` has replaced in `module._parameters`.

Compiled code would ignore the replacement and gather the model's shard, so the forward runs in eager.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from zcompile.state.attributes import SHARDED
from zcompile.state.sharded_parameter import ShardedParameter


def read_given(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the tensor that replaces parameter `name` of `module`, unsharded; None if None replaces the parameter.

    The gradient of a DTensor is reduced as that of the parameter. Raises RuntimeError if the replacement is neither a
    DTensor of the parameter's shape, placements and mesh, nor an unsharded tensor inside of `zcompile.unshard`.
    """
    sharded: ShardedParameter = module.__dict__[SHARDED + name]
    given: Any = module._parameters[name]
    if given is None:  # transformers replaces a rowwise layer's bias by None, and adds the bias itself
        return None
    if sharded.is_whole and isinstance(given, torch.Tensor) and given.shape == sharded.parameter.shape:
        unsharded = given
    elif layout_of(given) == layout_of(sharded.parameter) and sharded.layout.inner is None:
        unsharded = _gather(given, sharded.state.mean_scale)
    else:
        raise RuntimeError(
            f"zcompile: parameter '{sharded.name}' was replaced after zcompile.shard (rank {dist.get_rank()}) by "
            f"{_describe(given)}. functional_call takes DTensors of the shape, placements and mesh of those in "
            "model.named_parameters(); whole tensors only inside of zcompile.unshard(model). To change a parameter for "
            "good, copy values into the DTensor in model.parameters() under torch.no_grad()."
        )
    dtype = None if sharded.is_whole and sharded.hooked is not None else sharded.layout.dtype
    return unsharded if dtype is None else unsharded.to(dtype)


def layout_of(parameter: Any) -> tuple[Any, ...] | None:
    if not isinstance(parameter, DTensor):
        return None
    return parameter.shape, parameter.placements, parameter.device_mesh


def _gather(given: DTensor, scale: float) -> torch.Tensor:
    """All-gather `given`. Its gradient is the mean over ranks times `scale`, as that of a parameter."""
    dimensions = given.device_mesh.ndim
    replicated = given.redistribute(placements=[Replicate()] * dimensions)
    unsharded = replicated.to_local(grad_placements=[Partial("avg")] * dimensions)
    if unsharded.requires_grad and scale != 1:
        unsharded.register_hook(lambda grad: grad * scale)
    return unsharded


def _describe(given: Any) -> str:
    if isinstance(given, DTensor):
        return f"a DTensor of shape {tuple(given.shape)} and placements {given.placements} on {given.device_mesh}"
    if isinstance(given, torch.Tensor):
        return f"a plain tensor of shape {tuple(given.shape)}"
    return f"a {type(given).__name__}"
