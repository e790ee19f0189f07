"""Predicts a step of several microbatches, to be compared with a measured step."""

from dataclasses import dataclass

from zcompile.explanation.explanation import Explanation
from zcompile.explanation.planned_graph import in_order
from zcompile.explanation.predict import GRADIENT_BYTES


@dataclass(frozen=True)
class PlannedStep:
    """The prediction of a step on one rank."""

    step_ms: float
    exposed_ms: float
    peak_bytes: int
    moved_bytes: int  # of unsharded parameters that are gathered, and of unsharded gradients that are reduced
    rests_on: str  # the origin of the machine's rates
    saved_bytes: int  # that the forward of a microbatch saves for backward
    activation_memory_budget: float  # the share of activations that forwards save
    widths: str  # the text of `Explanation.widths`


def step_of(explained: Explanation, microbatches: int) -> PlannedStep:
    """Predict a step of `microbatches` microbatches. Gradients live until the optimizer's step.

    If `explained.cached_graphs` is not empty, the step runs in `zcompile.accumulate`. Otherwise, an extra op adds up
    gradients after each backward but the first.
    """
    # Gradients of earlier microbatches count in full. Those of the running backward are in its `live_bytes`, which
    # leaves out gradients in the memory of p2p's cached shards (`gradient_fraction`).
    earlier_bytes = GRADIENT_BYTES * -(-explained.parameters // explained.world)
    caches = microbatches > 1 and bool(explained.cached_graphs)
    peak_bytes = explained.gradient_bytes if microbatches == 1 else earlier_bytes  # in the optimizer's step
    step_ms = exposed_ms = explained.over_hosts_ms
    moved_bytes = 0
    alone = in_order(explained.graphs)
    caching = in_order(explained.cached_graphs if caches else explained.graphs)
    for microbatch in range(microbatches):
        for without_cache, with_cache in zip(alone, caching, strict=True):
            hits = caches and (microbatch > 0 or without_cache[0].kind == "backward")
            graph, saved_bytes = with_cache if hits else without_cache
            held = saved_bytes + hits * explained.cached_bytes + (microbatch > 0) * earlier_bytes
            peak_bytes = max(peak_bytes, held + graph.live_bytes)
            step_ms += graph.total_ms
            exposed_ms += graph.exposed_ms
            moved_bytes += graph.gathered_bytes + graph.reduced_bytes
        step_ms += explained.adding_ms * (microbatch > 0 and not caches)
    return PlannedStep(
        step_ms=step_ms + explained.optimizer_ms,
        exposed_ms=exposed_ms,
        moved_bytes=moved_bytes,
        peak_bytes=explained.static_bytes + peak_bytes,
        rests_on=explained.rests_on,
        saved_bytes=explained.saved_bytes,
        activation_memory_budget=explained.activation_memory_budget,
        widths="; ".join(map(str, explained.widths)),
    )
