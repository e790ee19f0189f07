"""The model that engines are compared on: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 32_000
TOKENS = 2048
WIDTH, HIDDEN, HEADS, KV_HEADS = 4096, 14_336, 32, 8


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pairs (x[i], x[i + d / 2]) of [batch, heads, tokens, d] by their position's angle (arXiv:2104.09864)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        head = WIDTH // HEADS
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, KV_HEADS * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        batch, tokens, _ = x.shape
        h = self.attention_norm(x)
        q = rotate(self.query(h).view(batch, tokens, HEADS, -1).transpose(1, 2), cos, sin)
        k = rotate(self.key(h).view(batch, tokens, KV_HEADS, -1).transpose(1, 2), cos, sin)
        v = self.value(h).view(batch, tokens, KV_HEADS, -1).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, -1))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """8 layers have 2.0 B parameters, 32 have 7.2 B. Its forward returns the loss."""

    def __init__(self, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        half = WIDTH // HEADS // 2
        angles = torch.outer(torch.arange(TOKENS), 10_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens):
        """Mean next-token loss of int64 tokens [batch, TOKENS + 1]."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())
