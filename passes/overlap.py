"""Gathers and reduces are split in two, so that the wire works while the device computes."""

from collections import deque

from torch.fx import Graph, Node

from zcompile.graph import (
    GATHER,
    GATHER_START,
    GATHER_WAIT,
    REDUCE,
    REDUCE_START,
    REDUCE_WAIT,
    calls,
    forget,
    insert,
    nbytes,
)


def overlap(graph: Graph, in_flight_bytes: int) -> None:
    """Start gathers ahead of their waits and wait for reduces later, with at most `in_flight_bytes` of each on the way.

    One is on the way at least: the next gather starts before the full parameter before it is read, and a gradient is
    waited for when the next has started.
    """
    _split_gathers(graph, in_flight_bytes)
    _split_reduces(graph, in_flight_bytes)


def _split_gathers(graph: Graph, in_flight_bytes: int) -> None:
    gathers = calls(graph, GATHER)
    starts = []
    top = next(node for node in graph.nodes if node.op != "placeholder")
    ahead_of, on_the_way = -1, 0  # gathers after `ahead_of` start where that one is waited for, or with the graph
    for at, gather in enumerate(gathers):
        on_the_way += nbytes(gather)
        while on_the_way > in_flight_bytes and ahead_of < at - 1:
            ahead_of += 1
            on_the_way -= nbytes(gathers[ahead_of])
        place = gathers[ahead_of] if ahead_of >= 0 else top
        starts.append(insert(graph, place, GATHER_START, *gather.args, like=gather))
    for gather, start in zip(gathers, starts, strict=True):
        forget(graph, gather, insert(graph, gather, GATHER_WAIT, start, like=gather))


def _split_reduces(graph: Graph, in_flight_bytes: int) -> None:
    waits: deque[Node] = deque()
    on_the_way = 0
    for reduce in calls(graph, REDUCE):
        grad, shard = reduce.args
        place = start = insert(graph, reduce, REDUCE_START, grad, shard, like=reduce)
        wait = insert(graph, reduce, REDUCE_WAIT, start, grad, like=reduce)
        only_returned = all(user.op == "output" for user in reduce.users)
        forget(graph, reduce, wait)
        if not only_returned:
            continue
        waits.append(wait)
        on_the_way += nbytes(grad)
        while on_the_way > in_flight_bytes and len(waits) > 1:
            on_the_way -= nbytes(waits[0].args[1])
            place.append(waits[0])
            place = waits.popleft()
    for wait in waits:
        graph.output_node().prepend(wait)

