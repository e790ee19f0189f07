"""zcompile's plan as a course of one step, to lay over what was measured."""

from dataclasses import dataclass

from zcompile.planning.curve import thinned
from zcompile.planning.explain import GRADIENT_BYTES, Explanation, in_order
from zcompile.profile.memory import POINTS
from zcompile.profile.timeline import Interval, union


@dataclass(frozen=True)
class Planned:
    """Predicted for a step on one rank.

    Attributes:
        memory: (ms since the step began, bytes, bytes without activations and gradients).
        transfers: (begin, end) in ms of gathers and reduces, those that follow each other without a gap as one.
        rests_on: where the figures that it was computed from come from.
    """

    step_ms: float
    exposed_ms: float
    peak_bytes: int
    memory: list[tuple[float, int, int]]
    transfers: list[Interval]
    rests_on: str


def planned(explained: Explanation, micro_steps: int) -> Planned:
    """The course of a step of so many micro-steps, whose gradients are kept until the optimizer's step; inside of `zcompile.accumulate` if
    the plan says what it would share, else gradients are added up by an op of its own behind each backward but the first."""
    earlier = GRADIENT_BYTES * -(
        -explained.parameters // explained.world
    )  # those of micro-steps before have moved out of the transport's memory
    shares = micro_steps > 1 and bool(explained.again)
    memory: list[tuple[float, int, int]] = []
    transfers: list[Interval] = []
    now = exposed_ms = 0.0
    for micro in range(micro_steps):
        alone, sharing = in_order(explained.graphs), in_order(explained.again if shares else explained.graphs)
        for first, later in zip(alone, sharing, strict=True):
            finds_full = shares and (micro > 0 or first[0].kind == "backward")
            graph, saved = later if finds_full else first
            static = explained.static_bytes + finds_full * explained.shared_bytes
            held = saved + (micro > 0) * earlier
            memory += [(now + ms, static + held + live, static + full) for ms, live, full in graph.memory]
            transfers += [(now + begin, now + end) for begin, end in graph.transfers]
            now += graph.total_ms
            exposed_ms += graph.exposed_ms
        now += explained.adding_ms * (micro > 0 and not shares)
    gradients = explained.gradient_bytes if micro_steps == 1 else earlier
    static = explained.static_bytes
    memory += [(at, static + gradients, static) for at in (now, now + explained.optimizer_ms)]
    peak = max(nbytes for _, nbytes, _ in memory)
    few = thinned(memory, POINTS, lambda point: point[1])
    return Planned(now + explained.optimizer_ms, exposed_ms, peak, few, union(transfers), explained.rests_on)
