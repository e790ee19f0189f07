"""Start gathers before the model's own collective that precedes their readers."""

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
    """Move each start of a gather before the last of the model's own collectives that precedes it.

    Why: `prefetch` moves no gather across these, because the times that it estimates depend on a rank's batch. Tensor
    and expert parallelism put collectives into the graph, such as an all-to-all to the experts and back. All ranks must
    start these collectives and the gathers in the same order, or they wait for each other forever. But between such an
    all-to-all and the reader of a gather there is little compute that could hide the gather.

    How: moves depend only on parameter sizes and the order of the graph, which all ranks share. A gather crosses at
    most one collective. All gathers that cross the same collective have at most a quarter of `gather_budget_bytes`.
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
        crossed_bytes[collective] += transfer_bytes(start)  # counted even if it stays, so that later starts stay too
        if crossed_bytes[collective] > gather_budget_bytes // 4:
            continue
        items = started_tensors(start) if start.target is GATHER_GROUP_START else []
        for node in (start, *items):
            collective.prepend(node)


def _collective_before(graph: Graph) -> dict[Node, Node]:
    """Map each node to the last of the model's own collectives before it. Nodes before the first are left out."""
    before: dict[Node, Node] = {}
    last: Node | None = None
    for node in graph.nodes:
        if last is not None:
            before[node] = last
        if is_user_collective(node):
            last = node
    return before
