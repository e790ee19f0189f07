"""Chains of small units between linear layers, for tests of what a unit may contain, return and be used for."""

import torch
from torch import nn

import zcompile
from tests.support.models import normal
from tests.support.reference import pair, train_beside

WIDTH = 6
inputs = lambda step, rank: normal(step, rank, 3 + rank, WIDTH)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3), nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x):
        return torch.tanh(x @ self.a) @ self.b


class Chain(nn.Module):
    """Parts, which are the units, and a linear layer before and behind each. A rank may leave out parts (`skip`)."""

    def __init__(self, *parts):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(parts)
        self.denses = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in parts)

    def forward(self, x, skip=()):
        x = self.first(x)
        for i, (part, dense) in enumerate(zip(self.parts, self.denses)):
            if i not in skip:
                x = x + part(x)
            x = dense(x)
        return x


def make_chain(count=3, kind=Part):
    return Chain(*(kind() for _ in range(count)))


def chain_loss(model, step, rank, **how):
    return model(inputs(step, rank), **how).square().mean()


def skipping(*skip):
    """`chain_loss`, with parts that rank 1 leaves out."""
    return lambda model, step, rank: chain_loss(model, step, rank, skip=skip if rank == 1 else ())


def with_units(model, **how):
    return zcompile.shard(model, **{"units": list(model.parts), **how})


def chains(make=make_chain):
    return pair(make, with_units)


def chain_beside(rank, world, make=make_chain, loss=chain_loss, steps=3, prepare=with_units):
    return train_beside(rank, world, prepare, make=make, loss=loss, steps=steps)


class By(Part):
    """A part whose forward is `compute(part, x)`; with a module of its own, if `make` makes one."""

    def __init__(self, compute, make=nn.Identity):
        super().__init__()
        self.compute, self.inner = compute, make()

    def forward(self, x, *depth):
        return self.compute(self, x, *depth)


def as_complex(part, x):
    matrix = torch.view_as_complex(part.a.view(WIDTH, 3, 2))
    return torch.view_as_real((x.to(torch.complex64) @ matrix).square()).flatten(1) @ part.b


class ShapesAndDtypes(Part):
    """A scalar, a dimension of 1, fewer rows than fit all ranks, and several dtypes."""

    def __init__(self):
        super().__init__()
        self.scalar, self.row = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.randn(1, WIDTH))
        self.in_double = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.in_bf16 = nn.Parameter(torch.randn(5).bfloat16())

    def forward(self, x):
        x = super().forward(x) * self.scalar + self.row
        return (x * self.in_double.sum() + self.in_bf16.float().sum()).float()


padded = lambda: nn.Embedding(9, WIDTH, padding_idx=2)
KINDS = {
    "shapes and dtypes": ShapesAndDtypes,
    "complex": lambda: By(as_complex),
    "calls of itself": lambda: By(lambda part, x, depth=2: x if depth == 0 else part(Part.forward(part, x), depth - 1)),
    "sparse": lambda: By(lambda part, x: torch.sparse.mm(torch.eye(len(x)).to_sparse(), (x @ part.a).tanh()) @ part.b),
    "padding": lambda: By(lambda part, x: Part.forward(part, x) + part.inner(x.argmax(-1)), padded),
    "a norm": lambda: By(lambda part, x: Part.forward(part, part.inner(x)), lambda: nn.BatchNorm1d(WIDTH).eval()),
}
