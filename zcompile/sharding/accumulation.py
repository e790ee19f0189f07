"""Microbatches: parameters stay unsharded between the first and the last of a step."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zcompile.sharding.model_state import state_of


@contextlib.contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Around the micro-steps of one step: parameters do not change in it, so compiled graphs gather them once.

    What is gathered first stays full until the end, as far as the option `microbatch_cache_bytes` lets it; over p2p, weights are made ready
    for peers once. Gradients add up as ever, but each time into new memory: what a DTensor in `.grad` was made of before does not
    follow. No number changes, but where several graphs read one parameter, gradients are added in another order. All ranks enter and leave
    it at the same micro-steps. Values that are changed inside are seen at its end, some not before; change them on all ranks or on none.

    Raises:
        RuntimeError: `model` is not sharded; an optimizer steps with its parameters inside.
    """
    state = state_of(model)
    if state.accumulates:  # the outer one lasts longer
        yield
        return
    ours = {id(sharded.parameter) for sharded in state.parameters.values()}

    def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            raise RuntimeError(
                "zcompile: an optimizer steps inside of zcompile.accumulate. Move its step behind the block."
            )

    state.begin_accumulating(state.microbatch_cache_limit())
    watching = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        watching.remove()
        state.end_accumulating()
