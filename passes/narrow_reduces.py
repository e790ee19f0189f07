"""Gradients travel at the width at which they arrive."""

from torch.fx import Graph, Node

from zcompile.graph.ops import REDUCE, SCATTERS, args_of, calls, infer, is_movement, is_widening


def narrow_reduces(graph: Graph) -> None:
    """Rewrite `reduce(move(upcast(x)))` as `reduce(move(x))`.

    Why: a reduce sums in fp32 in any case, so an upcast before it only makes more bytes travel.

    How: `move` is any number of nodes that only move elements or scatter them into zeros. Each must have one reader,
    for its dtype changes. Such nodes commute with the cast.
    """
    for reduce in calls(graph, REDUCE):
        links: list[Node] = []
        node = args_of(reduce)[0]
        while len(node.users) == 1 and (node.target in SCATTERS or (node.args and is_movement(node, node.args[0]))):
            links.append(node)
            node = args_of(node)[0]
        if not (isinstance(node, Node) and is_widening(node)):
            continue
        (links[-1] if links else reduce).replace_input_with(node, args_of(node)[0])
        for link in reversed(links):
            infer(link)
        if not node.users:
            graph.erase_node(node)
