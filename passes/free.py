"""Of the products that read one gradient, those with full parameters come first: gradients of weights can wait."""

import functools
from collections import defaultdict

from torch.fx import Graph, Node

from zcompile.analysis.cost_model import is_product
from zcompile.analysis.fx_utils import (
    GATHER,
    MOVEMENT,
    REDUCES,
    aten,
    backward_nodes,
    calls,
    chain,
    is_cast,
    is_movement,
    readers,
)


def free(graph: Graph) -> None:
    """Place each product on which no reader of a full parameter depends, and what is made of it, behind the others that read the same gradient.

    So the graph has the order in which Inductor runs it: what is made again for the gradient of a weight it fuses with what follows
    the gradient of the input, and a gather's start between the two products would come behind both. Where several products in a row
    are added up to that gradient (queries, keys, values), all come first; between them it would need a kernel of its own. Kinds of
    nodes and their order decide, and no sizes, so that ranks which see other lengths decide alike. Nothing moves past a node that
    writes to its arguments.
    """
    if not calls(graph, *REDUCES):
        return
    needed = _ancestors({reader for gather in calls(graph, GATHER) for _, reader in readers(gather, chain(gather))})
    place = {node: at for at, node in enumerate(graph.nodes)}
    products = [node for node in graph.nodes if is_product(node)]
    gradients = backward_nodes(graph)
    last = _last_readers([node for node in products if node in needed], gradients)
    goal: dict[Node, Node] = {}  # what goes elsewhere -> behind which product
    held: dict[Node, list[Node]] = defaultdict(list)  # the same by product, in order
    for node in place:
        behind = [goal[source] for source in node.all_input_nodes if source in goal]
        if is_product(node) and node not in needed:
            behind += [last[origin] for origin in map(_origin, node.all_input_nodes) if origin in last]
        product = max(behind, key=place.__getitem__, default=node)
        if _writes(node):
            _move(sorted(sum(held.values(), []), key=place.__getitem__), before=node)
            held.clear()
            goal.clear()
        elif place[product] > place[node]:
            goal[node] = product
            held[product].append(node)
        else:
            _move(held.pop(node, []), before=node.next)


def _last_readers(products: list[Node], gradients: set[Node]) -> dict[Node, Node]:
    """What each gradient is read by last, of `products` in order, or the last of those in a row with which that one is added up."""
    found: dict[Node, Node] = {}
    sum_of = functools.cache(_sum_of)
    last: Node | None = None
    for node in reversed(products):
        read = {_origin(source) for source in node.all_input_nodes if source in gradients}
        if not read:  # made again, as checkpointing does: what it leads to would live from there on
            last = None
            continue
        if last is None or sum_of(node) is not sum_of(last):
            last = node
        for origin in read:
            found.setdefault(origin, last)
    return found


def _sum_of(node: Node) -> Node:
    """The last of the sums that `node` goes into, as far as nobody else reads what is on the way."""
    while len(node.users) == 1:
        (user,) = node.users
        added = user.target is aten.add.Tensor or user.target is aten.addmm.default and user.args[0] is node
        if not (added or is_movement(user, node) or is_cast(user)):
            break
        node = user
    return node


def _move(nodes: list[Node], before: Node) -> None:
    for node in nodes:
        before.prepend(node)


def _ancestors(nodes: set[Node]) -> set[Node]:
    """These nodes and all that they depend on."""
    found, pending = set(nodes), list(nodes)
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                pending.append(source)
    return found


def _origin(node: Node) -> Node:
    """What `node` moves data of."""
    while node.op == "call_function" and node.target in MOVEMENT:
        node = node.args[0]
    return node


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
