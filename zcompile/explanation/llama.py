"""The decoder of Llama's shape that `zcompile explain` and `zcompile profile` have built in."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Size:
    """Sizes of a decoder of Llama's shape: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    tokens: int  # of a sequence, unless the command line says otherwise
    sequences: int = 1  # of a rank's batch, unless the command line says otherwise


SIZES = {
    "tiny": Size(layers=4, width=192, hidden=512, heads=6, kv_heads=2, vocabulary=2048, tokens=128, sequences=8),
    "125m": Size(layers=12, width=768, hidden=2048, heads=12, kv_heads=4, vocabulary=32_000, tokens=1024),
    "2b": Size(layers=8, width=4096, hidden=14_336, heads=32, kv_heads=8, vocabulary=32_000, tokens=2048),
    "7b": Size(layers=32, width=4096, hidden=14_336, heads=32, kv_heads=8, vocabulary=32_000, tokens=2048),
    "70b": Size(layers=80, width=8192, hidden=28_672, heads=64, kv_heads=8, vocabulary=128_256, tokens=4096),
}


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return `x` with each pair (x[i], x[i + d / 2]) rotated by the i-th angle of its token (RoPE, arXiv:2104.09864).

    `x`: queries or keys, [batch, heads, tokens, d]. `cos`, `sin`: of the angles, [tokens, d / 2].
    """
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        width, self.heads, self.kv_heads = size.width, size.heads, size.kv_heads
        head = width // size.heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, size.kv_heads * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the block's output, [batch, tokens, width] as `x`."""
        batch, tokens, _ = x.shape
        h = self.attention_norm(x)
        q = rotate(self.query(h).view(batch, tokens, self.heads, -1).transpose(1, 2), cos, sin)
        k = rotate(self.key(h).view(batch, tokens, self.kv_heads, -1).transpose(1, 2), cos, sin)
        v = self.value(h).view(batch, tokens, self.kv_heads, -1).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, -1))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """A decoder whose forward returns the loss, so that compiled graphs hold the loss too."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, size: Size, checkpointing: bool = False):
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        half = size.width // size.heads // 2
        angles = torch.outer(torch.arange(size.tokens), 10_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean next-token loss of `tokens`, int64 [batch, tokens + 1]."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(inputs)
        # FSDP2 casts a block's inputs to param_dtype, but torch 2.11 does not when checkpointing recomputes the block.
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False) if self.checkpointing else block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())
