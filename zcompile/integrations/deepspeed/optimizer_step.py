"""The step of a ZeRO-3 optimizer, without copies of gradients and main parameters.

`LeanStep` keeps each gradient in the tensor that its reduce wrote. An elementwise optimizer (Adam) reads the gradient
there, and updates the parameter's view of DeepSpeed's flat main parameter and states. The results are DeepSpeed's,
except:

- On a GPU, the gradient norm may differ in its last bits, because it is summed in fp64 and in another order.
- A fused Adam divides gradients by the loss scale (and clipping) itself. DeepSpeed multiplies them by the inverse.
- A parameter without a gradient in this step gets zeros. DeepSpeed uses the gradient of an earlier step in its buffer.
- With fp32 partitions, a write to a partition lasts. DeepSpeed overwrites the partition from a separate main parameter.

In fp16, DeepSpeed's own step runs, because its check for overflows reads the flat buffer of gradients. It also runs
with an offloaded optimizer, unless host_sub_groups.py can step the offloaded states on the device.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from zcompile.integrations.deepspeed.gradients import Gradients, ReducedSquares, add
from zcompile.integrations.deepspeed.host_sub_groups import HostSubGroup, can_stream, resume_offloading, stop_offloading
from zcompile.integrations.deepspeed.partitions import ZeroParameter
from zcompile.integrations.deepspeed.sub_groups import SubGroup, cast_batches
from zcompile.training.host_link import HostLink, host_link_of

ELEMENTWISE = ("torch.optim.adam.Adam", "torch.optim.adamw.AdamW", "deepspeed.ops.adam.fused_adam.FusedAdam")
"""Optimizers that update each element alone. Their state is tensors of the parameter's shape, and counts of steps."""


class LeanStep:
    """Replaces methods of one stage-3 optimizer, and frees its gradient buffers, from `install()` to `remove()`."""

    EDITING = ("set_fp32_grad_for_param", "set_local_grad_for_param")
    REPLACED = (
        "_get_norm_groups",
        "_prepare_fp32_grad_for_sub_group",
        "unscale_and_clip_grads",
        "_optimizer_step",
        "zero_grad",
        "offload_states",
        "reload_states",
    )
    CAST_BYTES = 512 << 20  # size, after the cast, of the gradients that are cast together

    def __init__(
        self, optimizer: Any, fail: Callable[[str, Exception], None], reduced_squares: ReducedSquares | None = None
    ):
        """
        Args:
            optimizer: a DeepSpeedZeroOptimizer_Stage3.
            fail: `fail(doing, error)` calls `remove()`, and lets DeepSpeed train without zcompile from now on.
            reduced_squares: sums of squares that reduces computed; None if gradients are added up over microbatches.
        """
        self.optimizer = optimizer
        self.fail = fail
        self.reduced_squares = reduced_squares
        self.last_backward: dict[int, int] = {}  # `ds_id` -> id of the last backward that gave a gradient
        self.originals: dict[str, Callable[..., Any]] = {}  # DeepSpeed's methods, by name
        self.sub_groups: dict[int, SubGroup | HostSubGroup | None] = {}  # of the running step
        self.current: SubGroup | HostSubGroup | None = None  # the sub-group that is updated next
        self.pending: list[torch.Tensor] = []  # the gradients of `current`
        self.scale = 1.0  # divisor of `pending`
        self.offloaded: set[int] = set()  # `ds_id`s of gradients that DeepSpeed has offloaded
        self.cached_gradients: Gradients | None = None  # None while DeepSpeed has its own buffers
        self.device = optimizer.fp16_partitioned_groups_flat[0].device  # of partitions and gradients
        self.link: HostLink | None = host_link_of(self.device) if optimizer.offload_optimizer else None

    @staticmethod
    def is_possible(optimizer: Any) -> bool:
        """Whether `optimizer` can do without its gradient buffers, which fp16 overflow checks and host steps read."""
        streams = not optimizer.offload_optimizer or can_stream(optimizer, _is_elementwise(optimizer.optimizer))
        return optimizer.dtype != torch.float16 and streams

    @property
    def gradients(self) -> Gradients:
        if self.cached_gradients is None:
            raise RuntimeError("zcompile: this engine's states are offloaded; call engine.reload_states() first.")
        return self.cached_gradients

    def install(self) -> None:
        self.alias_main_parameters()
        self.cached_gradients = Gradients(self.optimizer, self.device)
        replaced: tuple[str, ...] = self.REPLACED
        if self.link is not None:
            stop_offloading(self.optimizer)
            replaced += ("_reassign_or_swap_out_partitioned_parameters",)
        for name in replaced:
            self.originals[name] = getattr(self.optimizer, name)
            setattr(self.optimizer, name, getattr(self, name.lstrip("_")))
        for name in self.EDITING:
            self.originals[name] = getattr(self.optimizer, name)
            setattr(self.optimizer, name, functools.partial(self.edit, name))

    def remove(self, restore_buffers: bool) -> None:
        """Restore DeepSpeed's methods and, with `restore_buffers`, its buffers, filled with this step's gradients."""
        while self.originals:
            self.optimizer.__dict__.pop(self.originals.popitem()[0], None)
        self.reduced_squares = None  # drops its reference to the runtime
        self.forget_step()
        if self.link is not None:
            resume_offloading(self.optimizer, self.link, self.cached_gradients if restore_buffers else None)
        if restore_buffers:
            self.restore_buffers()

    def alias_main_parameters(self) -> None:
        """Store DeepSpeed's flat main parameters in the memory of their partitions, if dtypes and devices are equal."""
        optimizer = self.optimizer
        if self.link is not None:
            return
        for main, partitions in zip(
            optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat, strict=True
        ):
            if main.dtype == partitions.dtype and main.device == partitions.device:
                partitions.data.copy_(main.data)
                main.data = partitions.data

    def restore_buffers(self) -> None:
        if self.cached_gradients is not None:
            self.cached_gradients.restore_buffers(self.optimizer)
            self.cached_gradients = None

    def accept(
        self,
        parameter: ZeroParameter,
        grad: torch.Tensor,
        accumulate: Callable[[torch.Tensor | None, torch.Tensor], torch.Tensor] = add,
    ) -> None:
        """Store the reduced `grad`, [elements of the partition with padding], or add it to earlier ones of the step."""
        optimizer, gradients, ds_id = self.optimizer, self.gradients, parameter.ds_id
        grad = grad.to(optimizer.gradient_accumulation_dtype)
        # A gradient that only other ranks computed arrives last. With `loss.backward()`, DeepSpeed's epilogue has then
        # already listed the tensors of `gradients`. So the gradient is copied into the listed tensor.
        is_late = getattr(optimizer, "_epilogue_ran_this_backward", False)
        if optimizer.micro_step_id == 0 and not is_late:
            optimizer.averaged_gradients = {}  # drops gradients of a step that was skipped
        # If this rank uses a parameter in one call of its module, and only other ranks use it in another call, the same
        # backward gives two gradients.
        backward = torch._C._current_graph_task_id()
        same_backward = self.last_backward.get(ds_id, -1) == backward != -1
        self.last_backward[ds_id] = backward
        first = ds_id not in gradients or (optimizer.micro_step_id == 0 and not same_backward)
        total = accumulate(None if first else gradients[ds_id], grad)
        gradients[ds_id] = gradients[ds_id].copy_(total) if is_late else total
        if first and self.reduced_squares and not is_late:
            self.reduced_squares.note(parameter, grad)  # later additions change the version

    def forget_step(self) -> None:
        """Drop the sub-groups and gradients of a step that has begun."""
        self.sub_groups, self.current, self.pending = {}, None, []

    def square(self, sub_group: int) -> torch.Tensor:
        """Return the sum of squares of the gradients of sub-group `sub_group` on this rank, an fp64 scalar."""
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

    def cut(self, sub_group: int) -> SubGroup | HostSubGroup | None:
        """Return a sub-group, to step it parameter by parameter; None if it must step as one flat parameter."""
        optimizer = self.optimizer
        inner, flat = optimizer.optimizer, optimizer.fp32_partitioned_groups_flat[sub_group]
        lengths = [each.partition_numel() for each in optimizer.fp16_groups[sub_group]]
        # Step hooks expect one step of one flat parameter.
        step_hooks = inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks
        scaler = getattr(optimizer, "torch_autocast_gradscaler", None)
        if self.link is not None:
            if step_hooks or scaler:
                raise RuntimeError(
                    "zcompile cannot step offloaded states of an optimizer with "
                    f"{'step hooks' if step_hooks else 'a gradient scaler, as torch_autocast in float16 has'}. Remove "
                    f"{'the hooks' if step_hooks else 'float16'}, or offload_optimizer."
                )
            return HostSubGroup(flat, lengths, optimizer.fp16_partitioned_groups_flat[sub_group], self.link)
        if not _is_elementwise(inner) or step_hooks or scaler or not inner.state.get(flat):
            return None
        return SubGroup(flat, inner.state[flat], lengths)

    # --- Replacements of the optimizer's methods, in the order in which a step calls them ---

    def get_norm_groups(self) -> list[torch.Tensor]:
        """Return each sub-group's gradient norm over all ranks (-1: inf or NaN), on the host. Waits for the device."""
        optimizer = self.optimizer
        if optimizer.model_parallel_group is not None:  # DeepSpeed must count parameters that these ranks share once
            return self.originals["_get_norm_groups"]()
        try:
            sub_groups = range(len(optimizer.fp16_groups))
            squares = torch.stack([self.square(i) for i in sub_groups])
            self.sub_groups = {i: self.cut(i) for i in sub_groups}  # while the device computes the squares
            if self.reduced_squares:
                self.reduced_squares.forget()
        except Exception as error:
            self.fail("the step", error)
            return optimizer._get_norm_groups()
        torch.distributed.all_reduce(squares, group=optimizer.dp_process_group)
        norms = torch.where(squares.isfinite(), squares.sqrt(), -1.0).cpu()
        if -1.0 in norms.tolist():
            # DeepSpeed (since 0.19) skips this step. So drop here the gradients that its updates would drop.
            self.forget_step()
            self.gradients.clear()
        return list(norms)

    def prepare_fp32_grad_for_sub_group(self, sub_group: int) -> None:
        """Put a sub-group's gradients in `pending`, or let DeepSpeed flatten them if `cut` gave None."""
        optimizer = self.optimizer
        try:
            self.current = self.sub_groups.pop(sub_group) if sub_group in self.sub_groups else self.cut(sub_group)
        except Exception as error:
            self.fail("the step", error)
            if self.link is None:  # with offload, `fail` has restored the gradients
                optimizer._prepare_fp32_grad_for_sub_group(sub_group)
            return
        if self.current is None:
            self.originals["_prepare_fp32_grad_for_sub_group"](sub_group)
        else:
            self.pending = optimizer.averaged_gradients[sub_group]
            optimizer.averaged_gradients[sub_group] = None
        for parameter in optimizer.fp16_groups[sub_group]:
            self.gradients.pop(parameter.ds_id, None)

    def unscale_and_clip_grads(self, sub_group: int, total_norm: torch.Tensor | float) -> None:
        """Compute on the host the number by which `optimizer_step` divides gradients, from loss scale and clipping."""
        if self.current is None:
            return self.originals["unscale_and_clip_grads"](sub_group, total_norm)
        optimizer = self.optimizer
        scale = optimizer.loss_scale
        if optimizer.clip_grad > 0.0:
            scale = torch.clamp((total_norm / scale + 1e-6) / optimizer.clip_grad, min=1.0) * scale
        self.scale = float(scale)

    def optimizer_step(self, sub_group: int) -> None:
        """Update the sub-group, parameter by parameter if `cut` found this possible."""
        current, gradients = self.current, self.pending
        if current is None:
            return self.originals["_optimizer_step"](sub_group)
        self.current, self.pending = None, []
        inner, param_group = self.optimizer.optimizer, self.optimizer.sub_group_to_group_id[sub_group]
        divides = self.scale != 1.0 and getattr(inner, "_step_supports_amp_scaling", False)
        divides = divides and bool(inner.state.get(current.flat))  # no state: the first step of offloaded states
        batches = cast_batches(gradients, current.flat.dtype, 1.0 if divides else self.scale, self.CAST_BYTES)
        if divides:  # the optimizer divides gradients itself, as for a GradScaler
            inner.grad_scale = torch.full((), self.scale, device=self.device)
        try:
            current.update(inner, param_group, batches)
        finally:
            inner.__dict__.pop("grad_scale", None)

    def reassign_or_swap_out_partitioned_parameters(self, sub_group: int) -> None:
        """Let parameters view the partitions on the device again, to which `HostSubGroup` has written new values."""
        self.optimizer._unflatten_partitioned_parameters(sub_group)

    # --- Replacements of methods that users call between steps ---

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Call DeepSpeed's method, and empty `gradients`. A step also calls this, but reads `averaged_gradients`."""
        self.originals["zero_grad"](*args, **kwargs)
        if self.cached_gradients is not None:
            self.cached_gradients.clear()

    def edit(self, name: str, value: torch.Tensor, parameter: ZeroParameter) -> None:
        """Let DeepSpeed's method `name` edit a gradient, and increment its version, so that `square` sums it anew."""
        self.originals[name](value, parameter)
        if self.cached_gradients is not None and parameter.requires_grad:
            torch.autograd.graph.increment_version(self.cached_gradients[parameter.ds_id])

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Restore DeepSpeed's gradient buffers, and then call its method, which offloads them."""
        if self.cached_gradients is not None:
            self.offloaded = set(self.cached_gradients)
            self.restore_buffers()
        self.originals["offload_states"](*args, **kwargs)

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Call DeepSpeed's method. Then free the gradient buffers and copies of main parameters that it reloaded."""
        self.originals["reload_states"](*args, **kwargs)
        if self.cached_gradients is None:
            reloaded = getattr(self.optimizer, Gradients.PLACE)
            self.cached_gradients = Gradients(self.optimizer, self.device)
            self.cached_gradients.update({ds_id: reloaded[ds_id].clone() for ds_id in self.offloaded})
        self.alias_main_parameters()


def _is_elementwise(inner: torch.optim.Optimizer) -> bool:
    return f"{type(inner).__module__}.{type(inner).__name__}" in ELEMENTWISE
