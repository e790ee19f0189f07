"""`zcompile.explain`: plans the transfers of a sharded model, and predicts the time and memory of its step."""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from zcompile.compiler.backend import limited, parse_options
from zcompile.explanation.explanation import Explanation
from zcompile.explanation.planned_graph import Width
from zcompile.explanation.predict import predict_step
from zcompile.explanation.trace import trace, without_compiled_calls
from zcompile.state.sharded_model import ShardedModel, state_of


def explain(model: nn.Module, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Explanation:
    """Plan the transfers of a sharded model's training step, and predict the step's time and memory.

    Traces `model(*args, **kwargs)` and its backward. The forward also runs once, so that graphs after a graph break are
    traced, too. All ranks must call this, as they would call a forward. Pass the model, not torch.compile's result.

    Args:
        options: as for `torch.compile(model, backend="zcompile", options=...)`.

    Raises:
        RuntimeError: the model is not sharded, or Dynamo captured no graph of it.
        ValueError: an option is unknown, or its transport is not possible here.
    """
    settings, state = parse_options(options), state_of(model)
    names = {id(sharded.leaf): sharded.name for sharded in state.in_modules()}
    transport = state.transport.transport
    if settings.transport != "auto":
        transport = state.choose(settings.transport).transport
    world = state.runtime.world
    plan = settings.plan(state.machine.hardware.over(transport, world), state.machine.memory_bytes)
    with without_compiled_calls(model):
        run, name_of = functools.partial(model, *args, **kwargs), lambda leaf: names.get(id(leaf))
        traced = trace(run, plan, name_of, functools.partial(limited, settings))
    parameters = sum(sharded.parameter.numel() for sharded in state.parameters.values())
    microbatch_cache_bytes = (
        state.microbatch_cache_limit() if settings.microbatch_cache_bytes is None else settings.microbatch_cache_bytes
    )
    link = state.machine.measured.over(transport, world)
    return predict_step(traced, plan, parameters, world, microbatch_cache_bytes, link, _gathered_in_eager(state))


def _gathered_in_eager(state: ShardedModel) -> Iterator[Width]:
    """Yield a `Width` for each parameter that eager code, not a graph, gathered in the traced forward."""
    units = (unit for order in state.orders for unit in order.units if unit.extended or not unit.is_block)
    for sharded, dtype in ((sharded, dtype) for unit in units for sharded, dtype in zip(unit.sharded, unit.dtypes)):
        if sharded.extension is not None and not sharded.extension.gathered:
            continue  # of a block that the forward did not call
        elements, wire = math.prod(sharded.shape), [(dtype, math.prod(sharded.shape) * dtype.itemsize)]
        if sharded.extension is not None:
            wire = [(each.dtype, each.nbytes) for each in sharded.extension.gathered]
        dtypes = sorted({str(dtype).removeprefix("torch.") for dtype, _ in wire})
        yield Width(" and ".join(dtypes), elements, sum(nbytes for _, nbytes in wire))
