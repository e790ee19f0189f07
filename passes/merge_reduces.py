"""One reduce per parameter, at the width at which its gradient arrives."""

from torch.fx import Graph, Node

from zcompile.analysis.fx_utils import MOVEMENT, REDUCE, SCATTER, aten, calls, forget, infer, insert, is_widening


def merge_reduces(graph: Graph) -> None:
    """reduce(a) + reduce(b) -> reduce(a + b): gradients of a parameter read twice are summed before the wire."""
    for add in calls(graph, aten.add.Tensor):
        terms = add.args
        if not all(isinstance(term, Node) and term.target is REDUCE and len(term.users) == 1 for term in terms):
            continue
        (left, shard), (right, other) = (term.args for term in terms)
        if shard is not other or terms[0] is terms[1] or add.kwargs:
            continue
        total = insert(graph, add, aten.add.Tensor, left, right, like=add)
        forget(graph, add, insert(graph, add, REDUCE, total, shard, like=add))
        for term in terms:
            graph.erase_node(term)


def narrow_reduces(graph: Graph) -> None:
    """reduce(move(upcast(x))) -> reduce(move(x)): the sum is fp32 in any case, so an upcast before the wire is only bytes."""
    for reduce in calls(graph, REDUCE):
        links: list[Node] = []
        node = reduce.args[0]
        while node.op == "call_function" and node.target in MOVEMENT | SCATTER and len(node.users) == 1:
            links.append(node)
            node = node.args[0]
        if not (isinstance(node, Node) and is_widening(node)):
            continue
        (links[-1] if links else reduce).replace_input_with(node, node.args[0])
        for link in reversed(links):
            infer(link)
        if not node.users:
            graph.erase_node(node)
