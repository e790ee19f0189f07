"""`zcompile.accumulate`: parameters stay unsharded from the first to the last microbatch of a step."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zcompile.state.sharded_model import ShardedModel, models_of, state_of
from zcompile.training.deferred_reduces import deferral_of


@contextlib.contextmanager
def accumulate(model: nn.Module, reduce: str = "each") -> Iterator[None]:
    """Around the microbatches of one step: parameters do not change inside, so compiled graphs gather them once.

    What is gathered stays unsharded until the end; first come, first kept, until the option `microbatch_cache_bytes`
    is used up. Over p2p, the copies of shards that peers read are renewed once. Gradients add up as ever, but into new
    memory each time: a tensor that was taken out of `.grad` earlier does not follow. With "each", no number changes,
    except that gradients of a parameter which several graphs read are added in another order. All ranks must enter and
    leave the block at the same microbatches. Do not change parameters inside: reads may give the old values until the
    block ends.

    Args:
        reduce: when gradients are reduced. All ranks pass the same.

            - "each": in each microbatch.
            - "shards": each microbatch sums them over the ranks that share the shards, and the block's end once over
              replicas (FSDP2's `set_requires_all_reduce(False)`). With `states="global"` it is once over hosts, and
              `.grad` is as with "last". Without a 2-D mesh, as "each".
            - "last": they add up unreduced, and the block's end reduces them once (FSDP2's
              `set_requires_gradient_sync(False)`). Each rank holds a whole gradient of every parameter meanwhile, in
              the parameter's dtype. Hooks of parameters run at the end. Parameters of units (`units` of
              `zcompile.shard`) are reduced in each microbatch all the same. On one rank, as "each".

            Gradients of split backwards (zero-bubble pipelines) are reduced at the block's end.

            With "shards" and "last", `.grad` is right only after the block, and a block that raises leaves the
            gradients that were there before it. With "last", it is ones inside: by what the program multiplies or
            divides these after its last backward, the gradients are multiplied and divided at the end. Setting it to
            None, as `zero_grad()` does, drops the gradients so far.

    Raises:
        RuntimeError: `model` is not sharded; an optimizer steps with its parameters inside.
        ValueError: `reduce` is none of these, or an outer block has another.
    """
    state = state_of(model)
    deferral = deferral_of(reduce, models_of(state))
    if state.microbatches.accumulates:  # the outer block lasts longer
        if reduce not in ("each", state.microbatches.reduce):
            raise ValueError(
                f"zcompile: accumulate(reduce={reduce!r}) inside of accumulate(reduce={state.microbatches.reduce!r})"
            )
        yield
        return
    ours = {id(sharded.parameter) for each in models_of(state) for sharded in each.parameters.values()}

    def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            raise RuntimeError(
                "zcompile: an optimizer steps inside of zcompile.accumulate. Move its step behind the block."
            )

    begin_accumulating(state, state.microbatch_cache_limit())
    state.microbatches.reduce = reduce
    hook = register_optimizer_step_pre_hook(refuse)
    deferral.begin()
    try:
        yield
    except BaseException:
        end_accumulating(state)
        deferral.drop()
        raise
    else:
        for order in state.orders:
            order.reduce_assigned()
        end_accumulating(state)
        deferral.finish()
    finally:
        hook.remove()


def begin_accumulating(state: ShardedModel, microbatch_cache_bytes: int) -> None:
    """Parameters do not change from here on: gradients add up in place, and what is gathered stays unsharded, up to
    `microbatch_cache_bytes`. What other domains have is gathered anew."""
    if state.block_order is not None:
        state.block_order.keep(microbatch_cache_bytes)
    if state.unit_order is not None:
        microbatch_cache_bytes = state.unit_order.keep(microbatch_cache_bytes)
    state.begin_accumulating(microbatch_cache_bytes)
    for other in models_of(state)[1:]:
        other.begin_accumulating(other.microbatch_cache_limit())


def end_accumulating(state: ShardedModel) -> None:
    """Parameters may change again."""
    for order in state.orders:
        order.release()
    for model in models_of(state):
        model.end_accumulating()
