"""Decoders with kernels that torch does not ship, for the profiler and `zcompile explain`:

    zcompile profile --module benchmarks/custom_kernels.py:flex --engines zcompile,limit

`flex` attends by flex_attention within a sliding window. `triton_swiglu` computes SwiGLU by Triton kernels of a user,
one for forward and one for backward. Both have the built-in decoder's blocks, 8 of them, 0.62 B parameters.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from zcompile.explanation.llama import Block, Llama, Size, rotate
from zcompile.explanation.workloads import draw_tokens

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch: `flex` alone
    triton = None

SIZE = Size(layers=8, width=2048, hidden=7168, heads=16, kv_heads=16, vocabulary=32_000, tokens=4096)
WINDOW = 1024  # tokens before its own that one attends to
BLOCK = 1024  # elements of one Triton program


def _in_window(batch: Any, head: Any, row: Any, column: Any) -> Any:
    return (row >= column) & (row - column < WINDOW)


class PlainHeads(Block):
    """A block with as many heads of keys as of queries, whose attention and gate a subclass has."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [batch, tokens, width], as is the result."""
        batch, tokens, _ = x.shape
        h = self.attention_norm(x)
        q, k, v = (
            layer(h).view(batch, tokens, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attended = self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        h = self.mlp_norm(x)
        return x + self.down(self.gated(self.gate(h), self.up(h)))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up


class FlexBlock(PlainHeads):
    """Attends within a sliding window."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = create_block_mask(_in_window, None, None, q.shape[-2], k.shape[-2], device=q.device)
        return flex_attention(q, k, v, block_mask=mask)


if triton is not None:

    @triton.jit
    def _swiglu_kernel(gate, up, out, count, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        g = tl.load(gate + at, mask=inside).to(tl.float32)
        u = tl.load(up + at, mask=inside).to(tl.float32)
        tl.store(out + at, g * tl.sigmoid(g) * u, mask=inside)

    @triton.jit
    def _swiglu_backward_kernel(gate, up, grad, grad_gate, grad_up, count, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        g = tl.load(gate + at, mask=inside).to(tl.float32)
        u = tl.load(up + at, mask=inside).to(tl.float32)
        d = tl.load(grad + at, mask=inside).to(tl.float32)
        s = tl.sigmoid(g)
        tl.store(grad_gate + at, d * u * s * (1 + g * (1 - s)), mask=inside)
        tl.store(grad_up + at, d * g * s, mask=inside)

    @torch.library.triton_op("zcompile_benchmarks::swiglu", mutates_args={})
    def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, of one shape and dtype."""
        out = torch.empty_like(gate)
        grid = (triton.cdiv(gate.numel(), BLOCK),)
        torch.library.wrap_triton(_swiglu_kernel)[grid](gate, up, out, gate.numel(), BLOCK)
        return out

    @torch.library.triton_op("zcompile_benchmarks::swiglu_backward", mutates_args={})
    def swiglu_backward(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of `gate` and `up`."""
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        grid = (triton.cdiv(gate.numel(), BLOCK),)
        kernel = torch.library.wrap_triton(_swiglu_backward_kernel)
        kernel[grid](gate, up, grad.contiguous(), grad_gate, grad_up, gate.numel(), BLOCK)
        return grad_gate, grad_up

    swiglu.register_autograd(
        lambda ctx, grad: swiglu_backward(*ctx.saved_tensors, grad),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )


class TritonBlock(PlainHeads):
    """Its SwiGLU is one Triton kernel."""

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return swiglu(gate, up)


def _workload(block: type[Block]) -> tuple[nn.Module, Any, Any]:
    model = Llama(SIZE)
    for module in model.blocks:
        module.__class__ = block

    def batch(step: int, rank: int) -> torch.Tensor:
        return draw_tokens(SIZE.vocabulary, SIZE.sequences, SIZE.tokens, step, rank)

    return model, batch, lambda module, tokens: module(tokens)


def flex() -> tuple[nn.Module, Any, Any]:
    """One sequence of 4096 tokens, attention within a window of 1024."""
    return _workload(FlexBlock)


def triton_swiglu() -> tuple[nn.Module, Any, Any]:
    """One sequence of 4096 tokens, SwiGLU by Triton kernels."""
    if triton is None:
        raise SystemExit("benchmarks/custom_kernels.py:triton_swiglu needs Triton, which CUDA builds of torch bring")
    return _workload(TritonBlock)
