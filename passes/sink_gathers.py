from torch.fx import Graph, Node

from zcompile.graph.ops import GATHER, calls, chain


def sink_gathers(graph: Graph) -> None:
    """Place each gather, with the views and casts of its result, directly before the first node that computes with it.

    Why: an unsharded parameter should live no longer than it is used. AOTAutograd places gathers where the model first
    touches the parameter.

    How: a gather and its views and casts are a chain (`chain` of graph/ops.py). Before each node outside of all chains,
    in order, place the nodes of chains that it needs, unless they are already placed.
    """
    floating = {link for gather in calls(graph, GATHER) for link in chain(gather)}
    placed: set[Node] = set()
    for node in list(graph.nodes):
        if node in floating:
            continue
        pending = [source for source in node.all_input_nodes if source in floating]
        needed: list[Node] = []  # each node before the nodes that it reads
        while pending:
            link = pending.pop()
            if link not in placed:
                placed.add(link)
                needed.append(link)
                pending += [source for source in link.all_input_nodes if source in floating]
        for link in reversed(needed):
            node.prepend(link)
