"""A step of AdamW that also writes the copies of shards that peers gather; see [Note: steps over lent memory] in csrc/step_order.h.

Where gathers are copies between GPUs, each rank keeps its shards in the width of compute, and would read all masters again
for them after each step. The optimizer's kernel has them at hand. torch's own step runs as it is, and only the call of its
fused kernel is taken, by a dispatch mode that lasts as long as the step.
"""

import functools
import types
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zcompile.sharding import ShardedModel, state_of

ADAM, ADAMW = torch.ops.aten._fused_adam_.default, torch.ops.aten._fused_adamw_.default


def fuse_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let steps of `optimizer` write what the next forward gathers, and give up gradients as they go. No number changes.

    Peer to peer this saves a pass over all masters per step; over other transports, steps are torch's. In any case `step()` leaves
    `.grad` of the model's parameters None, for their memory may be what it writes to: a gradient that is wanted afterwards must be
    cloned before. Between a step and the next forward, change parameters by plain in-place operations under `torch.no_grad()`, or by
    `load_state_dict`: what is written through `.data` or `torch._foreach_*` is noticed a step later. Schedulers, GradScaler, state and
    checkpoints of the optimizer are as ever; with GradScaler, and where Adam adds weight decay to the gradient, steps are torch's.
    All ranks call it, or none.

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
            raise ValueError("zcompile.fuse_optimizer needs fused=True, and neither amsgrad, maximize nor a tensor as learning rate.")
    if hasattr(optimizer.step, "fused_by_zcompile"):
        return optimizer
    inner = optimizer.step

    @functools.wraps(inner)  # schedulers and others leave marks on it
    def step(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with StepMode(state):
            inner()
        ours = {id(sharded.parameter) for sharded in state.parameters.values()}
        for group in self.param_groups:
            for parameter in group["params"]:
                if id(parameter) in ours:
                    parameter.grad = None
        return loss

    step.fused_by_zcompile = True
    optimizer.step = types.MethodType(step, optimizer)  # a method, as schedulers expect
    return optimizer


class StepMode(TorchDispatchMode):
    """Gives what fused kernels are called with to the model's transport, and the rest to torch."""

    def __init__(self, state: ShardedModel):
        super().__init__()
        self.state = state

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        scaled = kwargs.get("grad_scale") is not None or kwargs.get("found_inf") is not None
        if scaled or not (func is ADAMW or func is ADAM and kwargs["weight_decay"] == 0):
            return func(*args, **kwargs)
        parameters, gradients, averages, squares, _, counts = args
        index_of = {id(sharded.parameter): sharded.index for sharded in self.state.parameters.values()}
        ours = {at: index_of[id(parameter)] for at, parameter in enumerate(parameters) if id(parameter) in index_of}
        tensors = [[_local(each[at]) for at in ours] for each in (parameters, gradients, averages, squares, counts)]
        settings = {name: kwargs[name] for name in ("lr", "beta1", "beta2", "weight_decay", "eps")}
        if ours and self.state.runtime.step(list(ours.values()), tensors, **settings):
            args = tuple([one for at, one in enumerate(each) if at not in ours] for each in args)
        if args[0]:
            func(*args, **kwargs)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)
