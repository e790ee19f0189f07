"""A step of Adam or AdamW that also writes the low-precision copies of shards that peers gather.

With the p2p transport, each rank keeps copies of its shards in `param_dtype`, which peers read. A later cast would read
all main parameters again, so the kernel that computes them also writes the copies. torch's own `step` runs: a dispatch
mode replaces only its call of the fused kernel. The order of parameters: csrc/p2p/schedule/adam_schedule.h.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from zcompile.sharding.class_swap import read_narrow_shards
from zcompile.state.sharded_model import ShardedModel, models_of, state_of
from zcompile.training.local_parts import are_alike, local_of
from zcompile.training.main_parameters import note_writes
from zcompile.training.offload import COUNTS, Offload, Tensors
from zcompile.training.step_in_backward import StepInBackward

ADAM, ADAMW = torch.ops.aten._fused_adam_.default, torch.ops.aten._fused_adamw_.default
MAXIMA = 4  # index of their argument `max_exp_avg_sqs`, for amsgrad
OFFLOADS = "moments", "states"


def fuse_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    offload: str | None = None,
    step_in_backward: bool = False,
) -> torch.optim.Optimizer:
    """Let `optimizer.step` also write the shards that the next forward gathers, and free gradients.

    With the p2p transport, this saves one read of all main parameters in each step. With others, steps run torch's
    kernel. Results do not change, with one exception: on one rank, under Inductor, with `offload="states"`, parameters
    are rounded to `param_dtype`. Without offload, Inductor fuses that cast and omits the rounding.

    `step()` sets `.grad` of the model's parameters to None, because it may write to the memory of gradients. To use a
    gradient after the step, also in a hook, clone it before the step. Between a step and the next forward, change
    parameters only by in-place operations under `torch.no_grad()` or by `load_state_dict`. After a write through
    `.data`, by `torch._foreach_*` or by another optimizer, that forward still reads the old values. Schedulers,
    GradScaler, and the optimizer's state and checkpoints work as usual. With GradScaler, and for `Adam` with weight
    decay, steps run torch's kernel. Call this on all ranks or on none; all ranks must step.

    Args:
        model: a model that `zcompile.shard` has sharded. A later compile may still choose its transport.
        optimizer: `torch.optim.Adam` or `AdamW` with `fused=True`; it may also hold parameters of other models.
        offload: the states to keep in pinned host memory. Default: none.

            - "moments": both Adam moments of the model's parameters, which must be float32. A step copies them to the
              GPU and back, group by group. Main parameters and gradients stay on the GPU. After a step, do not use a
              moment that you read earlier: read it again from `optimizer.state` or `optimizer.state_dict()`.
            - "states": also main parameters that are always gathered in one narrower dtype. The GPU keeps a copy of
              the shard in that dtype for gathers; all other reads and writes of the parameter access host memory.
              Parameters with a `param_dtype` move in this call, others in the first step after a forward. The first
              step warns if more than 1 % of the bytes of main parameters stay on the GPU, and says why.
        step_in_backward: update parameters during backward, while it computes gradients of other parameters. This
            hides the copies of states, so it needs `offload`. `optimizer.step()` updates the remaining parameters, and
            waits for all. When backward returns, gradients are gone: to clip, scale or read them, use hooks that
            `register_post_accumulate_grad_hook` adds. Run one backward for each `optimizer.step()`, or several inside
            of `zcompile.accumulate`; then `optimizer.step()` updates all parameters. Set the learning rate before
            backward, and read parameters after `optimizer.step()`. Compile each layer on its own, because a compiled
            graph delivers all of its gradients at its end.

    Returns:
        `optimizer`, with its `step` replaced.

    Raises:
        RuntimeError: `model` is not sharded.
        ValueError: `optimizer` is of another class, not fused, or has `amsgrad`, `maximize` or a tensor as learning
            rate; `offload` has another value; `offload` or `step_in_backward` differs from an earlier call's; with
            `offload`, a parameter is not float32; "states" with `zcompile.shard(states="global")`; `step_in_backward`
            without `offload`.
    """
    state = state_of(model)
    _check_optimizer(optimizer)
    if offload is not None and offload not in OFFLOADS:
        raise ValueError(
            f"zcompile.fuse_optimizer: offload must be None, {' or '.join(map(repr, OFFLOADS))}, not {offload!r}."
        )
    if offload == "states" and state.over_hosts:
        raise ValueError(
            "zcompile.fuse_optimizer: offload='states' is not possible with zcompile.shard(states='global'): there, "
            "ranks all-gather main parameters over hosts after each step, which would then read host memory. Take "
            "offload='moments'."
        )
    if step_in_backward and offload is None:
        raise ValueError("zcompile.fuse_optimizer: step_in_backward=True needs offload= as well: set both, or none.")
    inner: Any = optimizer.step
    models = getattr(inner, "fused_by_zcompile", ())
    if any(each() is state for each in models):
        before = [each for each in getattr(optimizer.state, "offloads", ()) if each.model() is state]
        asked = [(offload, step_in_backward)] * (offload is not None)
        if [(each.kind, each.in_backward) for each in before] != asked:
            raise ValueError(
                "zcompile.fuse_optimizer was called before for this model and optimizer, with another offload or "
                "step_in_backward: remove one of the calls."
            )
        return optimizer
    unbound = getattr(inner, "__func__", None)
    if unbound is None:  # a scheduler has wrapped `step` before
        unbound = functools.wraps(inner)(lambda self: inner())
    offloading = None if offload is None else Offload(offload, state, optimizer)
    mode = StepMode(state, offloading)
    early = None
    if offloading is not None and step_in_backward:
        offloading.in_backward = True
        early = StepInBackward(optimizer, offloading, mode)
    fused: Any = _fused_step(unbound, mode, early)
    for each in models_of(state) if offloading is not None else ():
        each.offloads.add(offloading)
    if offload == "states":
        read_narrow_shards(state)
    fused.fused_by_zcompile = (*models, weakref.ref(state))
    # Weak, because a cycle would keep the optimizer and its states alive until the next garbage collection.
    reference = weakref.ref(optimizer)

    @functools.wraps(fused)
    def step(closure: Any = None) -> Any:
        return fused(reference(), closure)

    bound: Any = step
    bound.__func__ = fused  # schedulers expect a bound method, which has this attribute
    vars(optimizer)["step"] = step
    return optimizer


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError unless the fused kernels of transports can compute the step of `optimizer`."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ValueError(
            f"zcompile.fuse_optimizer takes Adam and AdamW, not {type(optimizer).__name__}. Leave the call out."
        )
    for group in optimizer.param_groups:
        if not group["fused"] or group["amsgrad"] or group["maximize"] or isinstance(group["lr"], torch.Tensor):
            raise ValueError(
                "zcompile.fuse_optimizer needs fused=True, and neither amsgrad, maximize nor a tensor as learning rate."
            )


def _fused_step(unbound: Callable[..., Any], mode: "StepMode", early: StepInBackward | None) -> Callable[..., Any]:
    """Wrap `unbound`, an optimizer's step: run it under `mode`, then set gradients to None."""
    offload = mode.offload

    @functools.wraps(unbound)  # keeps attributes that schedulers and others set on it
    def fused(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if early is not None:
            early.finish(self)
        with offload.step(self) if offload else contextlib.nullcontext(), mode:
            unbound(self)
        model = mode.state
        models = [] if model is None else models_of(model)
        ours = {id(sharded.parameter) for each in models for sharded in each.parameters.values()}
        stepped = [parameter for group in self.param_groups for parameter in group["params"] if id(parameter) in ours]
        for parameter in stepped:
            parameter.grad = None
        if offload is None:  # an earlier optimizer may have moved main parameters to the host
            note_writes(stepped)
        return loss

    return fused


class StepMode(TorchDispatchMode):
    """A dispatch mode that replaces torch's fused Adam kernel by the transport's, for parameters of the model.

    If the transport has no such kernel, torch's kernel updates the local shards.
    """

    def __init__(self, state: ShardedModel, offload: Offload | None = None):
        super().__init__()
        self.reference = weakref.ref(state)  # an optimizer must not hold a model
        self.offload = offload
        self.refreshes_cache = False  # whether some step wrote the transport's copies of shards
        self.in_backward = False  # whether a step in backward runs, which must not write the transport's copies

    @property
    def state(self) -> ShardedModel | None:
        """The model; None after it was freed. Steps then run torch's kernel."""
        return self.reference()

    @contextlib.contextmanager
    def stepping_in_backward(self) -> Iterator[None]:
        self.in_backward = True
        try:
            with self:
                yield
        finally:
            self.in_backward = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, state = kwargs or {}, self.state
        if func not in (ADAM, ADAMW) or state is None:
            return func(*args, **kwargs)
        parameters = args[0]
        # Without parameters that have all-gather hooks: a tensor subclass implements the ops of a step itself.
        plain = [sharded for sharded in state.parameters.values() if sharded.hooked is None]
        index_of = {id(sharded.parameter): sharded.index for sharded in plain}
        ours = [i for i, parameter in enumerate(parameters) if id(parameter) in index_of]
        is_scaled = kwargs.get("grad_scale") is not None or kwargs.get("found_inf") is not None  # maybe DTensors
        if not ours or is_scaled or not all(_are_sharded_alike(args, i) for i in ours):
            if self.refreshes_cache:
                torch.autograd.graph.increment_version([local_of(parameters[i]) for i in ours])
            self._step_others(func, args, kwargs)
            return None
        offload = self.offload
        hosted = [] if offload is None else [i for i in ours if offload.has_moments_of(parameters[i], args, i)]
        for places in (hosted, [i for i in ours if i not in hosted] if hosted else ours):
            if not places:
                continue
            local = [[local_of(tensor) for tensor in values] for values in _taken(args, places)]
            stepped = [parameters[i] for i in places]
            step = functools.partial(self._step_shards, func, stepped, index_of, kwargs)
            if offload is not None and places is hosted:
                offload.stream(stepped, local, step)
            else:
                step(range(len(places)), range(len(places)), local)
        if len(ours) < len(parameters):
            others = [i for i, parameter in enumerate(parameters) if id(parameter) not in index_of]
            self._step_others(func, _taken(args, others), kwargs)
        return None

    def _step_shards(
        self,
        func: Any,
        parameters: list[Any],
        index_of: dict[int, int],
        kwargs: dict[str, Any],
        items: Sequence[int],
        done: Sequence[int],
        tensors: Tensors,
    ) -> None:
        """Update this rank's shards by the transport's kernel if it supports the step, else by torch's kernel.

        `items`, `done`, `tensors`: see `Step` in offload.py. Tensors are local: ops on DTensors take more host time.
        """
        state, settings = self.state, {name: kwargs[name] for name in ("lr", "beta1", "beta2", "weight_decay", "eps")}
        assert state is not None
        indices = [index_of[id(parameters[item])] for item in items]
        needed = [values for i, values in enumerate(tensors) if i != MAXIMA]
        plain = _is_plain(func, kwargs) and not self.in_backward
        if plain and state.runtime.fused_adam_step(indices, needed, **settings):
            self.refreshes_cache = True
            # Now, not after the step: a hook could write to a gradient, whose memory may hold the transport's copies.
            for item in done:
                parameters[item].grad = None
            return
        if self.refreshes_cache:
            # torch's kernel does not write the transport's copies: mark those of an earlier step as out of date.
            torch.autograd.graph.increment_version(tensors[0])
        func(*tensors, **kwargs)

    def _step_others(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Run torch's kernel on `args`, with moments in host memory streamed (offload.py)."""
        offload, scales = self.offload, [kwargs.get(name) for name in ("grad_scale", "found_inf")]
        if offload is None:
            func(*args, **kwargs)
            return
        hosted = [i for i, parameter in enumerate(args[0]) if offload.has_moments_of(parameter, args, i)]
        alike = [i for i in hosted if _are_sharded_alike(args, i)]
        if any(isinstance(scale, DTensor) for scale in scales):
            alike = []
        if alike:
            local = [[local_of(tensor) for tensor in values] for values in _taken(args, alike)]
            offload.stream([args[0][i] for i in alike], local, lambda _, __, tensors: func(*tensors, **kwargs))
        if odd := sorted({*hosted} - {*alike}):
            with offload.on_device(_taken(args, odd)) as tensors:
                func(*tensors, **kwargs)
        if rest := sorted({*range(len(args[0]))} - {*hosted}):
            func(*_taken(args, rest), **kwargs)


def _taken(args: Sequence[Any], places: list[int]) -> Tensors:
    """Select the entries at `places` of each list in a fused kernel's `args`; amsgrad's list may be empty."""
    return [[values[i] for i in places] if values else [] for values in args]


def _is_plain(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a transport's fused kernel can compute the step; `load_state_dict` may have changed parameter groups."""
    if kwargs["amsgrad"] or kwargs["maximize"]:
        return False
    return func is ADAMW or kwargs["weight_decay"] == 0


def _are_sharded_alike(args: Sequence[Any], i: int) -> bool:
    """Whether parameter `i`, its gradient and moments are sharded alike, so that each rank can step its shard alone."""
    return are_alike([getattr(values[i], "_spec", None) for values in args[:COUNTS] if values])
