"""Counts optimizer steps, which tell ranks at different places of training apart.

See [Note: places of training] in csrc/transport/rank_agreement.h, and csrc/transport/order_log.h.
"""

import functools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from zcompile.sharding.model_state import ShardedModel

_models: weakref.WeakSet[ShardedModel] = weakref.WeakSet()  # of several ranks


def count_steps(state: ShardedModel) -> None:
    """From now on, count the steps of optimizers that hold parameters of `state`."""
    if state.runtime.world > 1:
        _models.add(state)
        _install_hook()


@functools.cache
def _install_hook() -> None:
    register_optimizer_step_post_hook(_count)


def _count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """After a step. One in a backward, by a hook of a parameter, says nothing of where training is."""
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    counted = set()  # models over the same ranks have one count
    for state in list(_models):
        group = state.groups["control"] or state.groups["gather"]
        if group not in counted and any(id(sharded.parameter) in held for sharded in state.parameters.values()):
            counted.add(group)
            state.runtime.count_step()
