"""The step with "offload_optimizer" to pinned CPU memory, for optimizers that can step on the device.

DeepSpeed would copy gradients to the host, step there, and copy partitions back. Here only main parameters and states
are in host memory. A step copies a few of them at a time to the device, steps these there, and copies them back
([Note: streamed steps] in training/offload.py). The results are those of a step without offload.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from zcompile.integrations.deepspeed.gradients import Gradients
from zcompile.training.host_link import HostLink
from zcompile.training.offload import MOMENTS
from zcompile.training.streamed_groups import Piece, Stream, plan_groups


def can_stream(optimizer: Any, is_elementwise: bool) -> bool:
    """Whether DeepSpeed's optimizer can step states in host memory on the device. `is_elementwise`: it wraps Adam."""
    inner = optimizer.optimizer
    has_hooks = inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks
    is_alone = is_elementwise and not has_hooks and not optimizer.swap_optimizer
    has_maxima = any(group.get("amsgrad") for group in inner.param_groups)
    is_fp32 = all(main.dtype == torch.float32 for main in optimizer.fp32_partitioned_groups_flat)
    return bool(optimizer.offload_optimizer_pin_memory and is_alone and is_fp32 and not has_maxima)


def stop_offloading(optimizer: Any) -> None:
    """Let DeepSpeed's optimizer keep gradients on the device. Frees its gradients in host memory."""
    optimizer.offload_optimizer = False
    for main in optimizer.fp32_partitioned_groups_flat:
        main.grad = None


def resume_offloading(optimizer: Any, link: HostLink, gradients: Gradients | None) -> None:
    """Undo `stop_offloading`, and copy `gradients`, accumulated in this step, to host memory for DeepSpeed's step."""
    optimizer.offload_optimizer = True
    if gradients is None:
        return
    for main in optimizer.fp32_partitioned_groups_flat:
        main.grad = link.allocate(main).zero_()
    for parameter in (each for group in optimizer.fp16_groups for each in group if each.ds_id in gradients):
        number, grad = optimizer.get_param_id(parameter), gradients[parameter.ds_id]
        sub_group, offset, numel = optimizer.grad_position[number]
        optimizer.fp32_partitioned_groups_flat[sub_group].grad.narrow(0, offset, numel).copy_(grad)
        optimizer.norm_for_param_grads[number] = optimizer._constant_buffered_norm2(grad)


class HostSubGroup:
    """The flat main parameter of a sub-group and its states, kept in host memory and stepped on the device."""

    def __init__(self, flat: nn.Parameter, lengths: list[int], partitions: torch.Tensor, link: HostLink):
        """`flat`: the main parameter, [sum of `lengths`]. `lengths`: elements in the partition of each parameter.
        `partitions`: the copy of `flat` on the device, from which forwards gather."""
        self.flat, self.partitions, self.link = flat, partitions, link
        self.lengths, self.begins = lengths, list(accumulate(lengths, initial=0))

    def update(self, inner: torch.optim.Optimizer, param_group: int, batches: Iterator[list[torch.Tensor]]) -> None:
        """Step as `SubGroup.update` does. Return when the new states and the new main parameter are in host memory."""
        state = inner.state[self.flat]
        self.flat.data = self.link.adopt(self.flat.data)
        moments = [self.link.adopt(state[name]) if state else self.link.allocate(self.flat) for name in MOMENTS]
        counts = {name: value for name, value in state.items() if name not in MOMENTS}
        step = _Step(inner, inner.param_groups[param_group], counts, is_first=not state)
        stream = Stream(self.link, 1 + len(moments), self.lengths, self.partitions.device)
        done = 0  # number of partitions
        try:
            for grads in batches:
                self._stream(stream, [self.flat.detach(), *moments], grads, self.begins[done:], step)
                done += len(grads)
        finally:
            stream.close()
        if stream.copied_out is not None:
            self.link.synchronize(stream.copied_out)
        state.update(zip(MOMENTS, moments, strict=True))
        for name, value in step.counts.items():  # in place, because sub-groups may share a count
            counted = isinstance(value, torch.Tensor) and name in counts
            state[name] = counts[name].copy_(value) if counted else value

    def _stream(
        self,
        stream: Stream,
        hosts: list[torch.Tensor],
        grads: list[torch.Tensor],
        begins: list[int],
        step: Callable[..., None],
    ) -> None:
        """Step a partition for each of `grads`. Partition i begins at element `begins[i]` of each tensor in `hosts`."""

        def cut(piece: Piece, flat: torch.Tensor) -> torch.Tensor:
            begin = begins[piece.item]
            return flat[begin + piece.begin : begin + piece.end]

        for pieces in plan_groups([grad.numel() for grad in grads], stream.capacity):
            parts = [cut(piece, self.partitions) for piece in pieces]
            of_pieces = [piece.of(grads[piece.item]) for piece in pieces]

            def compute(
                buffers: list[list[torch.Tensor]],
                parts: list[torch.Tensor] = parts,
                of_pieces: list[torch.Tensor] = of_pieces,
            ) -> None:
                step(buffers, of_pieces)
                torch._foreach_copy_(parts, [main for main, *_ in buffers])

            if pieces:
                stream.run(pieces, [[cut(piece, host) for host in hosts] for piece in pieces], compute)


class _Step:
    """Steps an optimizer on slices of a flat main parameter. The optimizer holds them only while it steps."""

    def __init__(
        self, inner: torch.optim.Optimizer, group: dict[str, Any], counts: dict[str, Any], is_first: bool
    ) -> None:
        self.inner, self.group, self.before, self.is_first = inner, group, counts, is_first
        self.counts = counts  # of steps, after this step

    def __call__(self, buffers: list[list[torch.Tensor]], grads: list[torch.Tensor]) -> None:
        """Step each slice i. `buffers[i]` are its main parameter and moments on the device, `grads[i]` its gradient."""
        inner, group = self.inner, self.group
        on_device = group.get("fused") or group.get("capturable")
        try:
            for (main, *moments), grad in zip(buffers, grads, strict=True):
                main.grad = grad
                if not self.is_first:
                    copies = {name: _copy(value, main if on_device else None) for name, value in self.before.items()}
                    inner.state[main] = {**copies, **dict(zip(MOMENTS, moments, strict=True))}
            group["params"] = [main for main, *_ in buffers]
            inner.step()
        finally:
            group["params"] = []
            states = [inner.state.pop(main, {}) for main, *_ in buffers]
            for main, *_ in buffers:
                main.grad = None
        if self.is_first:  # the optimizer has made the moments
            for (_, *moments), state in zip(buffers, states, strict=True):
                torch._foreach_copy_(moments, [state[name] for name in MOMENTS])
        self.counts = {name: value for name, value in states[-1].items() if name not in MOMENTS}


def _copy(value: Any, like: torch.Tensor | None) -> Any:
    """Copy `value`, a count of steps, to the device of `like`: each slice needs a copy, which its step increments."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if like is None else value.to(like.device, copy=True)
