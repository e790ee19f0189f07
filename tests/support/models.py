"""Small models of our own; tests/support/architectures.py has those of transformers and diffusers."""

from collections.abc import Callable

import torch
from torch import nn

VOCABULARY = 61
TOKENS = 12


class Chain(nn.Sequential):
    """With a forward that is not torch.nn's, of which model.compile() compiles nothing (pytorch/pytorch#150915)."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


class Block(nn.Module):
    """A pre-norm transformer block with sizes that do not divide by 2 or 4."""

    def __init__(self, width: int = 18, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A language model with tied embeddings, a scalar parameter, and a parameter smaller than four ranks."""

    def __init__(self, blocks: int = 2, width: int = 18):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.mix = nn.Parameter(torch.tensor([0.5, 0.25, 0.125]))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale * self.mix.sum()


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int, rank: int, length: int = TOKENS) -> torch.Tensor:
    """Tokens that `rank` sees at `step`: [2, length]."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCABULARY, (2, length), generator=generator)


def normal(step: int, rank: int, *shape: int) -> torch.Tensor:
    """A normal distribution's numbers, other ones at each step and on each rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def mean_square(*shape: int) -> Callable[[nn.Module, int, int], torch.Tensor]:
    """(model, step, rank) -> the mean square of what the model makes of `normal`."""

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return model(normal(step, rank, *shape).to(next(model.parameters()).device)).square().mean()

    return loss


class Sometimes(nn.Module):
    """Uses `extra` only if told to, and `deaf` without any effect on the loss."""

    def __init__(self):
        super().__init__()
        self.a, self.extra, self.b = nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 5)
        self.deaf, self.never = nn.Linear(9, 3), nn.Linear(3, 3)

    def forward(self, x, use: bool):
        h = self.a(x).relu()
        if use:
            h = h + self.extra(h)
            self.deaf(h)
        return self.b(h)


def sometimes_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The loss of a `Sometimes` that uses `extra` in every other step."""
    return model(normal(step, rank, 4, 7), step % 2 == 0).square().mean()
