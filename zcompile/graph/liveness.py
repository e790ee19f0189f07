"""When each storage of a graph is made and when it dies.

A storage dies after its last reader, through any alias, as compiled code frees it.

[Note: what fuses]
Inductor seldom writes the result of a pointwise node to memory: it computes the result again inside each reader. So
here such a result has no storage, and the storages from which it is computed live until its readers are done.

Nodes that fuse are pointwise nodes, casts, copies and reductions. All others, such as matmuls, attention and transfers,
do not. A *segment* is what stands between two nodes that do not fuse. The result of a node that fuses is written to
memory if a reader of it does not fuse, or stands in a later segment.
"""

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.fx import Graph, Node

from zcompile.graph.ops import args_of, aten, named_args, nodes_in, result_bytes

# Ops that fuse, beside those with torch's tag for pointwise ones.
FUSES = {
    aten._softmax.default,
    aten._to_copy.default,
    aten.amax.default,
    aten.any.default,
    aten.any.dim,
    aten.arange.start_step,
    aten.argmax.default,
    aten.cat.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.copy.default,
    aten.embedding.default,
    aten.empty.memory_format,
    aten.full.default,
    aten.full_like.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.max.dim,
    aten.mean.default,
    aten.mean.dim,
    aten.new_zeros.default,
    aten.repeat.default,
    aten.scalar_tensor.default,
    aten.scatter.value,
    aten.select_backward.default,
    aten.select_scatter.default,
    aten.slice_backward.default,
    aten.slice_scatter.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.var_mean.correction,
    aten.zeros_like.default,
    torch.ops.prims.convert_element_type.default,
    torch.ops.prims.iota.default,
}


@dataclass(eq=False)
class Storage:
    """Memory that one node makes. Positions are indices of nodes in the graph."""

    maker: Node
    nbytes: int  # its size, dynamic sizes as traced
    made: int
    dies: int  # position of the last reader; the number of nodes if the graph returns it


class Liveness:
    """All storages of `graph`. Iterating gives each once, in the order of their makers.

    Args:
        fused: whether pointwise nodes fuse, as under Inductor.
    """

    def __init__(self, graph: Graph, fused: bool = True):
        self.nodes = list(graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        # Node -> the storages that hold its result. For a result that is never written: those that it is computed from.
        self.storages: dict[Node, list[Storage]] = {}
        self.written: set[Node] = set()  # nodes whose result is written to memory that they make
        self.segment = _segments(self.nodes) if fused else dict(self.position)
        for i, node in enumerate(self.nodes):
            self.storages[node] = self._storages_of(node, i)
            is_output = node.op == "output"
            for source in node.all_input_nodes:
                for storage in self.storages[source]:
                    storage.dies = len(self.nodes) if is_output else max(storage.dies, i)

    def __iter__(self) -> Iterator[Storage]:
        for node in self.nodes:
            if node in self.written:
                yield from (storage for storage in self.storages[node] if storage.maker is node)

    def live_bytes(
        self, exclude: Collection[Node] = (), scaled: Collection[Node] = (), scale: float = 1.0
    ) -> list[int]:
        """Bytes alive while each node runs: its arguments, its result, and whatever is read later.

        Storages of nodes in `exclude` do not count, those of nodes in `scaled` count `scale` times.
        """
        change = [0] * (len(self.nodes) + 2)
        for storage in self:
            if storage.maker in exclude:
                continue
            nbytes = round(storage.nbytes * scale) if storage.maker in scaled else storage.nbytes
            change[storage.made] += nbytes
            change[storage.dies + 1] -= nbytes
        return list(accumulate(change[: len(self.nodes)]))

    def _storages_of(self, node: Node, i: int) -> list[Storage]:
        aliased = aliases(node)
        if aliased is not None:
            storages = [storage for source in aliased for storage in self.storages[source]]
            if node.target is operator.getitem and aliased[0] in self.written:
                has_all = len(storages) == len(aliased[0].meta["val"])  # else some items are no tensors
                return [storages[args_of(node)[1]]] if has_all else storages
            return storages
        if not self._is_written(node):
            sources = (storage for source in node.all_input_nodes for storage in self.storages[source])
            return list(dict.fromkeys(sources))
        self.written.add(node)
        return [Storage(node, nbytes, i, i) for nbytes in result_bytes(node)]

    def _is_written(self, node: Node) -> bool:
        if not fuses(node):
            return True
        segment = self.segment[node]
        return any(not fuses(reader) or self.segment[reader] != segment for reader in _readers_through_aliases(node))


def fuses(node: Node) -> bool:
    """Whether Inductor may compute `node` inside a kernel of its neighbours; see [Note: what fuses]."""
    if node.op != "call_function":
        return False
    target = node.target
    return target in FUSES or torch.Tag.pointwise in getattr(target, "tags", ())


def aliases(node: Node) -> list[Node] | None:
    """The nodes whose memory the result of `node` is, by the op's schema. None if the result has memory of its own."""
    if node.op != "call_function":
        return [] if node.op in ("output", "get_attr") or not result_bytes(node) else None
    if node.target is operator.getitem:
        return [args_of(node)[0]]
    if not isinstance(node.target, torch._ops.OpOverload):
        return None if result_bytes(node) else []
    if node.target.is_view or node.target is aten._unsafe_view.default:  # its schema does not tell that it is a view
        return [args_of(node)[0]]
    schema = node.target._schema
    returned = set().union(*(result.alias_info.before_set for result in schema.returns if result.alias_info))
    if not returned:
        return None if result_bytes(node) else []
    names = [arg.name for arg in schema.arguments if arg.alias_info and arg.alias_info.before_set & returned]
    given = named_args(node)
    return [source for name in names for source in nodes_in(given.get(name))]


def _segments(nodes: list[Node]) -> dict[Node, int]:
    number, segment_of = 0, {}
    for node in nodes:
        if node.op == "call_function" and not fuses(node) and aliases(node) is None:
            number += 1
        segment_of[node] = number
    return segment_of


def _readers_through_aliases(node: Node) -> Iterator[Node]:
    """Readers of `node` and of its aliases, without the aliases themselves."""
    pending, seen = [node], {node}
    while pending:
        source = pending.pop()
        for user in source.users:
            if user in seen:
                continue
            seen.add(user)
            if user.op == "call_function" and source in (aliases(user) or ()):
                pending.append(user)
            else:
                yield user
