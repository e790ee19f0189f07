"""The step of a ZeRO-3 optimizer, without the copies of gradients and masters that it can do without.

DeepSpeed's step spends as much on copies of gradients as on the optimizer: each is copied into a buffer that always exists,
cast to fp64 for the norm, concatenated to one flat gradient, and scaled by a number on the device; with fp32 partitions there
is also a second copy of them, the masters. `LeanStep` keeps gradients as they were reduced, and has an optimizer that treats
every element alone (Adam) read them parameter by parameter, over views of DeepSpeed's flat masters and states. The arithmetic
is the same and so are the numbers, but for these: on a GPU the norm, summed in fp64 in another order, may differ in its last
bits; a fused Adam divides gradients by the scale itself, where DeepSpeed multiplies them by its inverse; a parameter without
a gradient in this step has zeros, where DeepSpeed takes what an earlier step left in its buffer; and with fp32 partitions
there is no master to which an edited partition would go back. In fp16, where the search for overflows reads the buffer, and
with an offloaded optimizer, the step is DeepSpeed's.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from zcompile import _C


def add(before: torch.Tensor | None, grad: torch.Tensor) -> torch.Tensor:
    """What has accumulated with `grad`; `before` is what had until now."""
    return grad if before is None else before.add_(grad)


class Gradients(dict):
    """The gradients of partitions that are there, by the id of the parameter; of others, zeros when they are asked for."""

    def __init__(self, parameters: list[nn.Parameter], like: torch.Tensor):
        super().__init__()
        self.lengths = {parameter.ds_id: parameter.partition_numel() for parameter in parameters}
        self.like = like

    def __missing__(self, ds_id: int) -> torch.Tensor:
        self[ds_id] = self.like.new_zeros(self.lengths[ds_id])
        return self[ds_id]


class ReducedSquares:
    """Squares of gradients that the runtime adds up as it reduces them, so that the norm need not read them again."""

    def __init__(self, runtime: _C.Model, indices: dict[int, int]):
        """`indices`: the runtime's, by the id that DeepSpeed gives a parameter."""
        self.runtime = runtime
        self.indices = indices
        self.versions: dict[int, int] = {}  # of gradients when they arrived
        runtime.collect_squares()

    def note(self, parameter: nn.Parameter, grad: torch.Tensor) -> None:
        """`grad` has arrived and is kept."""
        self.versions[parameter.ds_id] = grad._version

    def of(self, parameter: nn.Parameter, grad: torch.Tensor) -> torch.Tensor | None:
        """[any] fp64, which add up to the squares of `grad`; None if it is not as it was reduced."""
        if self.versions.get(parameter.ds_id) != grad._version:
            return None
        return self.runtime.squares_of(self.indices[parameter.ds_id], grad)

    def forget(self) -> None:
        """Those of the next step are to begin."""
        self.runtime.clear_squares()


class LeanStep:
    """A stage-3 optimizer's step without the copies that it can do without.

    From `install()` to `remove()`, methods of this one optimizer are replaced, and its buffers for gradients are gone.
    """

    REPLACED = (
        "set_fp32_grad_for_param",
        "set_local_grad_for_param",
        "_get_norm_groups",
        "_prepare_fp32_grad_for_sub_group",
        "unscale_and_clip_grads",
        "_optimizer_step",
        "zero_grad",
        "offload_states",
        "reload_states",
    )
    CAST_BYTES = 512 << 20  # of gradients that are cast to fp32 at a time

    def __init__(self, optimizer: Any, fail: Callable[[str, Exception], None], squares: "ReducedSquares | None" = None):
        """`fail(doing, error)` gives the engine back, and so calls `remove()`."""
        self.optimizer = optimizer
        self.fail = fail
        self.reduced_squares = squares
        self.kept: Gradients | None = None  # None while DeepSpeed has its buffers
        self.arrived: dict[
            int, int
        ] = {}  # id of a parameter -> autograd's number of the backward that last gave it a gradient
        self.buckets: list[tuple[Any, torch.Tensor, torch.device]] = []  # and their buffers, on the meta device
        self.theirs: dict[str, Callable] = {}
        self.sub_groups: dict[int, SubGroup | None] = {}  # of the step that is on its way
        self.current: SubGroup | None = None
        self.pending: list[torch.Tensor] = []  # of the current one
        self.scale = 1.0  # that they are divided by
        self.offloaded: set[int] = set()  # ids of the parameters whose gradients DeepSpeed has offloaded

    @staticmethod
    def is_possible(optimizer: Any) -> bool:
        """Not where DeepSpeed reads its buffers: in fp16, to find overflows, and when it offloads the optimizer."""
        return optimizer.dtype != torch.float16 and not optimizer.offload_optimizer

    def install(self) -> None:
        self.alias_masters()
        self.take_buffers()
        for name in self.REPLACED:
            self.theirs[name] = getattr(self.optimizer, name)
            setattr(self.optimizer, name, getattr(self, name.lstrip("_")))

    def remove(self, buffers: bool) -> None:
        """Let DeepSpeed do the step again; `buffers`: its own for gradients are wanted back, with what was in them."""
        while self.theirs:
            self.optimizer.__dict__.pop(self.theirs.popitem()[0], None)
        self.reduced_squares = None  # with it goes the runtime
        self.forget_step()
        if buffers:
            self.give_buffers()

    def alias_masters(self) -> None:
        """Let masters that are copies of fp32 partitions be the partitions. Where they differ, masters win, as in a step."""
        optimizer = self.optimizer
        for masters, partitions in zip(
            optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat, strict=True
        ):
            if masters.dtype == partitions.dtype and masters.device == partitions.device:
                partitions.data.copy_(masters.data)
                masters.data = partitions.data

    def take_buffers(self) -> None:
        """Have each gradient where it was reduced."""
        optimizer = self.optimizer
        buffer = optimizer.grad_partitions_flat_buffer
        optimizer.grad_partitions_flat_buffer = buffer.new_empty(0)
        parameters = [parameter for group in optimizer.fp16_groups for parameter in group]
        self.kept = Gradients(parameters, like=optimizer.grad_partitions_flat_buffer)
        optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = self.kept
        for bucket in getattr(optimizer, "ipg_buckets", {}).values():  # since 0.17.1
            if bucket.buffer is not None:
                self.buckets.append((bucket, bucket.buffer.to("meta"), bucket.buffer.device))
                bucket.buffer = None

    def give_buffers(self) -> None:
        """Have each gradient in DeepSpeed's buffer."""
        while self.buckets:
            bucket, was, device = self.buckets.pop()
            bucket.buffer = torch.empty_like(was, device=device)
        if self.kept is None:
            return
        optimizer, grads, self.kept = self.optimizer, self.kept, None
        buffer = grads.like.new_zeros(sum(grads.lengths.values()))
        parts = dict(zip(grads.lengths, buffer.split(list(grads.lengths.values())), strict=True))
        for ds_id, grad in grads.items():
            parts[ds_id].copy_(grad)
        optimizer.grad_partitions_flat_buffer = buffer
        optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = parts

    def accept(
        self,
        parameter: nn.Parameter,
        grad: torch.Tensor,
        added: Callable[[torch.Tensor | None, torch.Tensor], torch.Tensor] = add,
    ) -> None:
        """Keep or add a reduced gradient, [elements of the partition]; `added` does the latter."""
        optimizer, ds_id = self.optimizer, parameter.ds_id
        grad = grad.to(optimizer.gradient_accumulation_dtype)
        if optimizer.micro_step_id == 0:
            optimizer.averaged_gradients = {}  # of a step that was not taken
        backward = torch._C._current_graph_task_id()
        again = (
            self.arrived.get(ds_id, -1) == backward != -1
        )  # what other ranks alone asked for comes at a backward's end
        self.arrived[ds_id] = backward
        first = ds_id not in self.kept or (optimizer.micro_step_id == 0 and not again)
        self.kept[ds_id] = added(None if first else self.kept[ds_id], grad)
        if first and self.reduced_squares:
            self.reduced_squares.note(parameter, grad)  # what is added moves the version

    def forget_step(self) -> None:
        self.sub_groups, self.current, self.pending = {}, None, []

    # --- what stands in for the optimizer's methods -------------------------------------------------------------------

    def get_norm_groups(self) -> list:
        """The norm of each sub-group, [] fp64 on the host, where the step asks what it is; -1 for inf and NaN."""
        optimizer = self.optimizer
        if optimizer.model_parallel_group is not None:  # what its ranks share is counted once
            return self.theirs["_get_norm_groups"]()
        try:
            squares = torch.stack([self.square(at) for at in range(len(optimizer.fp16_groups))])
            self.sub_groups = {at: self.cut(at) for at in range(len(optimizer.fp16_groups))}  # the host has time here
            if self.reduced_squares:
                self.reduced_squares.forget()
        except Exception as error:
            self.fail("the step", error)
            return optimizer._get_norm_groups()
        torch.distributed.all_reduce(squares, group=optimizer.dp_process_group)
        norms = torch.where(squares.isfinite(), squares.sqrt(), -1.0).cpu()  # waits here
        if (
            -1.0 in norms.tolist()
        ):  # DeepSpeed skips the step (since 0.19, and in fp16), which then comes to no sub-group
            self.forget_step()
            self.kept.clear()
        return list(norms)

    def square(self, sub_group: int) -> torch.Tensor:
        """The sum of the squares of a sub-group's gradients, [] fp64."""
        squares, others = [], []
        for parameter, grad in zip(
            self.optimizer.fp16_groups[sub_group], self.optimizer.averaged_gradients[sub_group], strict=True
        ):
            known = self.reduced_squares.of(parameter, grad) if self.reduced_squares else None
            if known is None:
                others.append(grad)
            else:
                squares.append(known)
        if others:
            squares.append(torch.stack(torch._foreach_norm(others, 2, dtype=torch.float64)) ** 2)
        return torch.cat(squares).sum()

    def set_fp32_grad_for_param(self, value: torch.Tensor, parameter: nn.Parameter) -> None:
        """DeepSpeed writes it past the version counter."""
        self.theirs["set_fp32_grad_for_param"](value, parameter)
        self.note_edit(parameter)

    def set_local_grad_for_param(self, value: torch.Tensor, parameter: nn.Parameter) -> None:
        self.theirs["set_local_grad_for_param"](value, parameter)
        self.note_edit(parameter)

    def note_edit(self, parameter: nn.Parameter) -> None:
        if self.kept is not None and parameter.requires_grad:
            torch.autograd.graph.increment_version(self.kept[parameter.ds_id])

    def prepare_fp32_grad_for_sub_group(self, sub_group: int) -> None:
        """The sub-group's gradients are taken from what DeepSpeed goes through; it makes a flat one of them where it must."""
        optimizer = self.optimizer
        try:
            self.current = self.sub_groups.pop(sub_group) if sub_group in self.sub_groups else self.cut(sub_group)
        except Exception as error:
            self.fail("the step", error)
            return optimizer._prepare_fp32_grad_for_sub_group(sub_group)
        if self.current is None:
            self.theirs["_prepare_fp32_grad_for_sub_group"](sub_group)
        else:
            self.pending = optimizer.averaged_gradients[sub_group]
            optimizer.averaged_gradients[sub_group] = None
        for parameter in optimizer.fp16_groups[sub_group]:
            self.kept.pop(parameter.ds_id, None)

    def unscale_and_clip_grads(self, sub_group: int, total_norm: torch.Tensor | float) -> None:
        """The scale is computed as DeepSpeed does, on the host; it is applied when the optimizer reads them."""
        if self.current is None:
            return self.theirs["unscale_and_clip_grads"](sub_group, total_norm)
        optimizer = self.optimizer
        scale = optimizer.loss_scale
        if optimizer.clip_grad > 0.0:
            scale = torch.clamp((total_norm / scale + 1e-6) / optimizer.clip_grad, min=1.0) * scale
        self.scale = float(scale)

    def optimizer_step(self, sub_group: int) -> None:
        """Update the sub-group, parameter by parameter where `cut` could."""
        current, gradients = self.current, self.pending
        if current is None:
            return self.theirs["_optimizer_step"](sub_group)
        self.current, self.pending = None, []
        inner, param_group = self.optimizer.optimizer, self.optimizer.sub_group_to_group_id[sub_group]
        divides = self.scale != 1.0 and getattr(inner, "_step_supports_amp_scaling", False)
        batches = self.batches(gradients, current.masters.dtype, 1.0 if divides else self.scale)
        if divides:  # as it does for a GradScaler
            inner.grad_scale = torch.full((), self.scale, device=current.masters.device)
        try:
            current.update(inner, param_group, batches)
        finally:
            inner.__dict__.pop("grad_scale", None)

    def zero_grad(self, *args, **kwargs) -> None:
        """A step that is on its way has its gradients in `averaged_gradients`."""
        self.theirs["zero_grad"](*args, **kwargs)
        if self.kept is not None:
            self.kept.clear()

    def offload_states(self, *args, **kwargs) -> None:
        """DeepSpeed offloads its buffers, so it is given them."""
        if self.kept is not None:
            self.offloaded = set(self.kept)
            self.give_buffers()
        self.theirs["offload_states"](*args, **kwargs)

    def reload_states(self, *args, **kwargs) -> None:
        """Gradients that were there are kept again, and masters that came back as copies are partitions again."""
        self.theirs["reload_states"](*args, **kwargs)
        if self.kept is None:
            reloaded = self.optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
            self.take_buffers()
            self.kept.update({ds_id: reloaded[ds_id].clone() for ds_id in self.offloaded})
        self.alias_masters()

    def batches(self, gradients: list[torch.Tensor], dtype: torch.dtype, scale: float) -> Iterator[list[torch.Tensor]]:
        """These gradients, divided by `scale` and in `dtype`: one batch if they need no cast, else of some CAST_BYTES."""
        batch, cast_bytes = [], 0
        gradients.reverse()
        while gradients:
            grad = gradients.pop()  # so that it is freed when it has been cast
            cast_bytes += grad.numel() * dtype.itemsize if grad.dtype != dtype else 0
            batch.append(grad.to(dtype).contiguous())
            if cast_bytes >= self.CAST_BYTES or not gradients:
                if scale != 1.0:
                    torch._foreach_mul_(batch, 1.0 / scale)
                yield batch
                batch, cast_bytes = [], 0

    def cut(self, sub_group: int) -> "SubGroup | None":
        """The sub-group cut into its parameters; None if the optimizer must see it whole."""
        optimizer = self.optimizer
        inner, masters = optimizer.optimizer, optimizer.fp32_partitioned_groups_flat[sub_group]
        elementwise = f"{type(inner).__module__}.{type(inner).__name__}" in ELEMENTWISE
        hooks = (
            inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks
        )  # these expect one step of one parameter
        if (
            not elementwise
            or hooks
            or getattr(optimizer, "torch_autocast_gradscaler", None)
            or not inner.state.get(masters)
        ):
            return None
        lengths = [parameter.partition_numel() for parameter in optimizer.fp16_groups[sub_group]]
        return SubGroup(masters, inner.state[masters], lengths)


# Optimizers that treat every element alone, whose state is tensors like the parameter, and counts of steps.
ELEMENTWISE = ("torch.optim.adam.Adam", "torch.optim.adamw.AdamW", "deepspeed.ops.adam.fused_adam.FusedAdam")


class SubGroup:
    """One flat master of a stage-3 optimizer and its state, as views [elements of a partition] of the parameters in it."""

    def __init__(self, masters: nn.Parameter, state: dict[str, Any], lengths: list[int]):
        self.masters = masters
        self.state = state
        self.numbers = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
        self.views = masters.detach().split(lengths)
        self.states: list[dict[str, Any]] = [dict(self.numbers) for _ in lengths]
        self.counts: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        for name, value in state.items():
            if name in self.numbers:
                continue
            if value.shape == masters.shape:
                parts = value.split(lengths)
            else:  # a count, to go up once: the first view has the tensor itself, the others copies
                copies = list(value.new_empty(len(lengths) - 1, *value.shape))
                self.counts.append((value, copies))
                parts = [value, *copies]
            for of_view, part in zip(self.states, parts, strict=True):
                of_view[name] = part

    def update(self, inner: torch.optim.Optimizer, param_group: int, batches: Iterator[list[torch.Tensor]]) -> None:
        """Step with these gradients, which come in the order of the parameters."""
        for count, copies in self.counts:  # now: sub-groups may share it
            torch._foreach_copy_(copies, [count] * len(copies))
        pairs = zip(self.views, self.states)
        for grads in batches:
            part = [next(pairs) for _ in grads]
            try:
                for (view, state), grad in zip(part, grads, strict=True):
                    view.grad = grad
                    inner.state[view] = state
                inner.param_groups[param_group]["params"] = [view for view, _ in part]
                inner.step()
            finally:
                inner.param_groups[param_group]["params"] = []
                for view, _ in part:
                    view.grad = None
                    inner.state.pop(view, None)
            self.state.update({name: part[-1][1][name] for name in self.numbers})  # FusedAdam counts in the last one
