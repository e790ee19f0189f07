"""Chains of small units between linear layers, for tests of what a unit may contain, return and be used for."""

import torch
from torch import nn

import zcompile
from tests.support.reference import same_grads, train_beside

WIDTH = 6


class Part(nn.Module):
    """Two matrices. Its subclasses do other things with them."""

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


def inputs(step, rank):
    torch.manual_seed(100 * step + rank)
    return torch.randn(3 + rank, WIDTH)


def chain_loss(model, step, rank, **how):
    return model(inputs(step, rank), **how).square().mean()


def with_units(model, **how):
    """`model` with its parts as units."""
    return zcompile.shard(model, **{"units": list(model.parts), **how})


def unsharded_and_sharded(make=make_chain):
    """The same model twice; the second one has units."""
    torch.manual_seed(0)
    reference = make()
    torch.manual_seed(0)
    return reference, with_units(make())


def chain_beside(rank, world, make=make_chain, loss=chain_loss, steps=3, prepare=with_units):
    return train_beside(rank, world, prepare, make=make, loss=loss, steps=steps)


def same_backward(rank, world, reference, model, loss):
    """The backward of `loss(model, rank)` gives the gradients of the unsharded model on the inputs of all ranks."""
    model.zero_grad()
    reference.zero_grad()
    loss(model, rank).backward()
    (sum(loss(reference, other) for other in range(world)) / world).backward()
    same_grads(model, reference)


class AsComplex(Part):
    def forward(self, x):
        matrix = torch.view_as_complex(self.a.view(WIDTH, 3, 2))
        return torch.view_as_real((x.to(torch.complex64) @ matrix).square()).flatten(1) @ self.b


class MultipliesSparse(Part):
    def forward(self, x):
        return torch.sparse.mm(torch.eye(len(x)).to_sparse(), torch.tanh(x @ self.a)) @ self.b


class UsesVmap(Part):
    def forward(self, x):
        return torch.vmap(lambda matrix: torch.tanh(x @ matrix))(torch.stack([self.a, self.b])).sum(0)


class SumsParameters(Part):
    def forward(self, x):
        return x + (self.a + self.b).sum()


class SameGradient(Part):
    """Both parameters get one tensor as their gradient."""

    def forward(self, x):
        return x @ (self.a + self.b).T


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


class PaddedEmbedding(Part):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, WIDTH, padding_idx=2)

    def forward(self, x):
        return super().forward(x) + self.table(x.argmax(-1))


class Recurrent(Part):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2)

    def forward(self, x):
        return super().forward(self.lstm(x)[0])


class Normalized(Part):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH).eval()

    def forward(self, x):
        return super().forward(self.norm(x))


class Parametrized(Part):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.linear(super().forward(x))


class CallsItself(Part):
    def forward(self, x, depth=2):
        return x if depth == 0 else self(super().forward(x), depth - 1)


KINDS = (
    AsComplex,
    MultipliesSparse,
    UsesVmap,
    SumsParameters,
    SameGradient,
    ShapesAndDtypes,
    PaddedEmbedding,
    Recurrent,
    Normalized,
    Parametrized,
    CallsItself,
)
