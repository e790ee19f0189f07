"""A step of AdamW that also refreshes the cached shards that peers gather.

Peer to peer, each rank caches its shards in `param_dtype`. To refresh them after a step, it would read all main
parameters again; the optimizer's kernel has them at hand. torch's own step runs as it is. Only the call of its fused
kernel is replaced, by a dispatch mode that lasts as long as the step. In which order parameters are stepped, and why,
is in csrc/p2p/schedule/adam_schedule.h.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zcompile.state.sharded_model import ShardedModel, models_of, state_of

ADAM, ADAMW = torch.ops.aten._fused_adam_.default, torch.ops.aten._fused_adamw_.default
MAXIMA, COUNTS = 4, 5  # which of their arguments has the maxima of squares, for amsgrad, and which counts steps


def fuse_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let steps of `optimizer` write what the next forward gathers, and free gradients as they go. No number changes.

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

    Returns:
        `optimizer`, whose `step` is another.

    Raises:
        RuntimeError: `model` is not sharded.
        ValueError: another optimizer, or one that is not fused, or `amsgrad`, `maximize` or a tensor as learning rate.
    """
    state = state_of(model)
    _check_optimizer(optimizer)
    inner: Any = optimizer.step
    models = getattr(inner, "fused_by_zcompile", ())
    if any(each() is state for each in models):
        return optimizer
    unbound = getattr(inner, "__func__", None)
    if unbound is None:  # a scheduler was there before
        unbound = functools.wraps(inner)(lambda self: inner())
    fused: Any = _fused_step(unbound, state)
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


def _fused_step(unbound: Callable[..., Any], state: ShardedModel) -> Callable[..., Any]:
    """`unbound`, an optimizer's step, with the kernels of `state`'s transport; drops the gradients of `state`."""
    mode = StepMode(state)

    @functools.wraps(unbound)  # schedulers and others leave marks on it
    def fused(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with mode:
            unbound(self)
        model = mode.state
        models = [] if model is None else models_of(model)
        ours = {id(sharded.parameter) for each in models for sharded in each.parameters.values()}
        for group in self.param_groups:
            for parameter in group["params"]:
                if id(parameter) in ours:
                    parameter.grad = None
        return loss

    return fused


class StepMode(TorchDispatchMode):
    """Where torch calls its fused kernel, calls the transport's for parameters of the model, if it has one.

    Else torch's, on their shards; and torch's for other parameters.
    """

    def __init__(self, state: ShardedModel):
        super().__init__()
        self.reference = weakref.ref(state)  # an optimizer must not hold a model
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
        plain = [sharded for sharded in state.parameters.values() if sharded.extension is None]
        index_of = {id(sharded.parameter): sharded.index for sharded in plain}
        ours = {i: index_of[id(parameter)] for i, parameter in enumerate(parameters) if id(parameter) in index_of}
        local = [[_local(values[i]) for i in ours] if values else [] for values in args]
        others = tuple([value for i, value in enumerate(values) if i not in ours] for values in args)
        tensors = [values for i, values in enumerate(local) if i != MAXIMA]
        settings = {name: kwargs[name] for name in ("lr", "beta1", "beta2", "weight_decay", "eps")}
        is_scaled = kwargs.get("grad_scale") is not None or kwargs.get("found_inf") is not None  # and maybe by DTensors
        on_shards = bool(ours) and not is_scaled and all(_are_sharded_alike(args, i) for i in ours)
        is_plain = on_shards and _is_plain(func, kwargs)
        if is_plain and state.runtime.fused_adam_step(list(ours.values()), tensors, **settings):
            self.refreshes_cache = True
            # At once: whoever wrote to a gradient now, a hook or a handler of an error, would write to the cache.
            for i in ours:
                parameters[i].grad = None
        else:
            if self.refreshes_cache:
                # torch's kernel does not, and what is cached since the step before would pass for new.
                torch.autograd.graph.increment_version(local[0])
            if on_shards:  # an op on DTensors makes specs of all, which takes the host longer than all else of a step
                func(*local, **kwargs)
            else:  # DTensor redistributes what is sharded in another way, or refuses it
                others = args
        if others[0]:
            func(*others, **kwargs)
        return None


def _is_plain(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the call is for what transports compute. Groups may have changed since, as by a checkpoint."""
    if kwargs["amsgrad"] or kwargs["maximize"]:
        return False
    return func is ADAMW or kwargs["weight_decay"] == 0


def _are_sharded_alike(args: tuple[Any, ...], i: int) -> bool:
    """Whether the gradient and the moments of parameter `i` are sharded as it is, so that a rank's parts are a step.

    It runs for each parameter in each step, so it first asks whether specs, and their meshes, are the same objects.
    """
    parameter, *others = [getattr(values[i], "_spec", None) for values in args[:COUNTS] if values]
    for other in others:
        if other is parameter:
            continue
        if other is None or parameter is None or other.placements != parameter.placements:
            return False
        if other.mesh is not parameter.mesh and other.mesh != parameter.mesh:
            return False
    return parameter is not None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
