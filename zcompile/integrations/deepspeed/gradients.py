"""Gradients of ZeRO-3 partitions between backward and step: their memory, and the sums of their squares."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from zcompile.integrations.deepspeed.partitions import Partition, ZeroParameter
from zcompile.state.sharded_model import ShardedModel


def add(before: torch.Tensor | None, grad: torch.Tensor) -> torch.Tensor:
    return grad if before is None else before.add_(grad)


class Gradients(dict[int, torch.Tensor]):
    """A dict from `ds_id` (DeepSpeed's number of a parameter) to the gradient of this rank's partition, with padding.

    It replaces DeepSpeed's dict of views of one flat buffer, and frees this buffer: each gradient stays in the tensor
    that its reduce wrote. Looking up a missing gradient makes and stores zeros.
    """

    PLACE = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"  # DeepSpeed's attribute for gradients

    def __init__(self, optimizer: Any, device: torch.device):
        """`device` is the device of reduced gradients."""
        super().__init__()
        self.lengths = {each.ds_id: each.partition_numel() for group in optimizer.fp16_groups for each in group}
        self.device_of_buffer = optimizer.grad_partitions_flat_buffer.device
        self.like = optimizer.grad_partitions_flat_buffer.new_empty(0, device=device)
        optimizer.grad_partitions_flat_buffer = self.like
        setattr(optimizer, self.PLACE, self)
        # (DeepSpeed's bucket, its freed buffer as a meta tensor, the device of the buffer)
        self.buckets: list[tuple[Any, torch.Tensor, torch.device]] = []
        for bucket in getattr(optimizer, "ipg_buckets", {}).values():  # since 0.17.1
            if bucket.buffer is not None:
                self.buckets.append((bucket, bucket.buffer.to("meta"), bucket.buffer.device))
                bucket.buffer = None

    def __missing__(self, ds_id: int) -> torch.Tensor:
        self[ds_id] = self.like.new_zeros(self.lengths[ds_id])
        return self[ds_id]

    def restore_buffers(self, optimizer: Any) -> None:
        """Allocate DeepSpeed's buffers again, and copy these gradients into them."""
        for bucket, freed, device in self.buckets:
            bucket.buffer = torch.empty_like(freed, device=device)
        buffer = self.like.new_zeros(sum(self.lengths.values()), device=self.device_of_buffer)
        parts = dict(zip(self.lengths, buffer.split(list(self.lengths.values())), strict=True))
        for ds_id, grad in self.items():
            parts[ds_id].copy_(grad)
        optimizer.grad_partitions_flat_buffer = buffer
        setattr(optimizer, self.PLACE, parts)


class ReducedSquares:
    """Sums of squares of gradients, which each reduce computes, so that the gradient norm need not read gradients."""

    def __init__(self, models: Iterable[ShardedModel], partitions: Mapping[int, Partition]):
        """`partitions` are the sharded parameters of `models`, by `ds_id`."""
        self.runtimes = [model.runtime for model in models]
        self.places = {ds_id: (each.state.runtime, each.index) for ds_id, each in partitions.items()}
        self.versions: dict[int, int] = {}  # `ds_id` -> the gradient's version when it arrived
        for runtime in self.runtimes:
            runtime.collect_squares()

    def note(self, parameter: ZeroParameter, grad: torch.Tensor) -> None:
        """Note the version of `grad`, the reduced gradient of `parameter`, so that `of` notices later changes."""
        self.versions[parameter.ds_id] = grad._version

    def of(self, parameter: ZeroParameter, grad: torch.Tensor) -> torch.Tensor | None:
        """Return partial sums of the squares of `grad`, 1-D fp64; None if `grad` was changed after its reduce."""
        if self.versions.get(parameter.ds_id) != grad._version:
            return None
        runtime, index = self.places[parameter.ds_id]
        return runtime.squares_of(index, grad)

    def forget(self) -> None:
        for runtime in self.runtimes:
            runtime.clear_squares()
