"""Gradients of ZeRO-3 partitions between backward and step: where they lie, and the sums of their squares.

DeepSpeed copies every reduced gradient to one flat buffer that always exists. `Gradients` frees that buffer, and each
gradient stays where it was reduced.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from zcompile.integrations.deepspeed.partitions import Partition, ZeroParameter
from zcompile.state.sharded_model import ShardedModel


def add(before: torch.Tensor | None, grad: torch.Tensor) -> torch.Tensor:
    """The accumulated gradient with `grad`; `before` is the one without."""
    return grad if before is None else before.add_(grad)


class Gradients(dict[int, torch.Tensor]):
    """`ds_id` -> gradient, [elements of the partition with padding], in place of an optimizer's buffers.

    DeepSpeed looks gradients up here. Where there is none, asking for it makes zeros.
    """

    PLACE = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"  # where DeepSpeed looks for gradients

    def __init__(self, optimizer: Any, device: torch.device):
        """`device` is that of reduced gradients, which DeepSpeed may offload to its buffer."""
        super().__init__()
        self.lengths = {each.ds_id: each.partition_numel() for group in optimizer.fp16_groups for each in group}
        self.device_of_buffer = optimizer.grad_partitions_flat_buffer.device
        self.like = optimizer.grad_partitions_flat_buffer.new_empty(0, device=device)
        optimizer.grad_partitions_flat_buffer = self.like
        setattr(optimizer, self.PLACE, self)
        # Buckets whose buffers are freed: the bucket, its buffer on the meta device, and the buffer's own device.
        self.buckets: list[tuple[Any, torch.Tensor, torch.device]] = []
        for bucket in getattr(optimizer, "ipg_buckets", {}).values():  # since 0.17.1
            if bucket.buffer is not None:
                self.buckets.append((bucket, bucket.buffer.to("meta"), bucket.buffer.device))
                bucket.buffer = None

    def __missing__(self, ds_id: int) -> torch.Tensor:
        self[ds_id] = self.like.new_zeros(self.lengths[ds_id])
        return self[ds_id]

    def restore_buffers(self, optimizer: Any) -> None:
        """Give DeepSpeed its buffers again, with these gradients in them."""
        for bucket, freed, device in self.buckets:
            bucket.buffer = torch.empty_like(freed, device=device)
        buffer = self.like.new_zeros(sum(self.lengths.values()), device=self.device_of_buffer)
        parts = dict(zip(self.lengths, buffer.split(list(self.lengths.values())), strict=True))
        for ds_id, grad in self.items():
            parts[ds_id].copy_(grad)
        optimizer.grad_partitions_flat_buffer = buffer
        setattr(optimizer, self.PLACE, parts)


class ReducedSquares:
    """Sums of squares that runtimes compute as they reduce gradients, so that the norm need not read them again."""

    def __init__(self, models: Iterable[ShardedModel], partitions: Mapping[int, Partition]):
        """`models` have the `partitions`, by `ds_id`."""
        self.runtimes = [model.runtime for model in models]
        self.places = {ds_id: (each.state.runtime, each.index) for ds_id, each in partitions.items()}
        self.versions: dict[int, int] = {}  # `ds_id` -> the gradient's version when it arrived
        for runtime in self.runtimes:
            runtime.collect_squares()

    def note(self, parameter: ZeroParameter, grad: torch.Tensor) -> None:
        """`grad` has arrived and is stored as it is."""
        self.versions[parameter.ds_id] = grad._version

    def of(self, parameter: ZeroParameter, grad: torch.Tensor) -> torch.Tensor | None:
        """Partial sums of the squares of `grad`, [any] fp64; None if `grad` is not as it was reduced."""
        if self.versions.get(parameter.ds_id) != grad._version:
            return None
        runtime, index = self.places[parameter.ds_id]
        return runtime.squares_of(index, grad)

    def forget(self) -> None:
        """Begin with the next step's."""
        for runtime in self.runtimes:
            runtime.clear_squares()
