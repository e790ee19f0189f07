"""Graphs as a GPU would run them, traced without one: `zcompile explain`.

On the CPU, torch runs attention as plain matmuls where its one kernel does not fit, as for values that are narrower
than queries (DeepSeek-V3). The scores then stand in the graph, with their memory and their time. A GPU has a kernel for
that. The ops of GPUs have fake results on any device, so a graph can have them that nobody runs.

To know which tensors a user's Triton kernel writes, torch compiles it to Triton's first representation, and Triton asks
its driver for which GPU. Where there is none, torch takes every argument for written, and graphs have copies that
nobody makes.
"""

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from zcompile.costs.hardware import Hardware

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST_FLASH = 256  # of a head
ALIGNED = 8  # elements; the kernel takes heads whose width is a multiple
CAPABILITY, WARP_THREADS = 90, 32  # of Hopper; which arguments are written is the same for every GPU


@contextlib.contextmanager
def attention_of_gpus(hardware: Hardware) -> Iterator[None]:
    """Inside, models that are traced on fake CPU tensors get the attention ops that torch would choose on `hardware`.

    `DeviceAttention` chooses those of scaled dot product attention. Flex attention stays an op of its own. torch
    refuses its backward on CPUs, so until the block ends torch's check of the device is left out, in the whole process.
    """
    check = flex_attention._validate_device
    flex_attention._validate_device = lambda query, key, value: None
    try:
        with DeviceAttention(hardware):
            yield
    finally:
        flex_attention._validate_device = check


class DeviceAttention(TorchFunctionMode):
    """Inside, a model that is traced on fake tensors calls the attention that a GPU would run.

    On GPUs that have it first, that is cuDNN's. What flash attention runs stays torch's op for CPUs, which counts as
    flash attention. With a mask, or with values of another width than queries, it is the memory-efficient kernel's op.
    All else stays as it is: odd widths, grouped queries that cuDNN does not take.
    """

    def __init__(self, hardware: Hardware):
        self.hardware = hardware

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            return _attention(self.hardware.widest_cudnn_head, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    widest_cudnn_head: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The other arguments and the result are those of `torch.nn.functional.scaled_dot_product_attention`."""
    widths = query.shape[-1], value.shape[-1]
    grouped = query.dim() == 4 and query.shape[1] != key.shape[1]
    fits = query.dtype in DTYPES and query.dim() == 4 and not any(width % ALIGNED for width in widths)
    cudnn = fits and query.itemsize == 2 and max(widths) <= widest_cudnn_head
    flash = attn_mask is None and dropout_p == 0.0 and widths[0] == widths[1] <= WIDEST_FLASH
    if not cudnn and (flash or grouped or not fits):
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    saves = query.requires_grad or key.requires_grad or value.requires_grad
    aten = torch.ops.aten
    op = aten._scaled_dot_product_cudnn_attention if cudnn else aten._scaled_dot_product_efficient_attention
    out, *_ = op(query, key, value, bias, saves, dropout_p, is_causal, scale=scale)
    return out


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask as what is added to scores [batch, heads, rows, columns]."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


class _Driver:
    """As much of a driver of Triton as tracing asks for."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, WARP_THREADS)


@contextlib.contextmanager
def triton_without_gpu() -> Iterator[None]:
    """Inside, Triton kernels can be traced, though not run, on a machine without a GPU. With one, nothing changes."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime import driver

    driver.set_active(_Driver())
    try:
        yield
    finally:
        driver.set_active(None)  # it looks for GPUs anew
