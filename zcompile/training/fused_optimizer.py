"""A step of Adam or AdamW that also writes the low-precision copies of shards that peers gather.

With the p2p transport, each rank keeps copies of its shards in `param_dtype`, which peers read. A later cast would read
all main parameters again, so the kernel that computes them also writes the copies. torch's own `step` runs, but for the
model's parameters it calls no kernel; see `LocalStep`. The order of parameters: csrc/p2p/schedule/adam_schedule.h.
"""

import contextlib
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam

from zcompile.sharding.class_swap import read_narrow_shards
from zcompile.state.sharded_model import ShardedModel, models_of, state_of
from zcompile.training.local_parts import are_alike, local_of
from zcompile.training.main_parameters import note_writes
from zcompile.training.offload import COUNTS, FIRST_MOMENT, MOMENTS, Offload, Tensors
from zcompile.training.step_in_backward import StepInBackward

SETTINGS = "lr", "weight_decay", "eps", "amsgrad", "maximize"  # of a parameter group, which kernels get, with betas
SCALES = "grad_scale", "found_inf"  # attributes that a GradScaler sets on an optimizer during its step
MAXIMA = 4  # index of `max_exp_avg_sqs`, for amsgrad, in the arguments of torch's fused kernel
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
    local = LocalStep(state, optimizer, offloading)
    early = None
    if offloading is not None and step_in_backward:
        offloading.in_backward = True
        early = StepInBackward(optimizer, offloading, local)
    fused: Any = _fused_step(unbound, local, early)
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


def _scales_of(optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Return {name: tensor} of the attributes that a GradScaler has set on `optimizer` for this step."""
    return {name: scale for name in SCALES if (scale := getattr(optimizer, name, None)) is not None}


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError unless `optimizer` is a fused Adam or AdamW whose groups have no unsupported setting."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ValueError(
            f"zcompile.fuse_optimizer takes Adam and AdamW, not {type(optimizer).__name__}. Leave the call out."
        )
    for group in optimizer.param_groups:
        if not group["fused"] or group["amsgrad"] or group["maximize"] or isinstance(group["lr"], torch.Tensor):
            raise ValueError(
                "zcompile.fuse_optimizer needs fused=True, and neither amsgrad, maximize nor a tensor as learning rate."
            )


def _fused_step(unbound: Callable[..., Any], local: "LocalStep", early: StepInBackward | None) -> Callable[..., Any]:
    """Return a step that calls `unbound`, the optimizer's own, then sets `.grad` of the model's parameters to None."""
    offload = local.offload

    @torch.compiler.disable  # torch.compile(optimizer.step) runs it in eager
    @functools.wraps(unbound)  # keeps attributes that schedulers and others set on it
    def fused(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if early is not None:
            early.finish(self)
        with offload.step(self) if offload else contextlib.nullcontext():
            unbound(self)
        model = local.state
        models = [] if model is None else models_of(model)
        ours = {id(sharded.parameter): sharded for each in models for sharded in each.parameters.values()}
        stepped = [parameter for group in self.param_groups for parameter in group["params"] if id(parameter) in ours]
        for parameter in stepped:
            parameter.grad = None
        if offload is None:
            # An earlier optimizer may have moved main parameters to the host.
            note_writes(parameter for parameter in stepped if ours[id(parameter)].on_host is not None)
        return loss

    return fused


class LocalStep:
    """Steps the parameters of one model on local tensors, because ops on DTensors take more host time.

    torch's step calls `optimizer._init_group` for each parameter group, to collect tensors for its kernel. `collect`
    replaces this method: it steps the model's parameters, and lets torch collect those of others.
    """

    def __init__(self, state: ShardedModel, optimizer: torch.optim.Optimizer, offload: Offload | None = None):
        # Weak: an optimizer must not hold a model, and a cycle would keep the optimizer's states in memory.
        self.reference, self.optimizer = weakref.ref(state), weakref.ref(optimizer)
        self.offload = offload
        self.collect_others = vars(optimizer).get("_init_group")  # of another model with this optimizer
        self.refreshes_cache = False  # whether some step wrote the transport's copies of shards
        self.in_backward = False  # whether a step in backward runs, which must not write the transport's copies
        cast(Any, optimizer)._init_group = self.collect

    @property
    def state(self) -> ShardedModel | None:
        """The model; None after it was freed. Steps then run torch's kernel."""
        return self.reference()

    @contextlib.contextmanager
    def stepping_in_backward(self) -> Iterator[None]:
        self.in_backward = True
        try:
            yield
        finally:
            self.in_backward = False

    def collect(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        """Step the model's parameters in `group`. Append the tensors of the rest to `lists`, as `_init_group` does.

        torch then steps the rest: parameters that are not the model's, or that have all-gather hooks. The rest includes
        parameters that are sharded unlike their gradients or moments, or that a GradScaler unscales, unless their
        moments lie in host memory. `_init_group` makes missing states.
        """
        optimizer, state = cast(Any, self.optimizer()), self.state
        collect = self.collect_others or functools.partial(type(optimizer)._init_group, optimizer)
        if state is None:
            return bool(collect(group, *lists))
        # torch steps parameters with all-gather hooks, because a tensor subclass implements the ops of a step itself.
        plain = [each for model in models_of(state) for each in model.parameters.values() if each.hooked is None]
        known = {id(sharded.parameter) for sharded in plain}
        index_of = {id(each.parameter): each.index for each in state.parameters.values()}  # without units, other meshes
        gradients = {each: each.grad for each in group["params"] if id(each) in known}
        ours = {parameter: grad for parameter, grad in gradients.items() if grad is not None}
        if new := [parameter for parameter in ours if not optimizer.state.get(parameter)]:
            collect({**group, "params": new}, *([] for _ in lists))
        scales = _scales_of(optimizer)
        is_plain = not any(isinstance(scale, DTensor) for scale in scales.values())
        is_plain &= not any(isinstance(number, torch.Tensor) for number in (group["lr"], *group["betas"]))
        names = (*MOMENTS, *(["max_exp_avg_sq"] * group["amsgrad"]))
        kinds: dict[Any, list[Any]] = defaultdict(list)  # by how they are stepped, rows of a parameter's tensors
        left = []
        for parameter, grad in ours.items():
            own = optimizer.state[parameter]
            row = [parameter, grad, *(own[name] for name in names)]
            is_hosted = self.offload is not None and self.offload.has_moments_of(parameter, row[FIRST_MOMENT:])
            is_alike = is_plain and are_alike([getattr(tensor, "_spec", None) for tensor in row])
            if is_hosted or (is_alike and not scales):
                kind = local_of(parameter).dtype, id(parameter) in index_of, is_hosted, is_alike
                kinds[kind].append([*row, own["step"]])
            else:
                left.append(parameter)
        for (_, is_own, is_hosted, is_alike), rows in kinds.items():
            tensors = [list(values) for values in zip(*rows, strict=True)]
            if not group["amsgrad"]:
                tensors.insert(MAXIMA, [])
            self._step(group, tensors, index_of if is_own else {}, is_hosted, is_alike)
        self._expire_copies([local_of(parameter) for parameter in left])
        stepped = {id(parameter) for parameter in ours}.difference(map(id, left))
        return bool(collect({**group, "params": [each for each in group["params"] if id(each) not in stepped]}, *lists))

    def _step(
        self, group: dict[str, Any], tensors: Tensors, index_of: dict[int, int], is_hosted: bool, is_alike: bool
    ) -> None:
        """Step parameters of one dtype. `tensors`: DTensors, in the lists that torch's fused kernel takes.

        `index_of`: {id of a parameter: its index in the runtime}; empty for those of units and of other meshes, whose
        steps run torch's kernel. `is_hosted`: whether their moments lie in host memory. `is_alike`: whether each
        parameter, its gradient and its moments are sharded alike.
        """
        offload, (beta1, beta2) = self.offload, group["betas"]
        scales = {name: scale.to(tensors[0][0].device) for name, scale in _scales_of(self.optimizer()).items()}
        settings = {name: group[name] for name in SETTINGS} | {"beta1": beta1, "beta2": beta2}
        local = [[local_of(tensor) for tensor in values] for values in tensors]
        if not is_alike:
            assert offload is not None
            self._expire_copies(local[0])
            with offload.on_device(tensors) as moved:
                flags = {name: group[name] for name in ("capturable", "differentiable", "decoupled_weight_decay")}
                cast(Any, adam)(*moved, **settings, **flags, **scales, fused=True)
            return
        torch._foreach_add_(local[COUNTS], 1)
        step = functools.partial(self._step_shards, group, tensors[0], index_of, settings, scales)
        if is_hosted:
            assert offload is not None
            offload.stream(tensors[0], local, step)
        else:
            step(range(len(local[0])), range(len(local[0])), local)
        if (found_inf := scales.get("found_inf")) is not None:  # 1 if the kernel changed nothing
            torch._foreach_sub_(local[COUNTS], [found_inf] * len(local[COUNTS]))

    def _step_shards(
        self,
        group: dict[str, Any],
        parameters: list[Any],
        index_of: dict[int, int],
        settings: dict[str, Any],
        scales: dict[str, Any],
        items: Sequence[int],
        done: Sequence[int],
        tensors: Tensors,
    ) -> None:
        """Update this rank's shards by the transport's kernel if it supports the step, else by torch's kernel.

        `items`, `done`, `tensors`: see `Step` in offload.py. Tensors are local.
        """
        state = self.state
        assert state is not None
        decoupled = group["decoupled_weight_decay"]  # AdamW, whose step the transport's kernel computes
        is_special = bool(scales) or group["amsgrad"] or group["maximize"] or (group["weight_decay"] and not decoupled)
        if index_of and not is_special and not self.in_backward:
            indices = [index_of[id(parameters[item])] for item in items]
            needed = [values for i, values in enumerate(tensors) if i != MAXIMA]
            taken = {name: settings[name] for name in ("lr", "beta1", "beta2", "weight_decay", "eps")}
            if state.runtime.fused_adam_step(indices, needed, **taken):
                self.refreshes_cache = True
                # Not after the whole step: a hook could write to a gradient, whose memory may hold copies of shards.
                for item in done:
                    parameters[item].grad = None
                return
        self._expire_copies(tensors[0])
        kernel: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
        kernel(*tensors, **settings, **scales)

    def _expire_copies(self, shards: list[torch.Tensor]) -> None:
        """Mark the transport's copies of `shards` as out of date: torch's kernel runs next, and writes no copies."""
        if self.refreshes_cache:
            torch.autograd.graph.increment_version(shards)
