"""Hooks around the steps of optimizers that hold sharded parameters.

Before a step, ranks compare the collectives that they have started (order_check.py). After it, the step is added to the
log of collectives, because all ranks must take it between the same two collectives (csrc/transport/order_log.h). Steps
inside of a backward, in a parameter's hook, are left out: ranks may be at different places of the backward. So are
steps that `torch.compile` compiled, which call no optimizer hooks.
"""

import functools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zcompile.state.sharded_model import ShardedModel

# Models whose steps are checked and counted, in the order of `shard` calls: `_count` makes collectives in this order.
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
    """Hook before a step: check that ranks have started the same collectives, and again after a closure's backward."""
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
        return None
    states = [state for state in _held_by(optimizer) if state.order_check is not None]
    if not states:
        return None
    check_orders(states)
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _checked(kwargs["closure"], states)}
    if len(args) > 1 and callable(args[1]):  # the first is the optimizer
        return (args[0], _checked(args[1], states), *args[2:]), kwargs
    return None


def _checked(closure: Any, states: list[ShardedModel]) -> Any:
    """Wrap `closure`, which runs a backward, so that ranks compare their collectives after each call."""

    @functools.wraps(closure)
    def checked() -> Any:
        result = closure()
        check_orders(states)
        return result

    return checked


def check_orders(states: list[ShardedModel]) -> None:
    """Compare the collectives that ranks have started, once for models with the same process groups. A collective call.

    Raises RuntimeError as `OrderCheck.check` does.
    """
    checks = [(state.order_check, state) for state in states if state.order_check is not None]
    checked = set()
    # Sorted, so that two ranks that share several meshes check these in the same order.
    for check, state in sorted(checks, key=lambda pair: (pair[0].name, pair[1].groups.number)):
        groups = state.groups.gather, state.groups.replicate
        if groups not in checked:
            checked.add(groups)
            check.check(state.runtime)


def _count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Hook after a step outside of a backward: gather host shards, and add the step to the log of collectives."""
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
        return
    counted = set()  # models over the same groups share a count
    held = _parameters_of(optimizer)
    for state in _held_by(optimizer):
        state.gather_host_shards(held)
        group = state.groups.gather, state.groups.replicate
        if group not in counted:
            counted.add(group)
            state.runtime.count_step()


def _held_by(optimizer: torch.optim.Optimizer) -> list[ShardedModel]:
    held = _parameters_of(optimizer)
    return [
        state for state in list(_models) if any(id(sharded.parameter) in held for sharded in state.parameters.values())
    ]


def _parameters_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
