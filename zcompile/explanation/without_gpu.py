"""Lets `zcompile explain` trace, without a GPU, the graphs that a GPU would run.

On CPUs, torch has one fused attention kernel. For inputs that it does not support, such as values that are narrower
than queries (DeepSeek-V3), the graph has plain matmuls with the memory and time of attention scores. On a GPU, another
fused kernel runs. Its op has a fake implementation on any device, so a traced graph can have it.

To know which tensors a user's Triton kernel writes, torch asks Triton, whose driver must name a type of GPU. If that
fails, torch assumes that the kernel writes every argument, and inserts copies that a real run would not have.
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
WIDEST_FLASH = 256  # elements of the widest head of GPUs' flash attention
ALIGNED = 8  # elements; GPU kernels take heads whose width is a multiple of it
CAPABILITY, WARP_THREADS = 90, 32  # of Hopper; a kernel writes the same arguments on every GPU


@contextlib.contextmanager
def attention_of_gpus(hardware: Hardware) -> Iterator[None]:
    """In the `with` block, models that are traced on fake CPU tensors get the attention ops of the GPU `hardware`.

    Torch refuses the backward of flex attention on CPUs, so the block turns torch's check of the device off, for the
    whole process.
    """
    check = flex_attention._validate_device
    flex_attention._validate_device = lambda query, key, value: None
    try:
        with DeviceAttention(hardware):
            yield
    finally:
        flex_attention._validate_device = check


class DeviceAttention(TorchFunctionMode):
    """In this mode, `scaled_dot_product_attention` of fake tensors calls the op that a GPU would run.

    Where torch prefers cuDNN, this is cuDNN's op. Otherwise, calls with a mask, dropout, heads wider than WIDEST_FLASH,
    or values of another width than queries get the memory-efficient kernel's op, if that kernel takes their inputs. All
    other calls keep torch's CPU op, whose fused kernel counts as flash attention.
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
    """Return `scaled_dot_product_attention` of the arguments from `query` on, by the op that a GPU would run."""
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
    """Return a boolean or float mask as the tensor to add to attention scores, [batch, heads, rows, columns]."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


class _Driver:
    """The part of a Triton driver that tracing needs."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, WARP_THREADS)


@contextlib.contextmanager
def triton_without_gpu() -> Iterator[None]:
    """In the `with` block, Triton kernels can be traced, but not run, without a GPU. With a GPU, nothing changes."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime import driver

    driver.set_active(_Driver())
    try:
        yield
    finally:
        driver.set_active(None)  # the next use looks for GPUs again
