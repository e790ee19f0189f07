"""Gathers move down to their first readers, so that a full parameter lives no longer than it is used."""

from torch.fx import Graph, Node

from zcompile.analysis.fx_utils import GATHER, calls, chain


def sink_gathers(graph: Graph) -> None:
    """Place each gather, and what moves and casts it, directly before the first node that computes with it."""
    floating = {link for gather in calls(graph, GATHER) for link in chain(gather)}
    placed: set[Node] = set()
    for node in list(graph.nodes):
        if node in floating:
            continue
        pending = [source for source in node.all_input_nodes if source in floating]
        order: list[Node] = []
        while pending:
            source = pending.pop()
            if source not in placed:
                placed.add(source)
                order.append(source)
                pending += [before for before in source.all_input_nodes if before in floating]
        for source in reversed(order):
            node.prepend(source)
