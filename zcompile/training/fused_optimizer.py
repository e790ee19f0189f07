"""A step of AdamW that also refreshes the cached shards that peers gather.

Peer to peer, each rank caches its shards in `param_dtype`. To refresh them after a step, it would read all main
parameters again; the optimizer's kernel has them at hand. torch's own step runs as it is. Only the call of its fused
kernel is replaced, by a dispatch mode that lasts as long as the step. In which order parameters are stepped, and why,
is in csrc/p2p/schedule/adam_schedule.h.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
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

ADAM, ADAMW = torch.ops.aten._fused_adam_.default, torch.ops.aten._fused_adamw_.default
MAXIMA = 4  # which of their arguments has the maxima of squares, for amsgrad
OFFLOADS = "moments", "states"


def fuse_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, offload: str | None = None
) -> torch.optim.Optimizer:
    """Let steps of `optimizer` write the shards that the next forward gathers, and free gradients as they go.

    No number changes, with one exception: `offload="states"` on one rank, with `param_dtype` under Inductor. Without
    offload, Inductor fuses casts of parameters into kernels there, and leaves their rounding out.

    Peer to peer this saves one pass over all main parameters per step; over other transports, steps are torch's.

    In any case `step()` leaves `.grad` of the model's parameters None, already when hooks behind it run, since the
    step may write to the memory of gradients. Clone a gradient before the step if you want it afterwards. Between a
    step and the next forward, change parameters by plain in-place operations under `torch.no_grad()`, or by
    `load_state_dict`. A write through `.data`, by `torch._foreach_*` or by another optimizer is not in that forward,
    but in the next one with a step or a backward before it. Schedulers, GradScaler, state and checkpoints of the
    optimizer are as ever. With GradScaler, and where Adam adds weight decay to the gradient, steps are torch's. All
    ranks call this, or none, and all ranks step.

    Args:
        model: sharded by `zcompile.shard`; its transport may still change.
        optimizer: `torch.optim.Adam` or `AdamW` with `fused=True`, over any parameters of `model` and others.
        offload: "moments" keeps both Adam moments of the model's parameters, which must be float32, in pinned host
            memory; a step copies them to the GPU and back, group by group. Main parameters and gradients stay on the
            GPU. A moment taken from `optimizer.state` before a step may be read after it only once `optimizer.state`,
            or `optimizer.state_dict()`, has been read again. "states" also keeps main parameters there that are always
            gathered in one narrower dtype: the GPU has a copy in that dtype, and reads and writes of the parameters
            go over the link. Those in `param_dtype` move in this call, others in the first step after a forward; a
            warning of that step says how much stays on the GPU, and why, if it is more than 1 %.

    Returns:
        `optimizer`, whose `step` is another.

    Raises:
        RuntimeError: `model` is not sharded.
        ValueError: another optimizer, or one that is not fused, or `amsgrad`, `maximize` or a tensor as learning rate;
            an `offload` that there is not, or another one than in an earlier call; parameters that are not float32;
            "states" for parameters that are sharded with `states="global"`.
    """
    state = state_of(model)
    _check_optimizer(optimizer)
    if offload is not None and offload not in OFFLOADS:
        raise ValueError(
            f"zcompile.fuse_optimizer: offload is None, {' or '.join(map(repr, OFFLOADS))}, not {offload!r}."
        )
    if offload == "states" and state.over_hosts:
        raise ValueError(
            "zcompile.fuse_optimizer: offload='states' is not possible with zcompile.shard(states='global'): main "
            "parameters are pieces of the gathered shards, so each forward would read them from host memory. Take "
            "offload='moments'."
        )
    inner: Any = optimizer.step
    models = getattr(inner, "fused_by_zcompile", ())
    if any(each() is state for each in models):
        before = [each.kind for each in getattr(optimizer.state, "offloads", ()) if each.model() is state]
        if before != [offload] * (offload is not None):
            raise ValueError(
                "zcompile.fuse_optimizer was called with another offload before: leave out one of the calls."
            )
        return optimizer
    unbound = getattr(inner, "__func__", None)
    if unbound is None:  # a scheduler was there before
        unbound = functools.wraps(inner)(lambda self: inner())
    offloading = None if offload is None else Offload(offload, state, optimizer)
    fused: Any = _fused_step(unbound, state, offloading)
    for each in models_of(state) if offloading is not None else ():
        each.offloads.add(offloading)
    if offload == "states":
        read_narrow_shards(state)
    fused.fused_by_zcompile = (*models, weakref.ref(state))
    # Weak: if the optimizer's own `step` held the optimizer, nothing would free it, nor its states, before the next gc.
    reference = weakref.ref(optimizer)

    @functools.wraps(fused)
    def step(closure: Any = None) -> Any:
        return fused(reference(), closure)

    bound: Any = step
    bound.__func__ = fused  # as of a method, which schedulers expect
    vars(optimizer)["step"] = step
    return optimizer


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what the transports' kernels do not compute."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ValueError(f"zcompile.fuse_optimizer takes torch.optim.Adam and AdamW, not {type(optimizer).__name__}.")
    for group in optimizer.param_groups:
        if not group["fused"] or group["amsgrad"] or group["maximize"] or isinstance(group["lr"], torch.Tensor):
            raise ValueError(
                "zcompile.fuse_optimizer needs fused=True, and neither amsgrad, maximize nor a tensor as learning rate."
            )


def _fused_step(unbound: Callable[..., Any], state: ShardedModel, offload: Offload | None) -> Callable[..., Any]:
    """`unbound`, an optimizer's step, with the kernels of `state`'s transport; drops the gradients of `state`."""
    mode = StepMode(state, offload)

    @functools.wraps(unbound)  # schedulers and others leave marks on it
    def fused(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with offload.step(self) if offload else contextlib.nullcontext(), mode:
            unbound(self)
        model = mode.state
        models = [] if model is None else models_of(model)
        ours = {id(sharded.parameter) for each in models for sharded in each.parameters.values()}
        stepped = [parameter for group in self.param_groups for parameter in group["params"] if id(parameter) in ours]
        for parameter in stepped:
            parameter.grad = None
        if offload is None:  # an earlier optimizer may have moved them to the host
            note_writes(stepped)
        return loss

    return fused


class StepMode(TorchDispatchMode):
    """Where torch calls its fused kernel, calls the transport's for parameters of the model, if it has one.

    Else torch's, on their shards; and torch's for other parameters.
    """

    def __init__(self, state: ShardedModel, offload: Offload | None = None):
        super().__init__()
        self.reference = weakref.ref(state)  # an optimizer must not hold a model
        self.offload = offload
        self.refreshes_cache = False  # whether the transport did, in some step

    @property
    def state(self) -> ShardedModel | None:
        """The model, until it is freed; steps are torch's from then on."""
        return self.reference()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, state = kwargs or {}, self.state
        if func not in (ADAM, ADAMW) or state is None:
            return func(*args, **kwargs)
        parameters = args[0]
        # Tensor subclasses step by ops of their own.
        plain = [sharded for sharded in state.parameters.values() if sharded.of_subclass is None]
        index_of = {id(sharded.parameter): sharded.index for sharded in plain}
        ours = [i for i, parameter in enumerate(parameters) if id(parameter) in index_of]
        is_scaled = kwargs.get("grad_scale") is not None or kwargs.get("found_inf") is not None  # and maybe by DTensors
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
        """Step this rank's parts of `parameters`, as `Step` says, by the transport's kernel, or by torch's.

        An op on DTensors would make specs of all of them, which takes the host longer than all else of a step.
        """
        state, settings = self.state, {name: kwargs[name] for name in ("lr", "beta1", "beta2", "weight_decay", "eps")}
        assert state is not None
        indices = [index_of[id(parameters[item])] for item in items]
        needed = [values for i, values in enumerate(tensors) if i != MAXIMA]
        if _is_plain(func, kwargs) and state.runtime.fused_adam_step(indices, needed, **settings):
            self.refreshes_cache = True
            # At once: a hook, or a handler of an error, that wrote to a gradient now would write to the cache.
            for item in done:
                parameters[item].grad = None
            return
        if self.refreshes_cache:
            # torch's kernel does not, and copies cached by the step before would pass for new.
            torch.autograd.graph.increment_version(tensors[0])
        func(*tensors, **kwargs)

    def _step_others(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Step by torch's kernel. DTensor redistributes tensors that are not sharded as their parameter is, or refuses.

        Moments in host memory are streamed: of the model's other domains, and of all its parameters with a scaler.
        """
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
    """The tensors at some places of each list that a fused kernel takes; that of maxima may be empty."""
    return [[values[i] for i in places] if values else [] for values in args]


def _is_plain(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the call is for what transports compute. Groups may have changed since, as by a checkpoint."""
    if kwargs["amsgrad"] or kwargs["maximize"]:
        return False
    return func is ADAMW or kwargs["weight_decay"] == 0


def _are_sharded_alike(args: Sequence[Any], i: int) -> bool:
    """Whether the gradient and the moments of parameter `i` are sharded as it is, so that a rank's parts are a step."""
    return are_alike([getattr(values[i], "_spec", None) for values in args[:COUNTS] if values])
