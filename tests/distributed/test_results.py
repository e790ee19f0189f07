"""Blocks and units may return tensors in any container; their backward gathers the parameters again."""

import dataclasses
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

import zcompile
from tests.support.blocks import shard_in_blocks
from tests.support.models import mean_square
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
