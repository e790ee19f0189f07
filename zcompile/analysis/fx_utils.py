"""The vocabulary in which passes speak of FX graphs, and the only place that knows aten's names.

A *chain* is a gather and what merely moves or casts its data: nothing in it computes, so any of it may be redone or moved.
"""

import math
import operator
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

aten = torch.ops.aten
ops = torch.ops.zcompile

GATHER = ops.gather.default
REDUCE = ops.reduce.default
GATHER_START = ops.gather_start.default
GATHER_CACHED_START = ops.gather_cached_start.default
GATHER_GROUP_START = ops.gather_group_start.default
GATHER_WAIT = ops.gather_wait.default
GATHER_ROWS = ops.gather_rows.default
REDUCE_START = ops.reduce_start.default
REDUCE_GROUP_START = ops.reduce_group_start.default
REDUCE_WAIT = ops.reduce_wait.default
REDUCE_ROWS = ops.reduce_rows.default
REDUCE_ROWS_START = ops.reduce_rows_start.default

GATHER_STARTS = (GATHER_START, GATHER_CACHED_START, GATHER_GROUP_START)
GATHERS = {GATHER, *GATHER_STARTS}
REDUCE_STARTS = (REDUCE_START, REDUCE_GROUP_START, REDUCE_ROWS_START)
ROWS = {REDUCE_ROWS, REDUCE_ROWS_START}
REDUCES = {REDUCE, REDUCE_ROWS, *REDUCE_STARTS}
WAITS = {GATHER_WAIT, REDUCE_WAIT}

# Key of `meta`, of a full parameter that is saved for backward, and that nobody else sees: whether its memory may be the runtime's.
SAVED_FOR_BACKWARD = "zcompile_saved_for_backward"

# Ops whose output holds elements of their first argument, unchanged.
MOVEMENT = {
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.expand.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.permute.default,
    aten.reshape.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten._unsafe_view.default,
    operator.getitem,
}

# Gradients of movement that scatter into zeros: they commute with a cast just as well.
SCATTER = {aten.select_backward.default, aten.slice_backward.default}


def calls(graph: Graph, *targets) -> list[Node]:
    """All calls of `targets`, in graph order."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def value(node: Node) -> torch.Tensor:
    """The fake tensor that stands for the node's result."""
    return node.meta["val"]


def nbytes(node: Node) -> int:
    """Bytes of the node's result, a tensor of static size."""
    return value(node).numel() * value(node).dtype.itemsize


def hint(size: int | torch.SymInt) -> int:
    """A size, or what a dynamic one was when the graph was traced."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 1


def shape_hint(tensor: torch.Tensor) -> torch.Size:
    return torch.Size([hint(size) for size in tensor.shape])


def sizes_of(node: Node) -> list[int]:
    """Bytes of each tensor in the result of `node`; dynamic sizes as traced."""
    found = node.meta.get("val")
    tensors = [found] if isinstance(found, torch.Tensor) else found if isinstance(found, (tuple, list)) else []
    return [shape_hint(one).numel() * one.dtype.itemsize for one in tensors if isinstance(one, torch.Tensor)]


def item_count(node: object) -> int | None:
    """How many items the result of `node` has; None if it is no tuple."""
    found = node.meta.get("val") if isinstance(node, Node) else None
    return len(found) if isinstance(found, (tuple, list)) else None


def leaves(argument: object) -> list[Node]:
    """The nodes in an argument, which may be a list of them."""
    found: list[Node] = []
    map_aggregate(argument, lambda one: found.append(one) if isinstance(one, Node) else None)
    return found


def is_view(node: Node, source: Node) -> bool:
    """Whether the result of `node` is memory of `source`, which it does not write."""
    return node.op == "call_function" and getattr(node.target, "is_view", False) and node.args[0] is source


def is_movement(node: Node, source: Node) -> bool:
    """Whether `node` only moves data of `source`, elements of which it does not look into."""
    if node.op == "call_function" and node.target in MOVEMENT and node.args[0] is source:
        return True
    return is_view(node, source) and value(node).dtype == value(source).dtype


def is_cast(node: Node) -> bool:
    """Whether `node` changes nothing but the dtype."""
    if node.op != "call_function":
        return False
    if node.target is torch.ops.prims.convert_element_type.default:
        return True
    if node.target is not aten._to_copy.default or node.kwargs.get("dtype") is None:
        return False
    before, after = value(node.args[0]), value(node)
    return (before.device, before.layout, before.stride()) == (after.device, after.layout, after.stride())


def is_narrowing(node: Node) -> bool:
    """Whether `node` casts a floating-point tensor to fewer bytes."""
    if not is_cast(node):
        return False
    before, after = value(node.args[0]).dtype, value(node).dtype
    return before.is_floating_point and after.is_floating_point and after.itemsize < before.itemsize


def is_widening(node: Node) -> bool:
    """Whether `node` casts a floating-point tensor to more bytes."""
    if not is_cast(node):
        return False
    before, after = value(node.args[0]).dtype, value(node).dtype
    return before.is_floating_point and after.is_floating_point and after.itemsize > before.itemsize


def moved(source: Node) -> Iterator[Node]:
    """All nodes that only move data of `source`, directly or not, in topological order."""
    for user in source.users:
        if is_movement(user, source):
            yield user
            yield from moved(user)


def chain(source: Node) -> list[Node]:
    """`source` and everything made from it by moving and casting alone."""
    nodes = [source]
    for node in nodes:
        nodes += [user for user in node.users if is_movement(user, node) or is_view(user, node) or is_cast(user)]
    return nodes


def readers(source: Node, links: list[Node]) -> list[tuple[Node, Node]]:
    """Pairs (link, reader): who reads `links`, which come from `source`, without being one of them."""
    inside = set(links)
    return [(link, user) for link in links for user in link.users if user not in inside]


def is_tangent(node: Node) -> bool:
    """Whether `node` is a gradient that enters the graph; AOTAutograd tells by name alone."""
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def backward_nodes(graph: Graph) -> set[Node]:
    """Nodes of a joint graph, or of a backward, that depend on an incoming gradient."""
    found: set[Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def infer(node: Node) -> None:
    """Set the node's fake value anew from its arguments."""
    arguments = map_aggregate((node.args, node.kwargs), lambda x: x.meta["val"] if isinstance(x, Node) else x)
    with torch._guards.detect_fake_mode([n.meta["val"] for n in node.all_input_nodes]):
        node.meta["val"] = node.target(*arguments[0], **arguments[1])


def insert(graph: Graph, before: Node, target, *args, like: Node, fake=None, **kwargs) -> Node:
    """A new call before `before`, with the stack trace of `like` and the fake value `fake`; without one, what the call gives."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    node.meta = _kept_meta(like)
    if fake is None:
        infer(node)
    else:
        node.meta["val"] = fake
    return node


def turn_into(node: Node, target, *args) -> None:
    """Make `node` another call, with the fake value and the readers that it has."""
    node.target, node.args, node.kwargs = target, args, {}
    node.meta = _kept_meta(node) | {"val": node.meta["val"]}


def _kept_meta(node: Node) -> dict[str, object]:
    """What is true of a call that takes the node's place; the rest, such as the strides of its arguments, is of that call alone."""
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack", SAVED_FOR_BACKWARD) if key in node.meta}


def insert_items(graph: Graph, node: Node, count: int) -> list[Node]:
    """The `count` tensors of which the result of `node` consists, directly after it."""
    items: list[Node] = []
    for at in range(count):
        with graph.inserting_after(items[-1] if items else node):
            items.append(graph.call_function(operator.getitem, (node, at)))
        items[-1].meta = {"val": node.meta["val"][at]}
    return items


def started(start: Node) -> list[Node]:
    """The nodes that stand for each tensor that `start`, of one or of a group, fills."""
    return list(start.users) if start.target in (GATHER_GROUP_START, REDUCE_GROUP_START) else [start]


def waits_of(start: Node) -> list[Node]:
    """The waits of what `start` fills, in order."""
    return [wait for tensor in started(start) for wait in tensor.users]


def bytes_of(start: Node) -> int:
    """Bytes of the full tensors that a gather or reduce, or a start of one or of a group, moves."""
    if start.target in GATHERS:
        return sum(sizes_of(start))
    if start.target in ROWS:  # as if the gradient were dense, whose size does not depend on the batch
        return math.prod(start.args[2]) * start.args[3].itemsize
    grads = start.args[0] if start.target is REDUCE_GROUP_START else [start.args[0]]
    return sum(sum(sizes_of(grad)) for grad in grads)


def is_returned(node: Node) -> bool:
    """Whether `node` is a result of the graph and nothing else."""
    return all(user.op == "output" for user in node.users)


def retype(source: Node) -> None:
    """After the dtype of `source` changed: infer it and all that moves it."""
    for node in [source, *moved(source)]:
        infer(node)


def forget(graph: Graph, node: Node, replacement: Node) -> None:
    """Replace every use of `node` and erase it."""
    node.replace_all_uses_with(replacement)
    graph.erase_node(node)
