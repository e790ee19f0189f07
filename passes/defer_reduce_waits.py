"""Reduces are waited for late, so that the wire works while the device computes."""

from collections import deque

from torch.fx import Graph

from zcompile.analysis.fx_utils import REDUCE_STARTS, bytes_of, calls, is_returned, started, waits_of


def defer_reduce_waits(graph: Graph, reduce_budget_bytes: int) -> None:
    """Wait for a reduce when later ones have started, with at most `reduce_budget_bytes` of gradients on the way.

    One is on the way at least. A gradient that the graph itself reads is waited for where it is.
    """
    pending: deque = deque()
    on_the_way = 0
    for start in calls(graph, *REDUCE_STARTS):
        if not all(map(is_returned, waits_of(start))):
            continue
        pending.append(start)
        on_the_way += bytes_of(start)
        place = started(start)[-1]
        while on_the_way > reduce_budget_bytes and len(pending) > 1:
            first = pending.popleft()
            on_the_way -= bytes_of(first)
            for wait in waits_of(first):
                place.append(wait)
                place = wait
    for start in pending:
        for wait in waits_of(start):
            graph.output_node().prepend(wait)
