"""Makes a ZeRO-3 parameter of DeepSpeed a sharded parameter of zcompile; [Note: what is taken over] in takeover.py."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from zcompile import _C
from zcompile.state.attributes import MODEL
from zcompile.state.int8_gather import Int8Gather, is_quantized
from zcompile.state.placement import Layout
from zcompile.state.sharded_model import ShardedModel
from zcompile.state.sharded_parameter import ShardedParameter

ZeroParameter: TypeAlias = Any
"""An `nn.Parameter` with attributes that ZeRO-3 sets, such as `ds_id`, `ds_tensor`, `ds_numel` and `ds_shape`."""


@dataclass(eq=False, kw_only=True)
class Partition(ShardedParameter):
    """One ZeRO-3 parameter, with a leaf over the memory of this rank's partition. `accept` gets reduced gradients."""

    parameter: ZeroParameter
    rank: int
    accept: Callable[["Partition", torch.Tensor], None]
    zeros_if_unused = True  # as in leaf modules, see leaf_modules.py

    def local(self) -> torch.Tensor:
        """Return this rank's partition, [elements without padding]."""
        return _without_padding(self.parameter, self.rank)

    def main_params(self) -> list[torch.Tensor]:
        return [self.parameter.ds_tensor]

    def moved(self) -> bool:
        """Whether DeepSpeed has moved the partition to other memory."""
        return self.leaf.numel() > 0 and self.leaf.data_ptr() != self.parameter.ds_tensor.data_ptr()

    def post_accumulate_grad(self, leaf: torch.Tensor, is_late: bool = False) -> None:
        """Pass the leaf's gradient to `accept`."""
        grad, leaf.grad = leaf.grad, None
        if grad is not None and (self.parameter.requires_grad or is_late):
            self.accept(self, grad)


def add_partition(
    state: ShardedModel,
    name: str,
    parameter: ZeroParameter,
    owner: tuple[nn.Module, str],
    accept: Callable[[Partition, torch.Tensor], None],
    in_int8: bool = False,
) -> Partition:
    """Add `parameter` to `state` and its runtime, with a leaf over this rank's partition.

    Args:
        owner: the module that reads the parameter, and the name of its attribute.
        accept: called with the partition and each reduced gradient of it, [elements without padding].
        in_int8: whether gathers send int8, except for vectors; see [Note: int8 gathers] in state/int8_gather.py.
    """
    rank, shape = state.groups.rank, tuple(parameter.ds_shape)
    leaf = nn.Parameter(_without_padding(parameter, rank), requires_grad=parameter.requires_grad)
    setattr(leaf, MODEL, state)
    extension = Int8Gather(parameter.ds_tensor.ds_numel) if in_int8 and is_quantized(leaf, len(shape)) else None
    index = state.runtime.add(
        name=name,
        shard=leaf,
        shape=list(shape),
        chunk=parameter.ds_tensor.ds_numel,
        replicated=False,
        reduce_dtype=None,
    )
    partition = Partition(
        name=name,
        index=index,
        parameter=parameter,
        leaf_reference=weakref.ref(leaf),
        layout=Layout(shape, is_extended=extension is not None),
        extension=extension,
        rank=rank,
        accept=accept,
    )
    partition.add_owner(*owner, leaf)
    state.parameters[name] = partition
    return partition


def partition_grads(optimizer: Any, parameter: ZeroParameter, grad: torch.Tensor) -> None:
    """Call DeepSpeed to copy or add the reduced `grad`, [elements of the partition with padding], to its buffer."""
    if not grad.is_cuda:
        optimizer.partition_grads([parameter], [grad])
        return
    stream = optimizer.reduce_and_partition_stream  # DeepSpeed reads its buffer on this stream afterwards
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.partition_grads([parameter], [grad])
    grad.record_stream(stream)


def _without_padding(parameter: ZeroParameter, rank: int) -> torch.Tensor:
    """Return the partition of `rank` as a tensor over DeepSpeed's memory, [elements without padding].

    The tensor has a storage of its own: the runtime finds parameters by storage, and DeepSpeed's partitions share one.
    """
    partition, numel = parameter.ds_tensor, parameter.ds_numel
    length = min((rank + 1) * partition.ds_numel, numel) - min(rank * partition.ds_numel, numel)
    return _C.own_storage(partition.detach().narrow(0, 0, length))
