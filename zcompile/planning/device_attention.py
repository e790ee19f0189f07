"""Attention as a GPU would run it, for graphs that are traced on the CPU: `zcompile explain`.

Why: on the CPU, torch runs attention as plain matmuls where its one kernel does not fit, as for values that are
narrower than queries (DeepSeek-V3). The scores then stand in the graph, with their memory and their time. A GPU has a
kernel for that. The ops of GPUs have fake results on any device, so a graph can have them that nobody runs.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST_FLASH = 256  # of a head
ALIGNED = 8  # elements; the kernel takes heads whose width is a multiple


@contextlib.contextmanager
def attention_of_gpus() -> Iterator[None]:
    """Inside, models that are traced on fake CPU tensors have the attention of GPUs.

    That is `DeviceAttention`, and flex attention with its backward, which torch refuses on CPUs: its check of the
    device is left out in this process.
    """
    check = flex_attention._validate_device
    flex_attention._validate_device = lambda query, key, value: None
    try:
        with DeviceAttention():
            yield
    finally:
        flex_attention._validate_device = check


class DeviceAttention(TorchFunctionMode):
    """Inside, a model that is traced on fake tensors calls the attention that a GPU would run.

    What flash attention runs stays torch's op for CPUs, which counts as flash attention. With a mask, or with values of
    another width than queries, it is the memory-efficient kernel's op. All else stays as it is: grouped queries with a
    mask, odd widths.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Arguments and result as those of `torch.nn.functional.scaled_dot_product_attention`."""
    grouped = query.dim() == 4 and query.shape[1] != key.shape[1]
    flash = attn_mask is None and query.shape[-1] == value.shape[-1] <= WIDEST_FLASH
    fits = (
        query.dtype in DTYPES and query.dim() == 4 and not query.shape[-1] % ALIGNED and not value.shape[-1] % ALIGNED
    )
    if (flash and dropout_p == 0.0) or grouped or not fits:
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    saves = query.requires_grad or key.requires_grad or value.requires_grad
    out, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, saves, dropout_p, is_causal, scale=scale
    )
    return out


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask as what is added to scores [batch, heads, rows, columns]."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
