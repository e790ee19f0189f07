"""`zcompile.accumulate`: parameters stay unsharded from the first to the last microbatch of a step."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zcompile.sharding.model_state import ShardedModel, models_of, state_of


@contextlib.contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Around the microbatches of one step: parameters do not change inside, so compiled graphs gather them once.

    What is gathered first stays unsharded until the end, as far as the option `microbatch_cache_bytes` lets it. Over
    p2p, the cached shards that peers read are refreshed once. Gradients add up as ever, but each time into new
    memory: a tensor that was taken out of `.grad` earlier does not follow. No number changes, except that gradients
    of a parameter which several graphs read are added in another order. All ranks enter and leave the block at the
    same microbatches. A value that is changed inside may be seen only at the end of the block; change it on all ranks
    or on none.

    Raises:
        RuntimeError: `model` is not sharded; an optimizer steps with its parameters inside.
    """
    state = state_of(model)
    if state.accumulates:  # the outer block lasts longer
        yield
        return
    ours = {id(sharded.parameter) for each in models_of(state) for sharded in each.parameters.values()}

    def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            raise RuntimeError(
                "zcompile: an optimizer steps inside of zcompile.accumulate. Move its step behind the block."
            )

    begin_accumulating(state, state.microbatch_cache_limit())
    hook = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()
        end_accumulating(state)


def begin_accumulating(state: ShardedModel, microbatch_cache_bytes: int) -> None:
    """Parameters do not change from here on: gradients add up in place, and what is gathered stays unsharded, up to
    `microbatch_cache_bytes`. Units, and what other domains have, are gathered anew."""
    state.begin_accumulating(microbatch_cache_bytes)
    for other in models_of(state)[1:]:
        other.begin_accumulating(other.microbatch_cache_limit())


def end_accumulating(state: ShardedModel) -> None:
    """Parameters may change again."""
    for model in models_of(state):
        model.end_accumulating()
