"""A step of AdamW that also writes the copies of shards that peers gather; see [Note: steps over lent memory] in csrc/step_order.h.

Where gathers are copies between GPUs, each rank keeps its shards in the width of compute, and would read all masters again
for them after each step. The optimizer's kernel has them at hand. torch's own step runs as it is, and only the call of its
fused kernel is taken, by a dispatch mode that lasts as long as the step.
"""

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zcompile.sharding.model_state import ShardedModel, state_of

ADAM, ADAMW = torch.ops.aten._fused_adam_.default, torch.ops.aten._fused_adamw_.default


def fuse_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let steps of `optimizer` write what the next forward gathers, and give up gradients as they go. No number changes.

    Peer to peer this saves a pass over all masters per step; over other transports, steps are torch's. In any case `step()` leaves
    `.grad` of the model's parameters None, already when hooks behind it run, for their memory may be what it writes to: a gradient
    that is wanted afterwards must be cloned before. Between a step and the next forward, change parameters by plain in-place
    operations under `torch.no_grad()`, or by `load_state_dict`: what is written through `.data`, by `torch._foreach_*` or by another
    optimizer is not in that forward, but in the next one with a step or a backward before it. Schedulers, GradScaler, state and
    checkpoints of the optimizer are as ever; with GradScaler, and where Adam adds weight decay to the gradient, steps are torch's.
    All ranks call it, or none, and all ranks step.

    Args:
        model: sharded by `zcompile.shard`, on the transport that it will train on or not.
        optimizer: `torch.optim.Adam` or `AdamW` with `fused=True`, over any parameters of `model` and others.

    Returns:
        `optimizer`, whose `step` is another.

    Raises:
        RuntimeError: `model` is not sharded.
        ValueError: another optimizer, or one that is not fused, or `amsgrad`, `maximize` or a tensor as learning rate.
    """
    state = state_of(model)
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ValueError(f"zcompile.fuse_optimizer takes torch.optim.Adam and AdamW, not {type(optimizer).__name__}.")
    for group in optimizer.param_groups:
        if not group["fused"] or group["amsgrad"] or group["maximize"] or isinstance(group["lr"], torch.Tensor):
            raise ValueError(
                "zcompile.fuse_optimizer needs fused=True, and neither amsgrad, maximize nor a tensor as learning rate."
            )
    inner = optimizer.step
    models = getattr(inner, "fused_by_zcompile", ())
    if any(one is state for one in models):
        return optimizer
    unbound = getattr(inner, "__func__", None)
    if unbound is None:  # a scheduler was there before
        unbound = functools.wraps(inner)(lambda self: inner())
    mode = StepMode(state)

    @functools.wraps(unbound)  # schedulers and others leave marks on it
    def fused(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with mode:
            unbound(self)
        ours = {id(sharded.parameter) for sharded in state.parameters.values()}
        for group in self.param_groups:
            for parameter in group["params"]:
                if id(parameter) in ours:
                    parameter.grad = None
        return loss

    fused.fused_by_zcompile = (*models, state)
    reference = weakref.ref(
        optimizer
    )  # nothing here may hold the optimizer, or it would hold itself, and with it its states

    @functools.wraps(fused)
    def step(closure: Any = None) -> Any:
        return fused(reference(), closure)

    step.__func__ = fused  # as of a method, which schedulers expect
    optimizer.step = step
    return optimizer


class StepMode(TorchDispatchMode):
    """Gives what fused kernels are called with to the model's transport, and the rest to torch."""

    def __init__(self, state: ShardedModel):
        super().__init__()
        self.state = state
        self.writes_copies = False  # the transport, in some step

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in (ADAM, ADAMW):
            return func(*args, **kwargs)
        parameters, gradients, averages, squares, _, counts = args
        index_of = {id(sharded.parameter): sharded.index for sharded in self.state.parameters.values()}
        ours = {at: index_of[id(parameter)] for at, parameter in enumerate(parameters) if id(parameter) in index_of}
        tensors = [[_local(each[at]) for at in ours] for each in (parameters, gradients, averages, squares, counts)]
        settings = {name: kwargs[name] for name in ("lr", "beta1", "beta2", "weight_decay", "eps")}
        if ours and _is_plain(func, kwargs) and self.state.runtime.step(list(ours.values()), tensors, **settings):
            self.writes_copies = True
            for at in ours:
                parameters[
                    at
                ].grad = None  # at once: whoever wrote to it now, a hook or after an error, would write to copies
            args = tuple([one for at, one in enumerate(each) if at not in ours] for each in args)
        elif self.writes_copies:
            torch.autograd.graph.increment_version(
                tensors[0]
            )  # torch's kernel does not, and copies of the step before would pass for new
        if args[0]:
            func(*args, **kwargs)


def _is_plain(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the call is for what transports compute. Groups may have changed since, as by a checkpoint."""
    if (
        kwargs.get("grad_scale") is not None
        or kwargs.get("found_inf") is not None
        or kwargs["amsgrad"]
        or kwargs["maximize"]
    ):
        return False
    return func is ADAMW or kwargs["weight_decay"] == 0


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)
