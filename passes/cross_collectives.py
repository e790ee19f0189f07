from collections import Counter

from torch.fx import Graph, Node

from zcompile.graph.ops import (
    GATHER_GROUP_START,
    GATHER_START,
    calls,
    is_user_collective,
    started_tensors,
    transfer_bytes,
)
from zcompile.graph.param_lifetimes import ParamLifetimes


def cross_collectives(graph: Graph, gather_budget_bytes: int) -> None:
    """Move each gather's start before the last collective of tensor or expert parallelism that precedes it.

    Why: between such a collective (an all-to-all back from the experts) and the reader of a gather, there is little
    compute that could hide the gather. `prefetch` moves no gather across collectives of the model: it estimates times,
    which depend on a rank's batch, but all ranks must start collectives and gathers in the same order, or they hang.

    How: moves depend only on parameter sizes and the order of the graph, which are the same on all ranks. A gather
    crosses at most one collective. All gathers that cross one collective have at most a quarter of
    `gather_budget_bytes` together.
    """
    starts = calls(graph, GATHER_START, GATHER_GROUP_START)
    before = _collective_before(graph)
    if not before:
        return
    lifetimes = ParamLifetimes(graph)
    position, regathered_from = lifetimes.liveness.position, lifetimes.regathered_from()
    crossed_bytes: Counter[Node] = Counter()
    for start in starts:
        collective = before.get(start)
        if collective is None or position[collective] < regathered_from.get(start, 0):
            continue
        crossed_bytes[collective] += transfer_bytes(start)  # also if `start` stays: then no later start overtakes it
        if crossed_bytes[collective] > gather_budget_bytes // 4:
            continue
        items = started_tensors(start) if start.target is GATHER_GROUP_START else []
        for node in (start, *items):
            collective.prepend(node)


def _collective_before(graph: Graph) -> dict[Node, Node]:
    """Map each node to the last collective of the model before it. Nodes before the first collective are left out."""
    before: dict[Node, Node] = {}
    last: Node | None = None
    for node in graph.nodes:
        if last is not None:
            before[node] = last
        if is_user_collective(node):
            last = node
    return before
