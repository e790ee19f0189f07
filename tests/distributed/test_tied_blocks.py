"""Blocks and units that share a parameter, each with others of its own."""

import pytest
from torch import nn

import zcompile
from tests.support.blocks import shard_in_blocks
from tests.support.compiling import OPTIONS
from tests.support.models import mean_square
from tests.support.ranks import on_ranks
from tests.support.reference import train_beside


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)) for _ in range(3))
        self.layers[2][0].weight = self.layers[0][0].weight
        self.layers[1][2].bias = self.layers[1][0].bias  # inside of one block
        self.layers[2][2].weight = self.layers[1][2].weight  # by a module that shares its bias inside of its block

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


SHARDS = {
    "blocks": shard_in_blocks,
    "units": lambda model: zcompile.shard(model, units=[nn.Sequential]),
    "units of one parameter each": lambda model: zcompile.shard(model, units=[nn.Linear]),
    "a unit and the rest": lambda model: zcompile.shard(model, units=[model.layers[2]]),
}


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("shards", SHARDS)
@on_ranks(2)
def test_blocks_and_units_may_share_a_parameter(rank, world, shards, is_compiled):
    def prepare(model):
        SHARDS[shards](model)
        if is_compiled:
            model.compile(**OPTIONS)
        return model

    train_beside(rank, world, prepare, make=Tied, loss=mean_square(3, 6))


@on_ranks(2)
def test_a_rank_may_skip_a_unit_that_shares_a_parameter(rank, world):
    """The shared one is gathered with the rest, by all ranks; the unit has its other layer."""

    class Skips(Tied):
        def forward(self, x):
            x = self.layers[1](self.layers[0](x))
            return self.layers[2](x) if rank == 0 else x

    model = zcompile.shard(Skips(), units=[nn.Sequential])
    for step in range(3):
        model.zero_grad()
        mean_square(3, 6)(model, step, rank).backward()
    grads = {name: parameter.grad is not None for name, parameter in model.named_parameters()}
    assert all(grads.values()), grads
