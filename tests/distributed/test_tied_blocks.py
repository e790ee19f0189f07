"""Blocks that share a parameter, each with others of its own."""

import pytest
from torch import nn

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


@pytest.mark.parametrize("is_compiled", [False, True])
@on_ranks(2)
def test_blocks_may_share_a_parameter(rank, world, is_compiled):
    def prepare(model):
        shard_in_blocks(model)
        if is_compiled:
            model.compile(**OPTIONS)
        return model

    train_beside(rank, world, prepare, make=Tied, loss=mean_square(3, 6))
