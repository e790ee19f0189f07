"""What compiled forwards read behind graph breaks and in units, and what is refused by the parameter's name.

test_reads.py has what trains in one graph.
"""

import functools

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zcompile
from tests.support.models import Chain, mean_square
from tests.support.reads import WIDTH, reading
from tests.support.reference import compiled, train_beside

loss_of = mean_square(3, WIDTH)


def write(s, x, how):
    first = s.w
    y = x @ s.w
    with torch.no_grad():
        how(first)
    return y.square().mean() + (x @ s.w).mean()


REFUSED = {
    "a write": lambda s, x: write(s, x, lambda w: w.zero_()),
    "a write to .data": lambda s, x: write(s, x, lambda w: w.data.fill_(7.0)),
    "a write to a view of .data": lambda s, x: write(s, x, lambda w: w.data[0].mul_(2)),
    "a write by an out=": lambda s, x: write(s, x, lambda w: torch.add(w, 1, out=w)),
    "nn.Parameter": lambda s, x: (x @ nn.Parameter(s.w)).square().mean(),
}


def broken(model, **how):
    return compiled(model, fullgraph=False, **how)


@pytest.mark.parametrize("way", REFUSED)
@pytest.mark.parametrize("mode", ["train", pytest.param("no_grad", marks=pytest.mark.slow)])
def test_what_would_be_lost_is_refused_by_name(rank, world, way, mode):
    model = compiled(reading(way, REFUSED[way])())
    traces = torch._dynamo.config.patch(graph_break_on_nn_param_ctor=False)  # else torch refuses nn.Parameter itself
    refused = pytest.raises(RuntimeError, match=r"(?s)zcompile: forward .*parameter 'w'.* at\n.*lambda s, x")
    with torch.set_grad_enabled(mode == "train"), traces, refused:
        loss_of(model, 0, rank)


class Breaks(nn.Module):
    """A functional_call that breaks the graph inside of what it calls."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return functional_call(self.inner, {"a.weight": self.inner.a.weight * 2}, (x,))


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x):
        return self.a(x) + functional_call(self.a, {"weight": self.a.weight * 2}, (x,))


def test_a_unit_takes_what_functional_call_gives(rank, world):
    prepare = functools.partial(broken, units=[Unit])
    train_beside(rank, world, prepare, make=lambda: Chain(Unit()), loss=loss_of, steps=2)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x):
        torch._dynamo.graph_break()
        return self.a(x)


def test_what_a_graph_break_leaves_to_eager_code_takes_what_functional_call_gives(rank, world):
    train_beside(rank, world, broken, make=Breaks, loss=loss_of, steps=3)


def after_a_break(s, x, use):
    w = s.w
    y = x @ w
    torch._dynamo.graph_break()
    return use(y, w)


BROKEN = {
    "isinstance": lambda s, x: after_a_break(s, x, lambda y, w: y.mean() * (2 if isinstance(w, nn.Parameter) else 3)),
    "used": lambda s, x: after_a_break(s, x, lambda y, w: (y @ w).square().mean()),
}


@pytest.mark.parametrize("prepare", [zcompile.shard, broken])
@pytest.mark.parametrize("way", BROKEN)
def test_eager_code_and_graph_breaks_read_parameters(rank, world, prepare, way):
    train_beside(rank, world, prepare, make=reading(way, BROKEN[way]), loss=loss_of, steps=2)


def test_a_parameter_list_of_reads_behind_a_graph_break_is_an_error(rank, world):
    """Not a new parameter, whose gradient would be lost."""
    model = broken(reading("a list, wrapped again")())
    with pytest.raises(ValueError, match="Cannot assign non-leaf Tensor to parameter '0'"):
        loss_of(model, 0, rank)
