"""Blocks and units may return tensors in any container, and share parameters; their backward gathers these again."""

import dataclasses
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

import zcompile
from tests.support.blocks import shard_in_blocks
from tests.support.compiling import OPTIONS
from tests.support.models import Chain, mean_square
from tests.support.ranks import on_ranks
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


SHARDS = {
    "blocks": shard_in_blocks,
    "units": lambda model: zcompile.shard(model, units=[Layer]),
    "compiled": lambda model: compiled(model, fullgraph=False),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("shards", SHARDS)
@on_ranks(2)
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
@on_ranks(2)
def test_blocks_and_units_may_share_a_parameter(rank, world, shards, is_compiled):
    def prepare(model):
        TIED[shards](model)
        if is_compiled:
            model.compile(**OPTIONS)
        return model

    train_beside(rank, world, prepare, make=Tied, loss=mean_square(3, 6))


@on_ranks(2)
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
