"""Gradients of ZeRO-3 partitions between backward and step: where they lie, and the sums of their squares.

DeepSpeed copies every reduced gradient to one flat buffer that always exists. `DeepSpeedBuffers` frees that buffer, so
that each gradient stays where it was reduced. `Gradients` says where. DeepSpeed's methods look gradients up there, too.
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
    """`ds_id` -> gradient, [elements of the partition with padding]. Where there is none, asking for it makes zeros."""

    def __init__(self, parameters: list[ZeroParameter], like: torch.Tensor):
        """`like`: a tensor of the gradients' dtype and device."""
        super().__init__()
        self.lengths = {parameter.ds_id: parameter.partition_numel() for parameter in parameters}
        self.like = like

    def __missing__(self, ds_id: int) -> torch.Tensor:
        self[ds_id] = self.like.new_zeros(self.lengths[ds_id])
        return self[ds_id]


class DeepSpeedBuffers:
    """The buffers in which a stage-3 optimizer reduces and stores gradients."""

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer
        # Buckets whose buffers are freed: the bucket, its buffer on the meta device, and the buffer's own device.
        self.buckets: list[tuple[Any, torch.Tensor, torch.device]] = []

    def free(self) -> Gradients:
        """Free the buffers. Returns where DeepSpeed looks for gradients from then on."""
        optimizer = self.optimizer
        buffer = optimizer.grad_partitions_flat_buffer
        optimizer.grad_partitions_flat_buffer = buffer.new_empty(0)
        parameters = [parameter for group in optimizer.fp16_groups for parameter in group]
        gradients = Gradients(parameters, like=optimizer.grad_partitions_flat_buffer)
        self.gradients = gradients
        for bucket in getattr(optimizer, "ipg_buckets", {}).values():  # since 0.17.1
            if bucket.buffer is not None:
                self.buckets.append((bucket, bucket.buffer.to("meta"), bucket.buffer.device))
                bucket.buffer = None
        return gradients

    def allocate(self) -> None:
        """Allocate the buffers of buckets again."""
        while self.buckets:
            bucket, freed, device = self.buckets.pop()
            bucket.buffer = torch.empty_like(freed, device=device)

    def store(self, gradients: Gradients) -> None:
        """Allocate the flat buffer again and copy `gradients` to it."""
        lengths = gradients.lengths
        buffer = gradients.like.new_zeros(sum(lengths.values()))
        parts = dict(zip(lengths, buffer.split(list(lengths.values())), strict=True))
        for ds_id, grad in gradients.items():
            parts[ds_id].copy_(grad)
        self.optimizer.grad_partitions_flat_buffer = buffer
        self.gradients = parts

    @property
    def gradients(self) -> dict[int, torch.Tensor]:
        """Where DeepSpeed looks for gradients, by `ds_id`."""
        return self.optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition

    @gradients.setter
    def gradients(self, gradients: dict[int, torch.Tensor]) -> None:
        self.optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = gradients


class ReducedSquares:
    """Sums of squares that runtimes compute as they reduce gradients, so that the norm need not read them again."""

    def __init__(self, models: Iterable[ShardedModel], partitions: Mapping[int, Partition]):
        """
        Args:
            models: those that have the partitions.
            partitions: by `ds_id`.
        """
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
