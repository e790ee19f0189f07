"""Names and helpers of FX nodes for compiler passes: zcompile's ops, kinds of aten ops, queries and edits.

Words used throughout:

- A *chain* is a gather and all nodes that only view, move or cast its data, so any part of it may be run again or
  moved. Its nodes are called *links*.
- A *reader* of a chain is a node outside the chain that reads one of its links.
- A *start* is a node that begins one transfer, of one tensor or of a group. Each tensor of a start has one *wait*.
- The *fake value* of a node, `meta["val"]`, is a tensor without data, with the result's shape, dtype and device.
"""

import math
import operator
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch.fx import Graph, Node
from torch.fx.node import Argument, map_aggregate

from zcompile.costs.unbacked_sizes import size_hint

aten = torch.ops.aten
ops = torch.ops.zcompile


@torch.library.register_fake("zcompile::gather")
def _fake_gather(shard: torch.Tensor, shape: list[int], dtype: torch.dtype, domain: int = 0) -> torch.Tensor:
    """Return a fake gathered parameter. In Dynamo, `isinstance(_, nn.Parameter)` is true for it, as in eager code."""
    unsharded = shard.new_empty(shape, dtype=dtype)
    unsharded._is_param = True
    return unsharded


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
GATHERS = {GATHER, *GATHER_STARTS}  # not GATHER_ROWS, which has no start
REDUCE_STARTS = (REDUCE_START, REDUCE_GROUP_START, REDUCE_ROWS_START)
ROW_REDUCES = {REDUCE_ROWS, REDUCE_ROWS_START}
REDUCES = {REDUCE, REDUCE_ROWS, *REDUCE_STARTS}
WAITS = {GATHER_WAIT, REDUCE_WAIT}

# A key in `meta` of a gather whose result the pass `save_for_backward` saves. The value: whether the result may be in
# memory of the transport, which `record_stream` does not protect (see `cache_across_microbatches`).
SAVED_FOR_BACKWARD = "zcompile_saved_for_backward"

# The default of the option `reduce_budget_bytes` is at least this: room for two gradients (see `reduce_budget`) of MLP
# matrices of a 7 B model (4096 x 14336) in bf16.
LEAST_REDUCE_BUDGET_BYTES = 256 << 20

# Ops, besides views, whose result has unchanged elements of their first argument.
MOVEMENT = {
    aten.clone.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.reshape.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten._unsafe_view.default,
    operator.getitem,
}

# Ops, with all overloads, that never write their result over their first argument. Inductor lets some other ops
# (`index_put`, custom ops that mutate) write there if no other node of the graph reads the argument. If the argument is
# a parameter in the microbatch cache, the next microbatch would read the op's result in its place.
PURE_READERS = {
    aten.addmm,
    aten.baddbmm,
    aten.bmm,
    aten.convolution,
    aten.convolution_backward,
    aten.embedding,
    aten.linear,
    aten.mean,
    aten.mm,
    aten.mv,
    aten.native_group_norm,
    aten.native_group_norm_backward,
    aten.native_layer_norm,
    aten.native_layer_norm_backward,
    aten.sum,
    aten._fused_rms_norm,
    aten._fused_rms_norm_backward,
    aten._grouped_mm,
    aten._scaled_mm,
}

WAIT_TENSOR = torch.ops._c10d_functional.wait_tensor.default  # for a collective that the model asked for

# Gradients of ops that move elements: they copy their first argument into zeros, and commute with a cast.
SCATTERS = {aten.select_backward.default, aten.slice_backward.default}


def calls(graph: Graph, *targets: object) -> list[Node]:
    """All calls of `targets`, in graph order."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def value(node: Node) -> torch.Tensor:
    """The fake value of a node whose result is one tensor."""
    return node.meta["val"]


def is_user_collective(node: Node) -> bool:
    """Whether `node` starts a collective that the model asks for itself, as tensor and expert parallelism do."""
    return bool(user_collective_of(node))


def user_collective_of(node: Node) -> str:
    """Return the name of the model's own collective that `node` starts; an empty string if it starts none."""
    name: str = getattr(node.target, "_qualified_op_name", "") or getattr(node.target, "_name", "")
    space, _, op = name.partition("::")
    return op.split(".")[0] if space.startswith("_c10d_functional") and not op.startswith("wait_tensor") else ""


DOMAINS_OF_MODEL = 1 << 16  # in a graph of several models, domains of model i begin at i times this; see csrc/ops.cpp


def domain_of(node: Node) -> int:
    """The domain of a gather, a reduce, or a start of either."""
    return named_args(node).get("domain", 0)


def domain_args(node: Node) -> tuple[int, ...]:
    """Return the last arguments for a new gather or reduce in the domain of `node`: none for domain 0, the default."""
    domain = domain_of(node)
    return (domain,) if domain else ()


def args_of(node: Node) -> tuple[Any, ...]:
    """Return the arguments of a call, typed as Any, because FX's type is a wide union."""
    return node.args


def named_args(node: Node) -> dict[str, Any]:
    """Return the arguments that a call gives to an op, by their names in the op's schema."""
    schema = cast(torch._ops.OpOverload, node.target)._schema
    return {**dict(zip((argument.name for argument in schema.arguments), node.args)), **node.kwargs}


def nbytes(node: Node) -> int:
    """Bytes of the node's result, one tensor of static size."""
    return value(node).numel() * value(node).dtype.itemsize


def shape_hint(tensor: torch.Tensor) -> torch.Size:
    """Return the shape of a fake value, with numbers (`size_hint`) in place of dynamic and unbacked sizes."""
    return torch.Size([size_hint(size) for size in tensor.shape])


def result_bytes(node: Node) -> list[int]:
    """Return the bytes of each tensor in the result of `node`, by `shape_hint`."""
    result = node.meta.get("val")
    tensors = [result] if isinstance(result, torch.Tensor) else result if isinstance(result, (tuple, list)) else []
    return [
        shape_hint(tensor).numel() * tensor.dtype.itemsize for tensor in tensors if isinstance(tensor, torch.Tensor)
    ]


def nodes_in(argument: Argument) -> list[Node]:
    """Return the nodes in an argument, which may be a nested list. A node that occurs twice is returned twice."""
    nodes: list[Node] = []
    map_aggregate(argument, lambda leaf: nodes.append(leaf) if isinstance(leaf, Node) else None)
    return nodes


def is_view(node: Node, source: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "is_view", False) and node.args[0] is source


def is_movement(node: Node, source: Node) -> bool:
    """Whether `node` only moves elements of `source`, its first argument."""
    if node.op == "call_function" and node.target in MOVEMENT:
        return node.args[0] is source
    return is_view(node, source) and value(node).dtype == value(source).dtype


def is_cast(node: Node) -> bool:
    """Whether `node` changes nothing but the dtype."""
    if node.op != "call_function":
        return False
    if node.target is torch.ops.prims.convert_element_type.default:
        return True
    if node.target is not aten._to_copy.default or node.kwargs.get("dtype") is None:
        return False
    before, after = value(args_of(node)[0]), value(node)
    return (before.device, before.layout, before.stride()) == (after.device, after.layout, after.stride())


def is_narrowing(node: Node) -> bool:
    return _added_width(node) < 0


def is_widening(node: Node) -> bool:
    return _added_width(node) > 0


def _added_width(node: Node) -> int:
    """Return the bytes that each element gains in a cast between floating-point dtypes; 0 for other nodes."""
    if not is_cast(node):
        return 0
    before, after = value(args_of(node)[0]).dtype, value(node).dtype
    return after.itemsize - before.itemsize if before.is_floating_point and after.is_floating_point else 0


def views_and_moves(source: Node) -> Iterator[Node]:
    """Yield nodes that move, and do not cast, elements of `source`, directly or indirectly, in topological order."""
    for user in source.users:
        if is_movement(user, source):
            yield user
            yield from views_and_moves(user)


def chain(source: Node) -> list[Node]:
    """Return `source` and all nodes that only view, move or cast its elements, directly or through each other."""
    nodes = [source]
    for node in nodes:
        nodes += [user for user in node.users if is_movement(user, node) or is_view(user, node) or is_cast(user)]
    return nodes


def readers(links: list[Node]) -> list[tuple[Node, Node]]:
    """Return (link, reader) for each node that reads one of `links`, the nodes of a chain, and is not one of them."""
    inside = set(links)
    return [(link, user) for link in links for user in link.users if user not in inside]


def only_reads(node: Node) -> bool:
    """Whether `node` surely only reads its arguments, on the current stream alone; False for custom ops."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    is_pointwise = torch.Tag.pointwise in node.target.tags and node.target.namespace in ("aten", "prims")
    is_pure = (is_pointwise and not node.target._schema.is_mutable) or is_cast(node)
    return is_pure or node.target.overloadpacket in PURE_READERS


def is_tangent(node: Node) -> bool:
    """Whether `node` is a gradient that enters the graph, which AOTAutograd marks by its name."""
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def dynamo_inputs(graph: Graph) -> dict[Node, int]:
    """Map each input of an AOTAutograd graph that is also an input of the Dynamo graph to its position there."""
    origins = {node: node.meta.get("desc") for node in graph.find_nodes(op="placeholder")}
    return {node: origin.idx for node, origin in origins.items() if isinstance(origin, PlainAOTInput)}


def backward_nodes(graph: Graph) -> set[Node]:
    """Nodes of a joint graph, or of a backward, that depend on an incoming gradient."""
    nodes: set[Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or any(source in nodes for source in node.all_input_nodes):
            nodes.add(node)
    return nodes


def with_ancestors(nodes: Iterable[Node]) -> set[Node]:
    ancestors = set(nodes)
    pending = list(ancestors)
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in ancestors:
                ancestors.add(source)
                pending.append(source)
    return ancestors


def infer(node: Node) -> None:
    """Compute the node's fake value again from its arguments."""
    assert callable(node.target)
    arguments: Any = map_aggregate((node.args, node.kwargs), lambda x: x.meta["val"] if isinstance(x, Node) else x)
    fake_mode = torch._guards.detect_fake_mode([source.meta["val"] for source in node.all_input_nodes])
    assert fake_mode is not None
    with fake_mode:
        node.meta["val"] = node.target(*arguments[0], **arguments[1])


def insert(graph: Graph, before: Node, target: Any, *args: Any, like: Node, fake: Any = None, **kwargs: Any) -> Node:
    """Insert a call of `target` before `before`.

    Args:
        like: the node whose stack trace and module stack the call gets.
        fake: the fake value of the call. Default: it is inferred from the arguments.
    """
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    node.meta = _kept_meta(like)
    if fake is None:
        infer(node)
    else:
        node.meta["val"] = fake
    return node


def turn_into(node: Node, target: Any, *args: Any) -> None:
    """Make `node` a call of `target`. Its fake value and its readers stay."""
    node.target, node.args, node.kwargs = target, args, {}
    node.meta = _kept_meta(node) | {"val": node.meta["val"]}


def _kept_meta(node: Node) -> dict[str, object]:
    """Return the entries of `meta` that stay true if another call replaces `node`."""
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack", SAVED_FOR_BACKWARD) if key in node.meta}


def insert_items(graph: Graph, node: Node, count: int) -> list[Node]:
    """Insert a node for each of the `count` tensors in the result of `node`, directly after it, in order."""
    items: list[Node] = []
    for i in range(count):
        with graph.inserting_after(items[-1] if items else node):
            items.append(graph.call_function(operator.getitem, (node, i)))
        items[-1].meta = {"val": node.meta["val"][i]}
    return items


def started_tensors(start: Node) -> list[Node]:
    """Return a node for each tensor of a start: the start itself, or the `getitem`s of a group's start."""
    return list(start.users) if start.target in (GATHER_GROUP_START, REDUCE_GROUP_START) else [start]


def waits_of(start: Node) -> list[Node]:
    """The waits for the tensors of a start, in the order of `started_tensors`."""
    return [wait for tensor in started_tensors(start) for wait in tensor.users]


def shards_of(start: Node) -> list[Node]:
    """Return the shard nodes of a gather, a reduce, or a start of either."""
    return nodes_in(start.args[0] if start.target in GATHERS or start.target is GATHER_ROWS else start.args[1])


def transfer_bytes(start: Node) -> int:
    """Bytes of the unsharded tensors that a gather, a reduce, or a start of either transfers.

    A reduce of rows counts as a reduce of the dense gradient, because the number of rows depends on a rank's batch.
    `start` must not be a `gather_rows`.
    """
    if start.target in GATHERS:
        return sum(result_bytes(start))
    if start.target in ROW_REDUCES:
        _, _, shape, dtype, *_ = args_of(start)
        return math.prod(shape) * dtype.itemsize
    grads = args_of(start)[0] if start.target is REDUCE_GROUP_START else args_of(start)[:1]
    return sum(sum(result_bytes(grad)) for grad in grads)


def reduce_budget(graph: Graph, given_bytes: int | None) -> int:
    """Return the most bytes of gradients that may be in flight at once: `given_bytes`, or if that is None, a default.

    The default has room for two of the largest gradients that `graph` reduces: one in transfer, and one that has just
    started. It depends only on shapes and dtypes of gradients, so it is the same on all ranks.
    """
    if given_bytes is not None:
        return given_bytes
    largest_bytes = max(map(transfer_bytes, calls(graph, *REDUCES)), default=0)
    return max(LEAST_REDUCE_BUDGET_BYTES, 2 * largest_bytes)


def copied(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """Copy `graph`. Return the copy, which has the same owning module, and each node's copy, but for the output."""
    copy, copies = Graph(), dict[Node, Node]()
    copy.output(copy.graph_copy(graph, copies)).meta = dict(graph.output_node().meta)
    copy.owning_module = graph.owning_module  # has the subgraphs that `get_attr` nodes name
    return copy, copies


def is_returned(node: Node) -> bool:
    """Whether only the graph's output reads `node`."""
    return all(user.op == "output" for user in node.users)


def replace_and_erase(graph: Graph, node: Node, replacement: Node) -> None:
    node.replace_all_uses_with(replacement)
    graph.erase_node(node)
