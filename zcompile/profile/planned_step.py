"""zcompile's plan as a course of one step, to lay over what was measured."""

from dataclasses import dataclass

from zcompile.explanation.curve import thinned
from zcompile.explanation.explanation import Explanation
from zcompile.explanation.planned_graph import in_order
from zcompile.explanation.predict import GRADIENT_BYTES
from zcompile.profile.memory import POINTS


@dataclass(frozen=True)
class PlannedStep:
    """What the plan predicts of a step on one rank."""

    step_ms: float
    exposed_ms: float
    peak_bytes: int
    memory: list[tuple[float, int, int]]  # (ms since the step began, bytes, bytes without activations and gradients)
    rests_on: str  # where the figures of the machine come from
    saved_bytes: int  # that the forward of a microbatch saves for backward
    activation_memory_budget: float  # the share of activations that this is under


def step_of(explained: Explanation, microbatches: int) -> PlannedStep:
    """The course of a step of so many microbatches, whose gradients live until the optimizer's step.

    If the plan caches something inside of `zcompile.accumulate`, the step uses that. Else an op of its own adds up
    gradients after each backward but the first.
    """
    # Gradients of earlier microbatches have moved out of the transport's memory.
    earlier_bytes = GRADIENT_BYTES * -(-explained.parameters // explained.world)
    caches = microbatches > 1 and bool(explained.cached_graphs)
    memory: list[tuple[float, int, int]] = []
    now_ms = exposed_ms = 0.0
    alone = in_order(explained.graphs)
    caching = in_order(explained.cached_graphs if caches else explained.graphs)
    for microbatch in range(microbatches):
        for without_cache, with_cache in zip(alone, caching, strict=True):
            hits = caches and (microbatch > 0 or without_cache[0].kind == "backward")
            graph, saved_bytes = with_cache if hits else without_cache
            static = explained.static_bytes + hits * explained.cached_bytes
            held = saved_bytes + (microbatch > 0) * earlier_bytes
            memory += [(now_ms + ms, static + held + live, static + unsharded) for ms, live, unsharded in graph.memory]
            now_ms += graph.total_ms
            exposed_ms += graph.exposed_ms
        now_ms += explained.adding_ms * (microbatch > 0 and not caches)
    gradients = explained.gradient_bytes if microbatches == 1 else earlier_bytes
    static = explained.static_bytes
    end_ms = now_ms + explained.optimizer_ms
    memory += [(ms, static + gradients, static) for ms in (now_ms, end_ms)]
    peak_bytes = max(nbytes for _, nbytes, _ in memory)
    curve = thinned(memory, POINTS, lambda point: point[1])
    return PlannedStep(
        step_ms=end_ms,
        exposed_ms=exposed_ms,
        peak_bytes=peak_bytes,
        memory=curve,
        rests_on=explained.rests_on,
        saved_bytes=explained.saved_bytes,
        activation_memory_budget=explained.activation_memory_budget,
    )
