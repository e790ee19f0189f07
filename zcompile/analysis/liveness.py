"""When each storage of a graph is made and when it dies, as compiled code frees: after its last reader, through any alias.

[Note: what fuses]
Inductor never writes most results of pointwise nodes to memory: it computes them again inside their readers. Here such a
result has no storage, and what it was made from lives until its readers are done. Taken to fuse: pointwise nodes, casts,
copies and reductions between two nodes that do not (products, attention, gathers and reduces), a *segment*. Their results
are written if a reader is no such node, or stands in a later segment.
"""

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.fx import Graph, Node

from zcompile.analysis.fx_utils import aten, item_count, leaves, sizes_of

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
    """Memory that some node makes: bytes, and the places in the graph of its maker and its last reader."""

    maker: Node
    nbytes: int
    made: int
    dies: int


class Liveness:
    """All storages of `graph`.

    Args:
        fused: whether pointwise nodes fuse, as under Inductor.

    Attributes:
        storages: node -> the storages that hold its result, or for a result that is never written, what it is made from.
        written: the nodes whose result is written to memory that they make.
        segment: node -> the number of the segment that it stands in.
    """

    def __init__(self, graph: Graph, fused: bool = True):
        self.nodes = list(graph.nodes)
        self.at = {node: at for at, node in enumerate(self.nodes)}
        self.storages: dict[Node, list[Storage]] = {}
        self.written: set[Node] = set()
        self.segment = _segments(self.nodes) if fused else dict(self.at)
        for at, node in enumerate(self.nodes):
            self.storages[node] = self._storages_of(node, at)
            for storage in (one for source in node.all_input_nodes for one in self.storages[source]):
                end = node.op == "output"
                storage.dies = len(self.nodes) if end else max(storage.dies, at)

    def __iter__(self) -> Iterator[Storage]:
        return (one for node in self.nodes if node in self.written for one in self.storages[node] if one.maker is node)

    def live_bytes(self, but: Collection[Node] = (), scaled: Collection[Node] = (), scale: float = 1.0) -> list[int]:
        """Bytes alive while each node runs: its arguments, its result, and whatever is read later.

        Args:
            but: what these nodes make is left out.
            scaled: what these make counts `scale` times.
        """
        change = [0] * (len(self.nodes) + 2)
        for storage in self:
            if storage.maker in but:
                continue
            nbytes = round(storage.nbytes * scale) if storage.maker in scaled else storage.nbytes
            change[storage.made] += nbytes
            change[storage.dies + 1] -= nbytes
        return list(accumulate(change[: len(self.nodes)]))

    def _storages_of(self, node: Node, at: int) -> list[Storage]:
        aliased = aliases(node)
        if aliased is not None:
            return (
                [one for source in aliased for one in self.storages[source]]
                if len(aliased) != 1
                else self._item(node, aliased[0])
            )
        if not self._is_written(node):
            return list(dict.fromkeys(one for source in node.all_input_nodes for one in self.storages[source]))
        self.written.add(node)
        return [Storage(node, nbytes, at, at) for nbytes in sizes_of(node)]

    def _item(self, node: Node, source: Node) -> list[Storage]:
        """Of a view, what it views; of an item of a tuple, that item's."""
        held = self.storages[source]
        is_item = node.target is operator.getitem and source in self.written
        return [held[node.args[1]]] if is_item and len(held) == item_count(source) else held

    def _is_written(self, node: Node) -> bool:
        if not fuses(node):
            return True
        here = self.segment[node]
        return any(not fuses(reader) or self.segment[reader] != here for reader in _real_readers(node))


def fuses(node: Node) -> bool:
    """Whether Inductor may compute `node` inside a kernel of its neighbours; see [Note: what fuses]."""
    if node.op != "call_function":
        return False
    target = node.target
    return target in FUSES or torch.Tag.pointwise in getattr(target, "tags", ())


def aliases(node: Node) -> list[Node] | None:
    """The nodes whose memory the result of `node` is, by its schema; None if it has memory of its own."""
    if node.op != "call_function":
        return [] if node.op in ("output", "get_attr") or not sizes_of(node) else None
    if node.target is operator.getitem:
        return [node.args[0]]
    if not isinstance(node.target, torch._ops.OpOverload):
        return None if sizes_of(node) else []
    if node.target.is_view or node.target is aten._unsafe_view.default:  # whose schema hides it
        return [node.args[0]]
    schema = node.target._schema
    returned = set().union(*(one.alias_info.before_set for one in schema.returns if one.alias_info))
    if not returned:
        return None if sizes_of(node) else []
    names = [one.name for one in schema.arguments if one.alias_info and one.alias_info.before_set & returned]
    given = dict(zip((one.name for one in schema.arguments), node.args)) | node.kwargs
    return [source for name in names for source in leaves(given.get(name))]


def _segments(nodes: list[Node]) -> dict[Node, int]:
    number, found = 0, {}
    for node in nodes:
        if node.op == "call_function" and not fuses(node) and aliases(node) is None:
            number += 1
        found[node] = number
    return found


def _real_readers(node: Node) -> Iterator[Node]:
    """Readers of `node`, through views."""
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
