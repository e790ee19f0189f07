from torch.fx import Graph, Node

from zcompile.graph.ops import REDUCE, args_of, aten, calls, insert, replace_and_erase


def merge_reduces(graph: Graph) -> None:
    """Rewrite `reduce(a) + reduce(b)` as `reduce(a + b)`.

    Why: a parameter that is read twice has two gradients; added before the transfer, they are transferred once.

    How: both reduces must be to the same shard, and only the addition may read them. Sums of more than two reduces
    merge pair by pair.
    """
    for add in calls(graph, aten.add.Tensor):
        terms = args_of(add)
        if not all(isinstance(term, Node) and term.target is REDUCE and len(term.users) == 1 for term in terms):
            continue
        (left, left_shard, *domain), (right, right_shard, *_) = map(args_of, terms)
        if left_shard is not right_shard or terms[0] is terms[1] or add.kwargs:
            continue
        total = insert(graph, add, aten.add.Tensor, left, right, like=add)
        replace_and_erase(graph, add, insert(graph, add, REDUCE, total, left_shard, *domain, like=add))
        for term in terms:
            graph.erase_node(term)
