"""One gather per parameter and graph."""

from torch.fx import Graph, Node

from zcompile.analysis.fx_utils import GATHER, calls, forget


def dedup_gathers(graph: Graph) -> None:
    """Let every read of a parameter use the first gather of it. How long the result lives is decided later."""
    first: dict[tuple, Node] = {}
    for node in calls(graph, GATHER):
        shard, shape, dtype = node.args
        kept = first.setdefault((shard, tuple(shape), dtype), node)
        if kept is not node:
            forget(graph, node, kept)
