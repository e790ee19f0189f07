"""Cost formulas of ops that only move bytes, but not by one read of each argument and one write of each result.

Sources: the kernels of ATen (TensorTopK.cu, Sort.cu, SummaryOps.cu, SoftMax.cu, Loss.cu), and their times on an H100
with torch 2.11 (docs/lab/measurements.md, "Formulas").
"""

from collections.abc import Callable

import torch

from zcompile.costs.formulas.work import Call, TensorSize, Work, nbytes_of

SECTOR_BYTES = 32  # the least that a read from memory takes
INDEX_BYTES = 8  # of int64
SMALL_SLICE = 4096  # a slice of at most so many items is sorted within one kernel
BLOCK_SORT_PASSES = 3.5  # bytes that such a kernel moves, for each byte of (item, index) pairs and each byte of a key
SELECT_BITS = 2  # bits of a key by which one pass of a top-k selects
SELECT_READS = 2  # reads of the input in such a pass
LONG_SLICE = 20_000  # several thread blocks select from a slice of at least so many items
LONG_SELECT_LAUNCHES = 30  # kernels of such a selection
RADIX_BITS = 8  # bits of a key by which one pass of a sort sorts
RADIX_LAUNCHES = 4  # kernels of such a pass
SCAN_SHARE = 0.3  # share of memory's rate that running sums of rows reach
SOFTMAX_SLICE = 1024  # a row of at most so many items is read once
LOSS_ROW_S = 1.2e-9  # seconds for a row of a loss: one block of threads reads all rows


def topk(call: Call) -> Work:
    """Return the work of `topk`: a radix select in each slice, then a sort of the selected items."""
    source = call.args[0]
    dim = call.argument("dim", -1)
    length = source.shape[dim] if source.shape else 1
    reads = SELECT_READS * 8 * source.dtype.itemsize // SELECT_BITS
    sort_bytes = BLOCK_SORT_PASSES * source.dtype.itemsize * nbytes_of(call.out)
    launches = LONG_SELECT_LAUNCHES if length >= LONG_SLICE else 3
    return Work(nbytes=reads * source.nbytes + sort_bytes, launches=launches)


def sort(call: Call) -> Work:
    """Return the work of a sort with indices: in one kernel if slices are short, else a radix sort."""
    source: TensorSize = call.args[1] if isinstance(call.args[0], bool) else call.args[0]
    dim = call.argument("dim", -1)
    length = source.shape[dim] if source.shape else 1
    pair_bytes = source.numel * (source.dtype.itemsize + INDEX_BYTES)
    if length <= SMALL_SLICE:
        return Work(nbytes=BLOCK_SORT_PASSES * source.dtype.itemsize * pair_bytes, launches=2)
    passes = 8 * source.dtype.itemsize // RADIX_BITS
    return Work(nbytes=2 * passes * pair_bytes, launches=RADIX_LAUNCHES * passes + 3)


def scan(call: Call) -> Work:
    """Return the work of running sums, products, maxima and minima: two kernels if the input is one slice."""
    source = call.args[0]
    dim = call.argument("dim", -1)
    if not source.shape or source.shape[dim] == source.numel:
        return Work(launches=2)
    return Work(nbytes=nbytes_of(source, call.out) / SCAN_SHARE)


def count_values(call: Call) -> Work:
    """Return the work of `histc` and `bincount`: find the minimum and the maximum, then count in shared memory."""
    return Work(nbytes=4 * call.args[0].nbytes + nbytes_of(call.out), launches=2)


def negative_log_likelihood(call: Call) -> Work:
    """Return the work of a loss that reads one item per row of log probabilities [n, classes], and n targets."""
    scores, targets = call.args[:2]
    rows = scores.numel // max(1, scores.shape[-1])
    return Work(nbytes=rows * SECTOR_BYTES + targets.nbytes, seconds=rows * LOSS_ROW_S)


def negative_log_likelihood_backward(call: Call) -> Work:
    """Return the work of the loss's backward: it writes zeros for all classes, then a number for each row."""
    return Work(nbytes=nbytes_of(call.out) + nbytes_of(call.args[2]), launches=2)


def softmax(call: Call) -> Work:
    """Return the work of softmax, which reads a long row twice: for its maximum and sum, and for its results."""
    source = call.args[0]
    dim = call.argument("dim", -1)
    reads = 2 if source.shape and source.shape[dim] > SOFTMAX_SLICE else 1
    return Work(nbytes=reads * source.nbytes + nbytes_of(call.out))


def read_bytes_at(source: TensorSize, out: TensorSize, is_by_item: bool) -> int:
    """Return how many bytes of `source` an indexing op reads to return `out`: at least a memory sector for each index.

    `is_by_item`: whether each index selects a single item; else each selects a row of the last dimension.
    """
    run = 1 if is_by_item or not out.shape else out.shape[-1]
    runs = out.numel // max(1, run)
    return min(source.nbytes, runs * max(run * source.dtype.itemsize, SECTOR_BYTES))


def select_rows(call: Call) -> Work:
    """Return the work of `index_select`: it reads and writes the rows that it returns, and reads their indices."""
    source, index = call.args[0], call.args[2]
    out = call.outs[0]
    return Work(nbytes=read_bytes_at(source, out, is_by_item=False) + out.nbytes + nbytes_of(index))


def nonzero(call: Call) -> Work:
    """Return the work of `nonzero`: it counts items, sends the count to the host, then writes indices."""
    return Work(nbytes=2 * call.args[0].nbytes + nbytes_of(call.out), launches=5)


# Ops that Inductor fuses and that read a part of their first argument: True if single items of it, False if rows.
READ_BY_ITEM: dict[object, bool] = {torch.ops.aten.gather.default: True, torch.ops.aten.index.Tensor: False}

# Ops that return uninitialized memory: no kernel runs.
EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")

FORMULAS: dict[str, Callable[[Call], Work]] = {
    **{f"aten::{name}": lambda call: Work(nbytes=0, launches=0) for name in EMPTY},
    **{f"aten::{name}": scan for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")},
    "aten::topk": topk,
    "aten::sort": sort,
    "aten::argsort": sort,
    "aten::histc": count_values,
    "aten::bincount": count_values,
    "aten::nll_loss_forward": negative_log_likelihood,
    "aten::nll_loss2d_forward": negative_log_likelihood,
    "aten::nll_loss_backward": negative_log_likelihood_backward,
    "aten::nll_loss2d_backward": negative_log_likelihood_backward,
    "aten::index_select": select_rows,
    "aten::nonzero": nonzero,
    "aten::_softmax": softmax,
    "aten::_log_softmax": softmax,
}
