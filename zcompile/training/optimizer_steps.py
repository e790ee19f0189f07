"""What happens around the steps of optimizers that hold sharded parameters.

Before a step, ranks compare what they started; see order_check.py. What is compared was started, so a step inside of a
backward (an optimizer in a parameter's hook) is not checked: ranks are somewhere in their backward then. Nor is a step
that `torch.compile` compiled: it calls no hook.

After a step, it is counted, because ranks must step between the same collectives; see csrc/transport/order_log.h.
"""

import functools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zcompile.state.sharded_model import ShardedModel

# Of several ranks, in the order in which they were made, which is the same on all ranks.
_models: "weakref.WeakKeyDictionary[ShardedModel, None]" = weakref.WeakKeyDictionary()


def count_steps(state: ShardedModel) -> None:
    """From now on, check and count the steps of optimizers that hold parameters of `state`."""
    if state.runtime.world > 1 or state.order_check is not None:
        _models[state] = None
        _install_hooks()


@functools.cache
def _install_hooks() -> None:
    register_optimizer_step_pre_hook(_check)
    register_optimizer_step_post_hook(_count)


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Before a step. A closure computes gradients inside of it, so they are checked after each call, too.

    Returns:
        Positional and keyword arguments of the step, if they are others.
    """
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
        return None
    states = [state for state in _held_by(optimizer) if state.order_check is not None]
    if not states:
        return None
    check_orders(states)
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _checked(kwargs["closure"], states)}
    if len(args) > 1 and callable(args[1]):  # behind the optimizer
        return (args[0], _checked(args[1], states), *args[2:]), kwargs
    return None


def _checked(closure: Any, states: list[ShardedModel]) -> Any:
    """`closure`, with a check after it."""

    @functools.wraps(closure)
    def checked() -> Any:
        result = closure()
        check_orders(states)
        return result

    return checked


def check_orders(states: list[ShardedModel]) -> None:
    """Compare what all ranks started, once for all models over the same groups; all ranks call together.

    Raises:
        RuntimeError: see `OrderCheck.check`.
    """
    checks = [(state.order_check, state) for state in states if state.order_check is not None]
    checked = set()
    # All ranks in one order, also those of several meshes that have two ranks in common.
    for check, state in sorted(checks, key=lambda pair: (pair[0].name, pair[1].groups.number)):
        groups = state.groups.gather, state.groups.replicate
        if groups not in checked:
            checked.add(groups)
            check.check(state.runtime)


def _count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """After a step. One in a backward, by a hook of a parameter, says nothing of where training is."""
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
        return
    counted = set()  # models over the same ranks have one count
    held = _parameters_of(optimizer)
    for state in _held_by(optimizer):
        state.gather_host_shards(held)
        group = state.groups.gather, state.groups.replicate
        if group not in counted:
            counted.add(group)
            state.runtime.count_step()


def _held_by(optimizer: torch.optim.Optimizer) -> list[ShardedModel]:
    """The models of which `optimizer` holds a parameter."""
    held = _parameters_of(optimizer)
    return [
        state for state in list(_models) if any(id(sharded.parameter) in held for sharded in state.parameters.values())
    ]


def _parameters_of(optimizer: torch.optim.Optimizer) -> set[int]:
    """Ids of the parameters that `optimizer` holds."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
