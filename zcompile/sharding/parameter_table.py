"""Modules whose forward looks into `module._parameters` itself, as transformers' plans let them.

[Note: modules that look into their parameters]
A plan of transformers for tensor or expert parallelism exchanges the forward of a module ("hooks" it). For kernels that
know no DTensors, the new forward puts local tensors into `module._parameters` for a while. FSDP2 has put the unsharded
DTensors over the inner meshes there before. In a model of zcompile, the table has DTensors over all meshes, whose local
tensors are shards.

- Experts do so always. They have `Placement(local=True)`, so a read gives the local part already. A local shard in the
  table says that this is wanted (`is_own_shard`), and compiled code does not look.
- Linear layers do so without gradients alone: they compute with local parts, a rowwise one without its bias, which it
  adds after the sum over ranks. So where gradients are off, a hooked module's table has what FSDP2 would have there,
  while it is called, and the model runs in eager.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zcompile.state.attributes import SHARDED, TABLE_IS_READ
from zcompile.state.sharded_parameter import ShardedParameter


def looks_into_table(module: nn.Module, attributes: list[str]) -> bool:
    """Whether a plan of transformers has hooked `module`, which reads a DTensor as one of `attributes`."""
    hooked = bool(getattr(module, "_is_hooked", False))  # set by transformers
    return hooked and any(module.__dict__[SHARDED + name].layout.inner is not None for name in attributes)


def call_with_table(call: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
    """`call(module, *args, **kwargs)`; without gradients, `module._parameters` has what its reads give meanwhile."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return call(module, *args, **kwargs)
    own = {name: parameter for name, parameter in module._parameters.items() if SHARDED + name in module.__dict__}
    module._parameters.update({name: getattr(module, name) for name in own})
    module.__dict__[TABLE_IS_READ] = True
    try:
        return call(module, *args, **kwargs)
    finally:
        del module.__dict__[TABLE_IS_READ]
        module._parameters.update(own)


def is_own_shard(sharded: ShardedParameter, given: Any) -> bool:
    """Whether `given`, in the table of a module, is the shard of its parameter there, as `to_local()` gives it."""
    return (
        isinstance(given, torch.Tensor)
        and not isinstance(given, DTensor)
        and sharded.layout.local
        and given.shape == sharded.leaf.shape
        and given.data_ptr() == sharded.leaf.data_ptr()
    )
