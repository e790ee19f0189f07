from bisect import bisect_right
from collections import Counter
from itertools import accumulate
from typing import NamedTuple

from torch.fx import Graph, Node

from zcompile.costs.hardware import Link
from zcompile.costs.model import Costs, transfer_s
from zcompile.graph.ops import (
    GATHER_GROUP_START,
    GATHER_START,
    REDUCE_STARTS,
    calls,
    is_user_collective,
    started_tensors,
    waits_of,
)
from zcompile.graph.param_lifetimes import ParamLifetimes

# Because costs are estimates, a transfer starts earlier than computed, by EARLY_SHARE of its own time plus EARLY_S
# seconds. A start that is too early costs a little memory; a start that is too late makes every rank wait.
EARLY_SHARE, EARLY_S = 0.5, 30e-6


def prefetch(graph: Graph, link: Link, gather_budget_bytes: int, fused: bool = True) -> None:
    """Start each gather so early that the compute until its first reader takes as long as the transfer.

    Why: a gather that starts late makes compute wait, and a gather that starts early takes memory.

    How: one gather uses the link at a time, so each gather must also end before the next must begin. In backward,
    gathers count as slower, because reduces use the link too. Starts keep their order, and do not cross collectives of
    the model itself (see `cross_collectives`). A gather starts later if unsharded parameters would otherwise exceed
    `ParamLifetimes.bound_bytes`, or if its parameter is still unsharded from an earlier gather.

    Args:
        link: estimated rates of compute and of transfers.
        gather_budget_bytes: most bytes of unsharded parameters; see `ParamLifetimes.bound_bytes`.
        fused: whether pointwise nodes fuse, as under Inductor.
    """
    starts = calls(graph, GATHER_START, GATHER_GROUP_START)
    if not starts:
        return
    fixed = [i for i, node in enumerate(graph.nodes) if is_user_collective(node)]
    lifetimes = ParamLifetimes(graph)
    nodes, position = lifetimes.liveness.nodes, lifetimes.liveness.position
    seconds = Costs(graph, link, fused).seconds
    before_s = list(accumulate((seconds[node] for node in nodes), initial=0.0))
    needs = _needs(graph, starts, link, position, before_s)
    goals = _goals(starts, needs, lifetimes, before_s, lifetimes.bound_bytes(gather_budget_bytes), fixed)
    items = {start: started_tensors(start) if start.target is GATHER_GROUP_START else [] for start in starts}
    moving = {node for start in starts for node in (start, *items[start])}
    for start, goal in zip(starts, goals, strict=True):
        before = next(nodes[i] for i in range(goal, len(nodes)) if nodes[i] not in moving)
        for node in (start, *items[start]):
            before.prepend(node)


class _Needs(NamedTuple):
    """When a transfer must run if compute is to hide it. Times are seconds of compute since the graph's start."""

    begins_s: float  # the latest time at which it may begin
    reader_s: float  # when its first reader runs
    takes_s: float  # how long the transfer takes


def _needs(
    graph: Graph, starts: list[Node], link: Link, position: dict[Node, int], before_s: list[float]
) -> list[_Needs]:
    """Return when each gather must run, one at a time, so that no reader waits. `before_s[i]`: when node i runs."""
    gather_s = sum(transfer_s(start, link) for start in starts)
    reduce_s = sum(transfer_s(start, link) for start in calls(graph, *REDUCE_STARTS))
    slowdown = 1.0 + reduce_s / gather_s if gather_s else 1.0
    needs: list[_Needs] = []
    begins_s = float("inf")  # of the transfer after `start`
    for start in reversed(starts):
        takes_s = slowdown * transfer_s(start, link)
        reader_s = before_s[min(position[wait] for wait in waits_of(start))]
        begins_s = min(begins_s, reader_s) - takes_s
        needs.append(_Needs(begins_s, reader_s, takes_s))
    return needs[::-1]


def _goals(
    starts: list[Node],
    needs: list[_Needs],
    lifetimes: ParamLifetimes,
    before_s: list[float],
    bound_bytes: int,
    fixed: list[int],
) -> list[int]:
    """Return for each start the position before which to move it, ascending. No start crosses a position in `fixed`."""
    position = lifetimes.liveness.position
    unsharded_bytes = lifetimes.unsharded_bytes()
    bytes_of: Counter[Node] = Counter()  # a start -> the bytes that it adds to `unsharded_bytes`
    for lifetime in lifetimes.lifetimes:
        bytes_of[lifetime.start] += 0 if lifetime.returned else lifetime.nbytes
    regathered_from = lifetimes.regathered_from()
    goal = next(i for i, node in enumerate(lifetimes.liveness.nodes) if node.op != "placeholder")
    goals: list[int] = []
    waited_s = 0.0  # how long compute has waited for transfers so far
    wire_free_s = 0.0  # when the last transfer ends, in seconds of compute plus waiting
    for start, need in zip(starts, needs, strict=True):
        # Before this time, a start would only take memory while its transfer waits for the link.
        queued_s = wire_free_s - waited_s - need.takes_s
        earliest_s = max(need.begins_s, queued_s) - EARLY_SHARE * need.takes_s - EARLY_S
        i = position[start]
        behind = fixed[bisect_right(fixed, i) - 1] + 1 if fixed and fixed[0] < i else 0
        goal = max(goal, behind, bisect_right(before_s, earliest_s) - 1, regathered_from.get(start, 0))
        while i > goal and unsharded_bytes[i - 1] + bytes_of[start] <= bound_bytes:
            i -= 1
            unsharded_bytes[i] += bytes_of[start]
        goal = min(max(goal, i), position[start])
        goals.append(goal)
        wire_free_s = max(wire_free_s, before_s[goal] + waited_s) + need.takes_s
        waited_s += max(0.0, wire_free_s - waited_s - need.reader_s)
    return goals
