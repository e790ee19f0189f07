"""Gathers start before the user's collective that stands before their readers."""

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
    """Move each start of a gather before the last collective of the user's that stands before it.

    Why: `prefetch` moves no gather across a collective, because its costs follow from batches, which differ between
    ranks. Tensor and expert parallelism put collectives into the graph: an all-to-all to the experts and back. All
    ranks must start those and the gathers in one order, else they wait for each other forever. But little compute could
    hide a gather that starts between such an all-to-all and its reader.

    How: by numbers that all ranks share, sizes of parameters and the order of the graph. A gather crosses one
    collective. At most a quarter of the budget crosses each, in the order of the graph.
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
        crossed_bytes[collective] += transfer_bytes(start)  # also if it stays: later ones then stay, too
        if crossed_bytes[collective] > gather_budget_bytes // 4:
            continue
        items = started_tensors(start) if start.target is GATHER_GROUP_START else []
        for node in (start, *items):
            collective.prepend(node)


def _collective_before(graph: Graph) -> dict[Node, Node]:
    """For each node behind one of the user's collectives: the last of those before it."""
    before: dict[Node, Node] = {}
    last: Node | None = None
    for node in graph.nodes:
        if last is not None:
            before[node] = last
        if is_user_collective(node):
            last = node
    return before
