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
    """Keep gathered parameters from one microbatch of a step to the next; a context manager around the microbatches.

    The parameters that a microbatch gathers first stay unsharded until the end of the `with` block, up to the bytes in
    the option `microbatch_cache_bytes`. Compiled code gathers small parameters, which share a transfer
    (`bucket_bytes`), in each microbatch. With the p2p transport, the low-precision copies of shards that peers read are
    cast once a step. Gradients accumulate as usual, but each microbatch allocates new memory for them, so a local
    tensor that was taken from `.grad` earlier is not updated. With "each", results do not change, except that gradients
    of a parameter that several graphs read are added in another order. All ranks must enter and leave the block at the
    same microbatches. Do not change parameters inside: reads may return the old values until the end of the block.

    Args:
        reduce: when gradients are reduced; the same on all ranks.

            - "each": in each microbatch.
            - "shards": each microbatch reduce-scatters gradients inside of a replica; the all-reduce over replicas
              follows once, at the end (FSDP2's `set_requires_all_reduce(False)`). With `states="global"`, the sum over
              hosts follows once, and `.grad` behaves as with "last". On a 1-D mesh, the same as "each".
            - "last": unreduced gradients add up, and are reduced once, at the end (FSDP2's
              `set_requires_gradient_sync(False)`). Until then, each rank holds unsharded gradients of all parameters,
              in the parameters' dtypes. Hooks of parameters run at the end. Parameters of units (`units` of
              `zcompile.shard`) are still reduced in each microbatch. On one rank, the same as "each".

            With zero-bubble pipelines, which split backwards, gradients are reduced at the end for every `reduce`.

            With "shards" and "last", `.grad` is valid only after the `with` block; if the block raises, `.grad` is as
            it was before. With "last", `.grad` is a tensor of ones inside of the block. If the program scales this
            tensor after the last backward, the reduced gradients are scaled by the same factor. Setting `.grad` to
            None, as `zero_grad()` does, discards the gradients so far.

    Raises:
        RuntimeError: `model` is not sharded, or an optimizer that holds its parameters steps inside.
        ValueError: `reduce` has another value, or is neither "each" nor the value of an enclosing `accumulate`.
    """
    state = state_of(model)
    deferral = deferral_of(reduce, models_of(state))
    if state.microbatches.accumulates:  # an enclosing `accumulate` does the work
        if reduce not in ("each", state.microbatches.reduce):
            raise ValueError(
                f"zcompile: accumulate({reduce=}) inside of accumulate(reduce={state.microbatches.reduce!r}). Pass the "
                "same reduce to both, or leave it out of the inner one."
            )
        yield
        return
    ours = {id(sharded.parameter) for each in models_of(state) for sharded in each.parameters.values()}

    def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            raise RuntimeError(
                "zcompile: optimizer.step() was called inside of `with zcompile.accumulate`. Call it after the block."
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
    """Keep parameters unsharded, up to `microbatch_cache_bytes`, and let reduces add to earlier gradients.

    Parameters must not change until `end_accumulating`. Graphs keep only parameters of domain 0: for units and for
    other domains, `microbatch_cache_limit` is 0.
    """
    if state.block_order is not None:
        state.block_order.keep(microbatch_cache_bytes)
    if state.unit_order is not None:
        microbatch_cache_bytes = state.unit_order.keep(microbatch_cache_bytes)
    state.begin_accumulating(microbatch_cache_bytes)
    for other in models_of(state)[1:]:
        other.begin_accumulating(other.microbatch_cache_limit())


def end_accumulating(state: ShardedModel) -> None:
    for order in state.orders:
        order.release()
    for model in models_of(state):
        model.end_accumulating()
