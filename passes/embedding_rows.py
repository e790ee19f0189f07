from typing import NamedTuple

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from zcompile.costs.hardware import Link
from zcompile.graph.ops import (
    GATHER,
    GATHER_ROWS,
    REDUCE,
    REDUCE_ROWS,
    args_of,
    aten,
    calls,
    domain_args,
    insert,
    is_cast,
    is_widening,
    replace_and_erase,
    value,
)

ADD_ROWS = aten.index_put.default
ADD_MASKED_ROWS = aten._unsafe_masked_index_put_accumulate.default  # in place of ADD_ROWS from torch 2.13 on


def embedding_rows(graph: Graph, link: Link, fused: bool = True) -> None:
    """Gather only the rows of an embedding that a batch reads, and reduce only the rows of its gradient.

    Rewrites `embedding(gather(shard), i)` as `gather_rows(shard, i)`, and `reduce(zeros with rows added at i)` as
    `reduce_rows(rows, i)`.

    Why: a batch reads few rows of a large vocabulary, so most of the matrix and of its gradient need no transfer.

    How: gathers are rewritten only for "p2p", where a rank reads rows in its peers' memory. With collectives, ranks
    would first have to exchange their indices, so they gather the whole matrix, which `prefetch` can hide. Reduces are
    rewritten for every transport. If a transport needs a dense gradient, `reduce_rows` builds it from the rows in the
    dtype of the transfer; the graph would have built it in fp32.

    Args:
        link: its `wire.transport` is the transport.
        fused: whether Inductor compiles the graph. If not, `embedding_dense_backward` stays, because it rounds
            differently from `reduce_rows`, and results without Inductor must equal those of eager code.
    """
    if link.wire.transport == "p2p":
        for gather in calls(graph, GATHER):
            _gather_rows(graph, gather)
    for reduce in calls(graph, REDUCE):
        _reduce_rows(graph, reduce, fused)


def _gather_rows(graph: Graph, gather: Node) -> None:
    if len(gather.users) != 1:  # another reader needs the whole matrix
        return
    (embedding,) = gather.users
    if embedding.target is not aten.embedding.default or embedding.args[0] is not gather:
        return
    arguments = (*gather.args[:3], embedding.args[1], *domain_args(gather))
    rows = insert(graph, embedding, GATHER_ROWS, *arguments, like=embedding)
    rows.meta |= {key: embedding.meta[key] for key in ("recompute", "ac_graph_id") if key in embedding.meta}
    # Else torch's partitioner chooses by sizes whether to save the rows, so ranks' choices could differ.
    rows.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    replace_and_erase(graph, embedding, rows)
    graph.erase_node(gather)


def _reduce_rows(graph: Graph, reduce: Node, fused: bool) -> None:
    dense, shard, *domain = args_of(reduce)
    shape, dtype = [*value(dense).shape], value(dense).dtype
    before_cast = args_of(dense)[0] if is_cast(dense) else dense
    if not (_has_one_reader(dense) and _has_one_reader(before_cast)):
        return
    rows = _added_rows(before_cast, fused)
    if rows is None:
        return
    indices = _indices_to_reduce(graph, reduce, rows)
    reduce_rows = insert(graph, reduce, REDUCE_ROWS, rows.grad, shard, shape, dtype, indices, *domain, like=reduce)
    replace_and_erase(graph, reduce, reduce_rows)
    graph.eliminate_dead_code()


class _AddedRows(NamedTuple):
    """Gradients of an embedding's rows, which the graph adds to a table of zeros."""

    grad: Node  # gradients, of shape [*indices.shape, width]
    indices: Node  # the row of the table to which each gradient is added
    # The number of rows if negative indices count from the end of the table; None if no index is negative.
    table_rows: int | None = None
    mask: Node | None = None  # selects the indices that count, or those that do not; None if all count
    mask_counts: bool = True  # whether `mask` is true for the indices that count


def _added_rows(dense: Node, fused: bool) -> _AddedRows | None:
    """Return the rows that `dense` sums, if it is the gradient of an embedding or of `table[i]`; else None."""
    if fused and dense.target is aten.embedding_dense_backward.default:
        grad, indices, _, padding_index, scale_by_frequency = args_of(dense)
        return _AddedRows(grad, indices) if padding_index < 0 and not scale_by_frequency else None
    mask = None
    if dense.target is ADD_MASKED_ROWS:
        zeros, masked, indices, grad = args_of(dense)
        mask = _without_last_dimension(masked)
        if mask is None:
            return None
    elif dense.target is ADD_ROWS and dense.args[3:] == (True,):  # accumulate
        zeros, indices, grad, _ = args_of(dense)
        if grad.target is aten.where.self and _is_zeros(grad.args[1]):
            mask, grad = _without_last_dimension(grad.args[0]), grad.args[2]
            if mask is None:
                return None
    else:
        return None
    if len(indices) != 1 or value(indices[0]).dtype not in (torch.int32, torch.int64):
        return None
    if not _is_zeros(zeros) or value(zeros).dim() != 2 or value(dense).dtype != torch.float32:
        return None
    rows, width = value(zeros).shape
    grad = grad.args[0] if is_widening(grad) else grad
    if value(grad).shape != (*value(indices[0]).shape, width):
        return None
    if dense.target is ADD_ROWS:
        return _AddedRows(grad, indices[0], rows, mask, mask_counts=False)
    return _AddedRows(grad, indices[0], None, mask)


def _indices_to_reduce(graph: Graph, before: Node, rows: _AddedRows) -> Node:
    """Insert nodes that turn negative indices into rows of the table, and indices to ignore (padding) into -1."""
    indices = rows.indices
    if rows.table_rows is not None:
        is_negative = insert(graph, before, aten.lt.Scalar, indices, 0, like=before)
        from_end = insert(graph, before, aten.add.Tensor, indices, rows.table_rows, like=before)
        indices = insert(graph, before, aten.where.self, is_negative, from_end, indices, like=before)
    if rows.mask is not None:
        kind = {"dtype": value(indices).dtype, "device": value(indices).device}
        no_row = insert(graph, before, aten.scalar_tensor.default, -1, like=before, **kind)
        pair = (indices, no_row) if rows.mask_counts else (no_row, indices)
        indices = insert(graph, before, aten.where.self, rows.mask, *pair, like=before)
    return indices


def _without_last_dimension(node: Node) -> Node | None:
    """Return the input of `node` if `node` unsqueezes a last dimension; else None."""
    if node.target is not aten.unsqueeze.default or node.args[1] not in (-1, value(node).dim() - 1):
        return None
    return args_of(node)[0]


def _is_zeros(node: Node) -> bool:
    if node.target is aten.full.default:
        return args_of(node)[1] == 0
    return node.target is aten.scalar_tensor.default and args_of(node)[0] == 0


def _has_one_reader(node: Node) -> bool:
    return node.op == "call_function" and len(node.users) == 1
