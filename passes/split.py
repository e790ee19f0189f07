"""Each gather and each reduce becomes a start and a wait, which later passes move apart."""

from torch.fx import Graph

from zcompile.graph import GATHER, GATHER_START, GATHER_WAIT, REDUCE, REDUCE_ROWS, REDUCE_ROWS_START, REDUCE_START, REDUCE_WAIT, calls, forget, insert

STARTS = {REDUCE: REDUCE_START, REDUCE_ROWS: REDUCE_ROWS_START}


def split(graph: Graph) -> None:
    """gather -> gather_start, gather_wait; reduce -> reduce_start, reduce_wait; nothing stands between them yet.

    Both keep the fake value that was there, so to Inductor no storage changes: else it would infer again all that follows.
    """
    for gather in calls(graph, GATHER):
        fake = gather.meta["val"]
        start = insert(graph, gather, GATHER_START, *gather.args, like=gather, fake=fake)
        forget(graph, gather, insert(graph, gather, GATHER_WAIT, start, like=gather, fake=fake))
    for reduce in calls(graph, *STARTS):
        fake = reduce.meta["val"]
        start = insert(graph, reduce, STARTS[reduce.target], *reduce.args, like=reduce, fake=fake)
        forget(graph, reduce, insert(graph, reduce, REDUCE_WAIT, start, reduce.args[0], like=reduce, fake=fake))
