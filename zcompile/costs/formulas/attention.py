"""Cost formulas of attention: of torch's kernels, and of flex attention with its block mask.

A hardware table has one rate (operations per second) for each attention kernel: of forward and backward together, with
heads 128 wide and without a mask. The shares of this rate that other calls reach were measured on an H100 with torch
2.11 (docs/lab/measurements.md, "Formulas").
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from zcompile.costs.formulas.work import Call, TensorSize, Work, nbytes_of

MASK_BLOCKS = 128  # most blocks of a mask that are sampled, in each of its two dimensions
SAMPLES = 4  # positions of a block that are sampled in each dimension; the first and the last among them

# Factors of a call's rate, relative to its kernel's rate in the hardware table (forward and backward together).
FORWARD_SHARE = 1.18
BACKWARD_SHARE = 0.94
CAUSAL_SHARE = 0.8  # with a causal mask: thread blocks of one kernel take unequal times
NARROW_SHARE = 0.8  # with heads that are at most 64 wide
MASKED_SHARE = 0.5  # with a mask tensor: the kernel reads a value for each pair of a query and a key
CPU_COLUMNS = 512  # keys in a block of torch's CPU kernel, which skips only blocks that are masked as a whole


def scaled_dot_product(call: Call) -> Work:
    """Return the work of torch's attention kernels. `is_causal` halves the operations; a mask tensor saves none."""
    is_backward = "backward" in call.name
    query, key, values = call.args[1 if is_backward else 0 :][:3]
    flops = attention_flops(query, key, values, is_backward)
    is_causal = bool(call.argument("is_causal"))
    bias = call.argument("attn_bias", call.argument("attn_mask"))
    masked = MASKED_SHARE if isinstance(bias, TensorSize) else 1.0
    share = masked * reached_share(query.shape[-1], is_backward, is_causal)
    kernel = next((kernel for kernel in ("efficient", "cudnn", "math") if kernel in call.name), "flash")
    if not is_causal:
        return Work(flops=flops, attention=kernel, share=share)
    columns = max(1, key.shape[-2])
    on_cpus = min(1.0, (columns + CPU_COLUMNS) / (2 * columns))  # share of (query, key) pairs that a CPU computes
    return Work(flops=flops // 2, attention=kernel, share=share, cpu_share=0.5 / on_cpus)


def reached_share(width: int, is_backward: bool, is_causal: bool) -> float:
    """Return the share of its kernel's rate that a call with heads of `width` reaches on a GPU."""
    share = BACKWARD_SHARE if is_backward else FORWARD_SHARE
    return share * (CAUSAL_SHARE if is_causal else 1.0) * (NARROW_SHARE if width <= 64 else 1.0)


def attention_flops(query: TensorSize, key: TensorSize, values: TensorSize, is_backward: bool) -> int:
    """Return the floating-point operations of attention over all pairs of a query and a key.

    Queries are [b, h, s, d], keys [b, h', t, d], values [b, h', t, e]. Forward has two matmuls. Backward has five,
    because it computes the scores again (arXiv:2205.14135).
    """
    batch, heads, rows, width = query.shape
    flops_per_column = 2 * batch * heads * rows * key.shape[-2]
    columns = 3 * width + 2 * values.shape[-1] if is_backward else width + values.shape[-1]
    return flops_per_column * columns


def flex_attention(call: Call) -> Work:
    """Return the work of flex attention, forward or backward, in the blocks of scores that its mask does not skip.

    The block mask's tensors have no values at compile time, so the mask's function in the graph is called with a few
    positions of each block. If the function reads tensors, such as each token's document, all blocks count.
    """
    is_backward = call.name.endswith("backward")
    query, key, values = call.args[:3]
    blocks = _share_of_blocks(call, 9 if is_backward else 4)
    read_bytes = nbytes_of(call.args[: 6 if is_backward else 3])
    return Work(
        flops=blocks * attention_flops(query, key, values, is_backward),
        attention="flex",
        share=reached_share(query.shape[-1], is_backward, is_causal=blocks < 1),
        nbytes=read_bytes + nbytes_of(call.out),
    )


def _share_of_blocks(call: Call, i: int) -> float:
    """Return the share of blocks that the block mask, argument `i` of `call`, does not skip; 1 if not known."""
    assert call.node is not None
    mask: Any = call.args[i] if i < len(call.args) else call.argument("block_mask")
    if not isinstance(mask, (tuple, list)) or len(mask) < 5:
        return 1.0
    rows, columns = call.args[0].shape[-2], call.args[1].shape[-2]
    *_, block_rows, block_columns, function = mask
    others = call.argument("mask_mod_other_buffers", call.args[-1] if call.args else ())
    is_subgraph = isinstance(function, Node) and function.op == "get_attr"
    module = getattr(call.node.graph.owning_module, str(function.target), None) if is_subgraph else None
    if module is None or others or not (isinstance(block_rows, int) and isinstance(block_columns, int)):
        return 1.0
    try:
        with _disable_current_modes():  # else the mask's tensors would be fake ones, without values
            return _computed_share(module, (rows, columns), (block_rows, block_columns))
    except Exception:  # the mask's function reads values that exist only in a run
        return 1.0


def _computed_share(mask: Callable[..., torch.Tensor], sizes: Sequence[int], blocks: Sequence[int]) -> float:
    """Return the share of blocks in which `mask(batch, head, query, key)` is True for a sampled query and key."""
    rows, columns = (_sampled(size, min(block, size)) for size, block in zip(sizes, blocks))
    row, column = rows.flatten()[:, None], columns.flatten()[None, :]
    zero = torch.zeros((), dtype=torch.int64)
    passes = torch.as_tensor(mask(zero, zero, row, column))
    if passes.dtype is not torch.bool or type(passes) is not torch.Tensor:
        return 1.0
    passes = passes.expand(row.shape[0], column.shape[1])
    computed = passes.view(len(rows), SAMPLES, len(columns), SAMPLES).any(3).any(1)
    return computed.float().mean().item()


def _sampled(size: int, block: int) -> torch.Tensor:
    """Return sampled positions [blocks, SAMPLES] in evenly spread blocks of a dimension."""
    count = -(-size // block)
    firsts = torch.linspace(0, count - 1, min(count, MASK_BLOCKS)).long() * block
    inside = torch.linspace(0, block - 1, SAMPLES).long()
    return (firsts[:, None] + inside).clamp(max=size - 1)


KERNELS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)

FORMULAS: dict[str, Callable[[Call], Work]] = {
    **{f"aten::{kernel}{end}": scaled_dot_product for kernel in KERNELS for end in ("", "_backward")},
    "higher_order::flex_attention": flex_attention,
    "higher_order::flex_attention_backward": flex_attention,
}
