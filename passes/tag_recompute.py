"""No full parameter is saved for backward: it is gathered again."""

from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy

from zcompile.analysis.fx_utils import GATHER, backward_nodes, calls, chain, readers


def tag_recompute(graph: Graph) -> None:
    """Tag every gather, and what moves and casts it, to be redone in backward.

    The partitioner would save them otherwise, and a saved view pins the whole parameter. Also forbid it to redo the reader
    of a parameter that backward has no other use for (a bias, say): that would cost a gather for an addition, and which
    gathers a backward has would depend on sizes, which ranks need not share. Users' own tags are left alone.
    """
    backward = backward_nodes(graph)
    for gather in calls(graph, GATHER):
        links = chain(gather)
        for link in links:
            link.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            link.meta.pop("ac_graph_id", None)
        outside = [reader for _, reader in readers(gather, links) if reader.op == "call_function"]
        if any(reader in backward for reader in outside):
            continue
        for reader in outside:
            reader.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
