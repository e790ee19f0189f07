"""Blocks and units may return any container or a function, share parameters, compute in a thread, have any strides."""

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

import zcompile
from tests.support.blocks import FORMS, shard_in_blocks
from tests.support.compiling import OPTIONS
from tests.support.models import Chain, mean_square, normal
from tests.support.ranks import slow_case
from tests.support.reference import compiled, train_beside


@dataclasses.dataclass(frozen=True)
class Result:
    x: torch.Tensor
    name: str = "a layer"


class Pair(NamedTuple):
    x: torch.Tensor
    nothing: None = None


CONTAINERS = {
    "a dataclass": Result,
    "a dataclass in a dict": lambda x: SimpleDict(x=Result(x)),
    "a named tuple": Pair,
    "an object": lambda x: SimpleNamespace(x=x),  # in which nothing looks for tensors
}


class SimpleDict(dict):
    x = property(lambda self: self["x"].x)


class Layer(nn.Module):
    """Reads its own parameter last, which no module inside of it does."""

    def __init__(self, container):
        super().__init__()
        self.linear, self.scale, self.container = nn.Linear(6, 6), nn.Parameter(torch.ones(6, 6)), container

    def forward(self, given):
        return self.container(torch.tanh(self.linear(given.x)) @ self.scale)


class Layers(nn.Module):
    def __init__(self, container):
        super().__init__()
        self.layers, self.container = nn.ModuleList(Layer(container) for _ in range(3)), container

    def forward(self, x):
        given = self.container(x)
        for layer in self.layers:
            given = layer(given)
        return given.x


in_units, loosely = functools.partial(zcompile.shard, units=[Layer]), functools.partial(compiled, fullgraph=False)
SHARDS = {"blocks": shard_in_blocks, "units": in_units, "compiled": loosely}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("shards", ["blocks", "units", slow_case("compiled")])
def test_layers_return_tensors_in_any_container(rank, world, shards, container):
    make = CONTAINERS[container]
    train_beside(rank, world, SHARDS[shards], make=lambda: Layers(make), loss=mean_square(3, 6))


class Tied(Chain):
    def __init__(self):
        super().__init__(*(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)) for _ in range(3)))
        self[2][0].weight = self[0][0].weight
        self[1][2].bias = self[1][0].bias  # inside of one block
        self[2][2].weight = self[1][2].weight  # by a module that shares its bias inside of its block


TIED = {
    "blocks": shard_in_blocks,
    "units": lambda model: zcompile.shard(model, units=[nn.Sequential]),
    "units of one parameter each": lambda model: zcompile.shard(model, units=[nn.Linear]),
    "a unit and the rest": lambda model: zcompile.shard(model, units=[model[2]]),
}


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("shards", TIED)
def test_blocks_and_units_may_share_a_parameter(rank, world, shards, is_compiled):
    def prepare(model):
        TIED[shards](model)
        if is_compiled:
            model.compile(**OPTIONS)
        return model

    train_beside(rank, world, prepare, make=Tied, loss=mean_square(3, 6))


def test_a_rank_may_skip_a_unit_that_shares_a_parameter(rank, world):
    """The shared one is gathered with the rest, by all ranks; the unit has its other layer."""

    class Skips(Tied):
        def forward(self, x):
            x = self[1](self[0](x))
            return self[2](x) if rank == 0 else x

    model = zcompile.shard(Skips(), units=[nn.Sequential])
    for step in range(3):
        model.zero_grad()
        mean_square(3, 6)(model, step, rank).backward()
    grads = {name: parameter.grad is not None for name, parameter in model.named_parameters()}
    assert all(grads.values()), grads


SHAPES = {"a": [1], "b": [1], "one": [1, 1], "scalar": [], "empty": [0], "rows": [0, 3], "column": [3, 1]}


class Layouts(nn.Module):
    """Its backward hands over gradients that are columns of others, expanded, transposed, or empty."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.rand(shape) + 0.5))
        self.row, self.square = (nn.Parameter(torch.rand(shape) + 0.5) for shape in ([1, 3], [3, 3]))

    def forward(self, x):
        columns = torch.stack([self.a, self.b], -1) * x[:1, :2]
        expanded = self.one.expand(3, 3) * self.scalar.expand(3, 3) + self.a + self.b.expand(2, 3, 1).sum(0)
        nothing = self.empty.expand(4, 0).sum() + self.rows.t().sum() + (self.rows @ x.t()).sum()
        product = (self.column @ self.row).t() + self.column.t()
        product = product + self.row.expand(3, 3) + self.square.t().expand(2, 3, 3)
        return columns.square().sum() + (expanded @ x).square().mean() + nothing + (product @ x).square().mean()


@pytest.mark.parametrize("prepare", [zcompile.shard, compiled, functools.partial(zcompile.shard, units=[Layouts])])
def test_gradients_of_any_strides_train_as_unsharded(rank, world, prepare):
    loss = lambda model, step, rank: model(normal(step, rank, 3, 3))
    train_beside(rank, world, prepare, make=lambda: Chain(Layouts()), loss=loss, steps=2)


class InThread(nn.Linear):
    """Computes in a thread of its own, whose autograd nodes have numbers of their own."""

    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: torch.tanh(x @ self.weight) * self.bias).result()


def in_threads():
    return nn.Sequential(InThread(6, 6), InThread(6, 6))


@pytest.mark.parametrize("prepare", [zcompile.shard, shard_in_blocks])
def test_a_block_may_compute_in_another_thread(rank, world, prepare):
    train_beside(rank, world, prepare, make=in_threads, loss=mean_square(3, 6), steps=2)


class ReturnsClosure(nn.Module):
    """Its forward returns a function that computes with a parameter later."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        x, weight = self.b(self.a(x)), self.b.weight
        return lambda: (x @ weight).tanh() + self.a(x)


def closure_loss(model, step, rank):
    return model(normal(step, rank, 3, 6))().square().mean()


def test_a_forward_may_return_a_function_that_calls_units(rank, world):
    train_beside(rank, world, FORMS["units"], make=ReturnsClosure, loss=closure_loss, steps=2)


@pytest.mark.parametrize("make, units, loss", [(in_threads, [InThread], None), (ReturnsClosure, None, closure_loss)])
def test_a_backward_that_reads_parameters_without_memory_is_an_error(rank, world, make, units, loss):
    """In a thread, kernels do not look for missing memory; of a block's function, nothing tells when backward comes."""
    model = zcompile.shard(make(), units=units)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss or mean_square(3, 6))(model, 0, rank).backward()
