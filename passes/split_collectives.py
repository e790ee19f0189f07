"""Each gather and each reduce becomes a start and a wait, which later passes move apart."""

from torch.fx import Graph

from zcompile.analysis.fx_utils import (
    GATHER,
    GATHER_START,
    GATHER_WAIT,
    REDUCE,
    REDUCE_ROWS,
    REDUCE_ROWS_START,
    REDUCE_START,
    REDUCE_WAIT,
    calls,
    insert,
    turn_into,
)

STARTS = {REDUCE: REDUCE_START, REDUCE_ROWS: REDUCE_ROWS_START}


def split_collectives(graph: Graph) -> None:
    """gather -> gather_start, gather_wait; reduce -> reduce_start, reduce_wait; nothing stands between them yet.

    The wait is the node that was there, and the start has its fake value: for Inductor neither a reader nor a storage changes, or
    else it would infer again all that follows.
    """
    for gather in calls(graph, GATHER):
        start = insert(graph, gather, GATHER_START, *gather.args, like=gather, fake=gather.meta["val"])
        turn_into(gather, GATHER_WAIT, start)
    for reduce in calls(graph, *STARTS):
        start = insert(graph, reduce, STARTS[reduce.target], *reduce.args, like=reduce, fake=reduce.meta["val"])
        turn_into(reduce, REDUCE_WAIT, start, reduce.args[0])
