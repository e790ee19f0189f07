import functools
import itertools
from collections import defaultdict

from torch.fx import Graph, Node

from zcompile.costs.formulas.products import is_matmul
from zcompile.graph.ops import (
    GATHER,
    REDUCES,
    args_of,
    aten,
    backward_nodes,
    calls,
    chain,
    is_cast,
    is_movement,
    readers,
    with_ancestors,
)


def free(graph: Graph) -> None:
    """Run input-gradient matmuls before weight-gradient matmuls.

    A linear layer's backward has two matmuls that read the output's gradient: dgrad also reads the gathered weight,
    wgrad the layer's input. This pass moves each wgrad, and all nodes that depend on it, after the last dgrad that
    reads the same gradient.

    Why: dgrad is the last reader of the unsharded weight, which is then freed before wgrad runs.

    How: a wgrad is a matmul on which no reader of an unsharded parameter depends. If the results of several dgrads are
    summed (queries, keys, values), wgrads move after the last of these dgrads. Then Inductor can fuse the recompute of
    a wgrad's input, such as a norm's result, with the norm's backward, which reads the sum. Moves depend only on kinds
    and order of nodes, which are equal on all ranks. No node moves past one that writes to an argument.
    """
    if not calls(graph, *REDUCES):
        return
    needed = with_ancestors(reader for gather in calls(graph, GATHER) for _, reader in readers(chain(gather)))
    position = {node: i for i, node in enumerate(graph.nodes)}
    dgrads = [node for node in graph.nodes if is_matmul(node) and node in needed]
    last_dgrad = _last_dgrads(dgrads, backward_nodes(graph))
    goal: dict[Node, Node] = {}  # a node that moves -> the dgrad after which it moves
    waiting: dict[Node, list[Node]] = defaultdict(list)  # a dgrad -> the nodes that move after it, in order
    for node in position:
        behind = [goal[source] for source in node.all_input_nodes if source in goal]
        if is_matmul(node) and node not in needed:
            behind += [last_dgrad[origin] for origin in map(_origin, node.all_input_nodes) if origin in last_dgrad]
        dgrad = max(behind, key=position.__getitem__, default=node)
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False):  # it writes to an argument
            _move(sorted(itertools.chain(*waiting.values()), key=position.__getitem__), before=node)
            waiting.clear()
            goal.clear()
        elif position[dgrad] > position[node]:
            goal[node] = dgrad
            waiting[dgrad].append(node)
        else:
            _move(waiting.pop(node, []), before=node.next)


def _last_dgrads(dgrads: list[Node], gradients: set[Node]) -> dict[Node, Node]:
    """Map each gradient to the last dgrad that reads it or, if that dgrad is summed with others, to the sum's last."""
    last_dgrad: dict[Node, Node] = {}
    sum_of = functools.cache(_sum_of)
    last: Node | None = None  # of the dgrads that are summed with `node`, the last in the graph
    for node in reversed(dgrads):
        origins = {_origin(source) for source in node.all_input_nodes if source in gradients}
        if not origins:  # a matmul of forward, run again. A wgrad that waited for it would keep its arguments alive
            last = None
            continue
        if last is None or sum_of(node) is not sum_of(last):
            last = node
        for origin in origins:
            last_dgrad.setdefault(origin, last)
    return last_dgrad


def _sum_of(node: Node) -> Node:
    """Return the last node of the sum that `node` enters: the same node for all dgrads of one sum.

    Follows additions, views, transposes and casts, as long as each node has one reader.
    """
    while len(node.users) == 1:
        (user,) = node.users
        is_sum = user.target is aten.add.Tensor or (user.target is aten.addmm.default and user.args[0] is node)
        if not (is_sum or is_movement(user, node) or is_cast(user)):
            break
        node = user
    return node


def _move(nodes: list[Node], before: Node) -> None:
    for node in nodes:
        before.prepend(node)


def _origin(node: Node) -> Node:
    """Return the node whose elements `node` moves, such as the input of a transpose; else `node` itself."""
    while node.args and is_movement(node, args_of(node)[0]):
        node = args_of(node)[0]
    return node
