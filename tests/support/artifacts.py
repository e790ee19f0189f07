"""A small model whose shards are of every kind, trained from a file and trained from a compile."""

import contextlib
import hashlib
import os

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import zcompile
from tests.support.meshes import as_rank
from zcompile.artifact.program import make
from zcompile.compiler.backend import parse_options

STEPS, VOCABULARY = 5, 11


@contextlib.contextmanager
def cache_in(folder):
    """Inductor's cache is `folder`, of which this process remembers nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        torch._inductor.utils.clear_caches()
        yield
    torch._inductor.utils.clear_caches()


@contextlib.contextmanager
def during(set_value, value, before):
    """A setting of the process has `value`, and afterwards the one from before."""
    set_value(value)
    try:
        yield
    finally:
        set_value(before)


class Mixed(nn.Module):
    """Tied, scalar, frozen and unevenly sharded parameters, one with fewer rows than ranks, and a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)
        self.up.bias.requires_grad_(False)
        self.activate = squared_relu
        self.drop = nn.Dropout(0.0)  # reads `training`
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))
        self.register_buffer("offset", torch.arange(6.0))
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(squared_relu(self.up(self.drop(x)))) * self.scale + self.activate(x)
        return self.head(x + self.shift * self.offset.to(x.dtype))


def squared_relu(x):
    return x.relu().square()


def tokens_of(step, rank, length=4):
    return torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(10 * step + rank))


def sharded(make_model=Mixed, **how):
    torch.manual_seed(0)
    return zcompile.shard(make_model(), **how)


def make_file(path, world, *, autocast=False, options=None, **how):
    """Write the file of a `Mixed` for `world` ranks, as a process that is one of them and sees no other."""
    with as_rank(0, world), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        data = make(sharded(**how), parse_options(options), None, (tokens_of(0, 0),), {})
    path.write_bytes(data)
    os.chmod(path, 0o644)
    return hashlib.sha256(data).hexdigest()


def loss_of(model, step, rank, autocast=False):
    tokens = tokens_of(step, rank)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(tokens)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def train(model, rank, loss=loss_of, steps=STEPS, **how):
    """Losses, gradients of the rank's shards and their norm, of some steps; all as bytes, to be compared bitwise."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(steps):
        value = loss(model, step, rank, **how)
        value.backward()
        seen.append(as_bytes(value))
        for parameter in model.parameters():
            seen.append(b"" if parameter.grad is None else as_bytes(parameter.grad.to_local()))
        seen.append(as_bytes(zcompile.clip_grad_norm_(model.parameters(), float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def as_bytes(tensor):
    return tensor.detach().float().contiguous().numpy().tobytes()


def compiler_counts():
    """What torch counted of its own work: graphs, frames, cache lookups."""
    return {name: dict(counts) for name, counts in counters.items() if counts}


class Broken(Mixed):
    def forward(self, tokens):
        x = super().forward(tokens)
        torch._dynamo.graph_break()
        return x + 1
