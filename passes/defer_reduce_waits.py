from collections import deque

from torch.fx import Graph, Node

from zcompile.graph.ops import (
    REDUCE_STARTS,
    calls,
    is_returned,
    reduce_budget,
    started_tensors,
    transfer_bytes,
    waits_of,
)


def defer_reduce_waits(graph: Graph, reduce_budget_bytes: int | None) -> None:
    """Wait for each reduce only when gradients in flight exceed `reduce_budget_bytes`, or at the graph's end.

    Why: backward reads no reduced gradient, so reduces can overlap with its compute. The budget is needed because an
    unreduced gradient keeps its memory until its reduce is waited for.

    How: waits keep the order of their starts. One reduce may be in flight even if it exceeds the budget. If another
    node of the graph reads a reduced gradient, its wait does not move.

    Args:
        reduce_budget_bytes: most bytes of unreduced gradients in flight. None: the default of graph.ops.reduce_budget.
    """
    budget_bytes = reduce_budget(graph, reduce_budget_bytes)
    pending: deque[Node] = deque()
    pending_bytes = 0
    for start in calls(graph, *REDUCE_STARTS):
        if not all(map(is_returned, waits_of(start))):
            continue
        pending.append(start)
        pending_bytes += transfer_bytes(start)
        place = started_tensors(start)[-1]
        while pending_bytes > budget_bytes and len(pending) > 1:
            oldest = pending.popleft()
            pending_bytes -= transfer_bytes(oldest)
            for wait in waits_of(oldest):
                place.append(wait)
                place = wait
    for start in pending:
        for wait in waits_of(start):
            graph.output_node().prepend(wait)
