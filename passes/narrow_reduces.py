from torch.fx import Graph, Node

from zcompile.graph.ops import REDUCE, SCATTERS, args_of, calls, infer, is_movement, is_widening


def narrow_reduces(graph: Graph) -> None:
    """Rewrite `reduce(upcast(x))` as `reduce(x)`, also with nodes between upcast and reduce that only move elements.

    Why: a reduce sums in fp32 anyway, so an upcast before it only adds bytes to the transfer.

    How: the nodes between may also scatter elements into zeros, because such nodes commute with the cast. Each must
    have one reader, because its dtype changes.
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
