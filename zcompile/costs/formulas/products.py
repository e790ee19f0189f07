"""Cost formulas of matmuls of all kinds, and of convolutions.

[Note: grouped products]
A grouped matmul multiplies each group of rows by a matrix of its own, as a mixture of experts does. Group sizes are not
known at compile time, so formulas assume that each row is in a random group: m rows then occupy, on average,
G * (1 - (1 - 1/G) ** m) of G groups. Only matrices of occupied groups are read. A kernel computes whole tiles of rows:
an occupied group has half a tile of padding on average, and at least one tile.
"""

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from zcompile.costs.formulas.work import Call, TensorSize, Work, nbytes_of, sizes_of

log = logging.getLogger("zcompile")

TILE_ROWS = 128  # rows in a tile of a grouped matmul's kernel; SMALL_TILE_ROWS if there are few rows
SMALL_TILE_ROWS = 64
HOST_WAIT_S = 20e-6  # in which the device idles, because the host reads a value from it before it launches kernels


def is_matmul(node: Node) -> bool:
    """Return whether `node` is a matmul, a convolution or an attention op, of any sizes."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet is not None and (
        packet in flop_registry or packet.__name__ == "_grouped_mm" or "scaled_dot_product" in packet.__name__
    )


def counted_by_torch(node: Node) -> int:
    """Return the floating-point operations of a matmul or a convolution by torch's formula; 0 if torch has none."""
    formula = flop_registry.get(cast(OpOverload, node.target).overloadpacket)
    if formula is None:
        return 0

    def shape(argument: Any) -> Any:
        if isinstance(argument, TensorSize):
            return torch.Size(argument.shape)
        return tuple(map(shape, argument)) if isinstance(argument, (tuple, list)) else argument

    args, kwargs = shape(sizes_of(node.args)), {name: shape(each) for name, each in sizes_of(node.kwargs).items()}
    try:
        return formula(*args, **kwargs, out_val=shape(sizes_of(node.meta["val"])))
    except Exception as error:  # some formulas look at tensors, not shapes; an estimate is no reason to fail
        log.debug("zcompile: %s counts as no operations, because torch's formula failed: %s", node.target, error)
        return 0


def narrow_product(call: Call) -> Work:
    """Return the work of `_int_mm` and `_scaled_mm`, [m, k] x [k, n], at the rate of the inputs' narrow dtype."""
    left, right = call.args[:2]
    return Work(flops=2 * left.shape[0] * left.shape[1] * right.shape[1], dtype=left.dtype)


def grouped_product(call: Call) -> Work:
    """Return the work of a grouped matmul of G groups, see [Note: grouped products].

    Shapes are those of `torch.nn.functional.grouped_mm`: rows [m, k] x matrices [g, k, n]; [m, k] x [k, n] with k
    split into groups, for gradients of the matrices; [g, m, k] x [k, n] with n in groups; or [g, m, k] x [g, k, n].
    """
    left, right = call.args[:2]
    if len(left.shape) == len(right.shape) == 2:
        k = left.shape[1]
        padded = padded_rows(k, expected_hits(call.outs[0].shape[0], k))
        return Work(flops=2 * left.shape[0] * padded * right.shape[1], dtype=left.dtype, grouped=True)
    if len(left.shape) == len(right.shape) == 3:
        return Work(flops=2 * left.numel * right.shape[-1], dtype=left.dtype, grouped=True)
    rows, matrices = (left, right) if len(left.shape) == 2 else (right, left)
    m = rows.shape[0] if rows is left else rows.shape[1]
    groups, wide = matrices.shape[0], matrices.shape[1] * matrices.shape[2]
    hits = expected_hits(groups, m)
    nbytes = nbytes_of(rows, call.out) + hits * wide * matrices.dtype.itemsize
    return Work(flops=2 * padded_rows(m, hits) * wide, dtype=left.dtype, nbytes=nbytes, grouped=True)


def expected_hits(groups: int, rows: int) -> float:
    """Return how many of `groups` have at least one of `rows` on average, if each row is in a random group."""
    return groups * (1 - (1 - 1 / groups) ** rows) if groups else 0.0


def padded_rows(rows: int, hits: float) -> float:
    """Return how many rows a grouped kernel computes for `rows` rows in `hits` groups: whole tiles of each group."""
    if not rows or not hits:
        return 0.0
    tile = SMALL_TILE_ROWS if rows <= TILE_ROWS else TILE_ROWS
    return max(hits * tile, rows + hits * tile / 2)


def looped_product(call: Call) -> Work:
    """Return the work of `transformers::grouped_mm_fallback`: the host reads group sizes, then launches matmuls."""
    rows, matrices = call.args[:2]
    groups = matrices.shape[0]
    hits = expected_hits(groups, rows.shape[0])
    nbytes = nbytes_of(rows, call.out) + hits * matrices.nbytes / groups
    flops = 2 * rows.numel * matrices.shape[-1]
    return Work(flops=flops, dtype=rows.dtype, nbytes=nbytes, launches=groups, seconds=HOST_WAIT_S)


def looped_product_backward(call: Call) -> Work:
    """Return the work of the backward of `grouped_mm_fallback`: two matmuls for each group."""
    rows, matrices = call.args[:2]
    flops = 4 * rows.numel * matrices.shape[-1]
    return Work(flops=flops, dtype=rows.dtype, launches=2 * matrices.shape[0], seconds=HOST_WAIT_S)


FORMULAS: dict[str, Callable[[Call], Work]] = {
    "aten::_int_mm": narrow_product,
    "aten::_scaled_mm": narrow_product,
    "aten::_scaled_mm_v2": narrow_product,
    "aten::_grouped_mm": grouped_product,
    "aten::_scaled_grouped_mm": grouped_product,
    "transformers::grouped_mm_fallback": looped_product,
    "transformers::grouped_mm_fallback_backward": looped_product_backward,
}
