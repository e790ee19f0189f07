"""Blocks that share a parameter, each with others of its own."""

import functools

import pytest
import torch
from torch import nn

from tests.support.blocks import shard_in_blocks
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


def loss_of(model, step, rank):
    return model(torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


def prepared(model, is_compiled):
    shard_in_blocks(model)
    if is_compiled:
        model.compile(backend="zcompile", options={"inner": "aot_eager"})
    return model


@pytest.mark.parametrize("is_compiled", [False, True])
@on_ranks(2)
def test_blocks_may_share_a_parameter(rank, world, is_compiled):
    train_beside(rank, world, functools.partial(prepared, is_compiled=is_compiled), make=Tied, loss=loss_of)
