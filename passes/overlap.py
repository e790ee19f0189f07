"""Gathers and reduces are split in two, so that the wire works while the device computes."""

from torch.fx import Graph

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
)


def overlap(graph: Graph) -> None:
    """Start each gather one gather ahead of its wait; wait for each reduce when the next has started.

    At most two full parameters are alive besides those that are read together, and at most two gradients wait.
    """
    gathers = calls(graph, GATHER)
    starts = []
    for at, gather in enumerate(gathers):
        place = gathers[at - 1] if at else gather
        starts.append(insert(graph, place, GATHER_START, *gather.args, like=gather))
    for gather, start in zip(gathers, starts):
        forget(graph, gather, insert(graph, gather, GATHER_WAIT, start, like=gather))

    waiting = None
    for reduce in calls(graph, REDUCE):
        grad, shard = reduce.args
        start = insert(graph, reduce, REDUCE_START, grad, shard, like=reduce)
        wait = insert(graph, reduce, REDUCE_WAIT, start, grad, like=reduce)
        only_returned = all(user.op == "output" for user in reduce.users)
        forget(graph, reduce, wait)
        if waiting is not None:
            start.append(waiting)
        waiting = wait if only_returned else None
    if waiting is not None:
        graph.output_node().prepend(waiting)
