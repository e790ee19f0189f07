"""Gathers start ahead of their readers: as late as hides them, since earlier only costs memory."""

from bisect import bisect_right
from collections import Counter
from itertools import accumulate
from typing import NamedTuple

from torch.fx import Graph, Node

from zcompile.analysis.cost_model import Costs, transfer_s
from zcompile.analysis.fx_utils import (
    GATHER_GROUP_START,
    GATHER_START,
    REDUCE_STARTS,
    calls,
    started,
    waits_of,
)
from zcompile.analysis.hardware import Link
from zcompile.analysis.param_lifetimes import ParamLifetimes

# How much of its own time, and how long besides, a transfer starts before it must. Costs are estimates, and an early start costs
# a little memory, a late one makes every rank wait.
EARLY, SLACK_S = 0.5, 30e-6


def prefetch(graph: Graph, link: Link, gather_budget_bytes: int, fused: bool = True) -> None:
    """Move each start up to where the compute between it and its first reader takes as long as the transfer.

    The wire serves one gather after the other, so a gather is also done before the next must begin, and in backward it shares
    the wire with reduces. Starts keep their order. Where windows would leave `ParamLifetimes.bound`, a gather starts later; and a
    parameter that is gathered again, after its last reader before.
    """
    starts = calls(graph, GATHER_START, GATHER_GROUP_START)
    if not starts:
        return
    windows = ParamLifetimes(graph)
    nodes, position = windows.liveness.nodes, windows.liveness.at
    seconds = Costs(graph, link, fused).seconds
    before_s = list(accumulate((seconds[node] for node in nodes), initial=0.0))
    full, limit = windows.full_bytes(), windows.bound(gather_budget_bytes)
    counted = Counter()
    for window in windows.windows:
        counted[window.start] += 0 if window.returned else window.nbytes
    given_up = windows.given_up()
    place = next(at for at, node in enumerate(nodes) if node.op != "placeholder")
    moves: list[tuple[Node, int]] = []
    waited_s = free_s = 0.0  # how long compute has waited by now; when the wire is free, as compute's clock shows it
    for start, needs in zip(starts, _needs(graph, starts, link, position, before_s), strict=True):
        queued_s = free_s - waited_s - needs.takes_s  # farther behind what is on the wire it would only take memory
        earliest_s = max(needs.begins_s, queued_s) - EARLY * needs.takes_s - SLACK_S
        place = max(place, bisect_right(before_s, earliest_s) - 1, given_up.get(start, 0))
        at = position[start]
        while at > place and full[at - 1] + counted[start] <= limit:
            at -= 1
            full[at] += counted[start]
        place = min(max(place, at), position[start])
        moves.append((start, place))
        free_s = max(free_s, before_s[place] + waited_s) + needs.takes_s
        waited_s += max(0.0, free_s - waited_s - needs.reader_s)
    items = {start: started(start) if start.target is GATHER_GROUP_START else [] for start in starts}
    moved = {node for start in starts for node in (start, *items[start])}
    for start, place in moves:
        before = next(nodes[at] for at in range(place, len(nodes)) if nodes[at] not in moved)
        for node in (start, *items[start]):
            before.prepend(node)


class _Needs(NamedTuple):
    """When a transfer must begin to be hidden, when its first reader comes, and how long it takes; seconds of compute."""

    begins_s: float
    reader_s: float
    takes_s: float


def _needs(
    graph: Graph, starts: list[Node], link: Link, position: dict[Node, int], before_s: list[float]
) -> list[_Needs]:
    """Of each start, with one transfer at a time on the wire."""
    gather_s = sum(transfer_s(start, link) for start in starts)
    reduce_s = sum(transfer_s(start, link) for start in calls(graph, *REDUCE_STARTS))
    shared = 1.0 + reduce_s / gather_s if gather_s else 1.0
    found: list[_Needs] = []
    begins_s = float("inf")  # of the next one
    for start in reversed(starts):
        takes_s = shared * transfer_s(start, link)
        reader_s = before_s[min(position[wait] for wait in waits_of(start))]
        begins_s = min(begins_s, reader_s) - takes_s
        found.append(_Needs(begins_s, reader_s, takes_s))
    return found[::-1]
