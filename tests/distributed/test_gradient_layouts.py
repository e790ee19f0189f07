"""Gradients of any strides, and parameters of no or one element, train as unsharded."""

import functools

import pytest
import torch
from torch import nn

import zcompile
from tests.support.models import normal
from tests.support.ranks import on_ranks
from tests.support.reference import compiled, train_beside

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
        product = (
            (self.column @ self.row).t() + self.column.t() + self.row.expand(3, 3) + self.square.t().expand(2, 3, 3)
        )
        return columns.square().sum() + (expanded @ x).square().mean() + nothing + (product @ x).square().mean()


def loss_of(model, step, rank):
    return model(normal(step, rank, 3, 3))


@pytest.mark.parametrize("prepare", [zcompile.shard, compiled])
@on_ranks(2)
def test_gradients_of_any_strides_train_as_unsharded(rank, world, prepare):
    train_beside(rank, world, prepare, make=Layouts, loss=loss_of, steps=2)


@on_ranks(2)
def test_they_do_so_together_in_a_unit(rank, world):
    prepare = functools.partial(zcompile.shard, units=[Layouts])
    train_beside(rank, world, prepare, make=lambda: nn.Sequential(Layouts()), loss=loss_of, steps=2)
