from torch.fx import Graph

from zcompile.graph.ops import (
    GATHER,
    GATHER_START,
    GATHER_WAIT,
    REDUCE,
    REDUCE_ROWS,
    REDUCE_ROWS_START,
    REDUCE_START,
    REDUCE_WAIT,
    args_of,
    calls,
    insert,
    turn_into,
)


def split_collectives(graph: Graph) -> None:
    """Rewrite each `gather` as `gather_start`, `gather_wait`, and each `reduce` as `reduce_start`, `reduce_wait`.

    Why: later passes move start and wait apart, so that transfers overlap with compute.

    How: the existing node becomes the wait, and the start is inserted before it with the same fake value
    (`meta["val"]`): for a new one, Inductor would compute the fake values of all later nodes again. A `reduce_wait`
    also takes the unreduced gradient, to keep its memory alive until the transfer ends.
    """
    for gather in calls(graph, GATHER):
        start = insert(graph, gather, GATHER_START, *gather.args, like=gather, fake=gather.meta["val"])
        turn_into(gather, GATHER_WAIT, start)
    for reduce in calls(graph, REDUCE, REDUCE_ROWS):
        start_op = REDUCE_START if reduce.target is REDUCE else REDUCE_ROWS_START
        start = insert(graph, reduce, start_op, *reduce.args, like=reduce, fake=reduce.meta["val"])
        turn_into(reduce, REDUCE_WAIT, start, args_of(reduce)[0])
