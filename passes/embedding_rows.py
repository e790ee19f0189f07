"""Embeddings: the rows that a batch reads travel, not the whole matrix; of its gradient, the rows that it wrote."""

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from zcompile.analysis.fx_utils import (
    GATHER,
    GATHER_ROWS,
    REDUCE,
    REDUCE_ROWS,
    aten,
    calls,
    forget,
    insert,
    is_cast,
    is_widening,
    value,
)
from zcompile.analysis.hardware import Link

ADD_ROWS = aten.index_put.default
ADD_SOME_ROWS = aten._unsafe_masked_index_put_accumulate.default  # what torch has in its place since 2.13


def embedding_rows(graph: Graph, link: Link, fused: bool = True) -> None:
    """embedding(gather(shard), i) -> gather_rows(shard, i); reduce(zeros, to which rows i are added) -> reduce_rows(rows, i).

    Rows are gathered where a transport reads them from peers' memory. As a collective, all that ranks read would have to be
    agreed on first, so there the whole matrix comes, which a plan can hide. Gradients go as rows everywhere: a dense
    one is made of them at the width of the wire, where the graph would have made it in fp32 before.

    Args:
        fused: whether Inductor runs the graph, whose decomposition rounds as reduce_rows does. The op that it decomposes, which only a
            graph on paper has then, rounds otherwise.
    """
    if link.wire.transport == "p2p":
        for gather in calls(graph, GATHER):
            _read_rows(graph, gather)
    for reduce in calls(graph, REDUCE):
        _reduce_rows(graph, reduce, fused)


def _read_rows(graph: Graph, gather: Node) -> None:
    if len(gather.users) != 1:  # read twice, the whole matrix comes once for both
        return
    (embedding,) = gather.users
    if embedding.target is not aten.embedding.default or embedding.args[0] is not gather:
        return
    found = insert(graph, embedding, GATHER_ROWS, *gather.args, embedding.args[1], like=embedding)
    found.meta |= {key: embedding.meta[key] for key in ("recompute", "ac_graph_id") if key in embedding.meta}
    found.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)  # or sizes would decide which gathers backward has
    forget(graph, embedding, found)
    graph.erase_node(gather)


def _reduce_rows(graph: Graph, reduce: Node, fused: bool) -> None:
    dense, shard = reduce.args
    dtype = value(dense).dtype
    added = dense.args[0] if is_cast(dense) else dense
    if not (_only_read_once(dense) and _only_read_once(added)):
        return
    if found := _added_rows(graph, reduce, added, fused):
        grad, indices = found
        forget(
            graph,
            reduce,
            insert(graph, reduce, REDUCE_ROWS, grad, shard, [*value(dense).shape], dtype, indices, like=reduce),
        )
        graph.eliminate_dead_code()


def _added_rows(graph: Graph, before: Node, added: Node, fused: bool) -> tuple[Node, Node] | None:
    """The gradients and the indices of which `added` is made, as Inductor's decomposition of an embedding's backward has it.

    Indices that count for nothing (padding) become negative. To `index_put`, which is also the gradient of `table[i]`, negative ones
    count from the end.
    """
    if fused and added.target is aten.embedding_dense_backward.default:
        return (added.args[0], added.args[1]) if added.args[3] < 0 and not added.args[4] else None
    mask = None  # of indices: those that count, or those that do not
    if added.target is ADD_SOME_ROWS:
        zeros, counts, indices, grad = added.args
        mask = _unsqueezed(counts)
        if mask is None:
            return None
    elif added.target is ADD_ROWS and added.args[3:] == (True,):
        zeros, indices, grad, _ = added.args
        if grad.target is aten.where.self and _is_zeros(grad.args[1]):
            mask, grad = _unsqueezed(grad.args[0]), grad.args[2]
            if mask is None:
                return None
    else:
        return None
    index = indices[0]
    if (
        len(indices) != 1
        or value(index).dtype not in (torch.int32, torch.int64)
        or not _is_zeros(zeros)
        or value(zeros).dim() != 2
    ):
        return None
    if value(added).dtype != torch.float32:
        return None
    grad = grad.args[0] if is_widening(grad) else grad
    if value(grad).shape != (*value(index).shape, value(zeros).shape[1]):
        return None
    if added.target is ADD_ROWS:
        is_negative = insert(graph, before, aten.lt.Scalar, index, 0, like=before)
        from_end = insert(graph, before, aten.add.Tensor, index, value(zeros).shape[0], like=before)
        index = insert(graph, before, aten.where.self, is_negative, from_end, index, like=before)
    if mask is not None:
        of = value(index)
        none = insert(graph, before, aten.scalar_tensor.default, -1, dtype=of.dtype, device=of.device, like=before)
        pair = (index, none) if added.target is ADD_SOME_ROWS else (none, index)
        index = insert(graph, before, aten.where.self, mask, *pair, like=before)
    return grad, index


def _unsqueezed(node: Node) -> Node | None:
    """What `node` is with one more dimension at the end."""
    if node.target is not aten.unsqueeze.default or node.args[1] not in (-1, value(node).dim() - 1):
        return None
    return node.args[0]


def _is_zeros(node: Node) -> bool:
    if node.target is aten.full.default:
        return node.args[1] == 0
    return node.target is aten.scalar_tensor.default and node.args[0] == 0


def _only_read_once(node: Node) -> bool:
    return node.op == "call_function" and len(node.users) == 1
