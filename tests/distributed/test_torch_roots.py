"""A compiled model whose root is of a class of torch.nn: the code before its forward runs, as that of users' classes.

torch.compile wraps the call of such a root in a function of its own, so that Dynamo traces all of the call, and
model.compile() of one compiles nothing (pytorch/pytorch#150915).
"""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.func import functional_call

import zcompile
from tests.support.compiling import wrapped
from tests.support.models import mean_square
from tests.support.reference import compiled, full, pair, train_beside

ways = pytest.mark.parametrize("prepare", [compiled, wrapped])


def small():
    return nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 6))


def linear():
    return nn.Linear(6, 6)


loss_of = mean_square(3, 6)


def sharded(model):
    return getattr(model, "_orig_mod", model)


@ways
@pytest.mark.parametrize("make", [small, linear])
def test_one_graph_trains_as_unsharded(rank, world, prepare, make):
    counters.clear()
    train_beside(rank, world, prepare, make=make, loss=loss_of)
    assert counters["stats"]["unique_graphs"] == 1


@ways
@pytest.mark.parametrize("make", [small, linear])
def test_functional_call_takes_dtensors(rank, world, prepare, make):
    model = prepare(make())
    assert loss_of(model, 0, rank) > 0
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    assert torch.equal(functional_call(model, zeros, (torch.ones(2, 6),)), torch.zeros(2, 6))
    assert loss_of(model, 0, rank) > 0


@ways
def test_requires_grad_and_lost_writes_are_seen(rank, world, prepare):
    model = prepare(small())
    loss_of(model, 0, rank).backward()
    first, last = sharded(model)[0], sharded(model)[2]
    first.weight.grad, first.weight.requires_grad = None, False
    loss_of(model, 0, rank).backward()
    assert first.weight.grad is None and last.weight.grad is not None
    last.weight.data = torch.zeros_like(last.weight)
    with pytest.raises(RuntimeError, match=r"'.data' of parameter '2.weight'"):
        loss_of(model, 0, rank)


@ways
def test_unshard_shows_whole_parameters(rank, world, prepare):
    reference, model = pair(small, prepare)
    loss_of(model, 0, rank)
    with zcompile.unshard(sharded(model), writeback=True):
        with torch.no_grad():
            sharded(model)[0].weight.zero_()
            reference[0].weight.zero_()
        torch.testing.assert_close(loss_of(model, 0, rank), loss_of(reference, 0, rank))
    assert torch.equal(full(sharded(model)[0].weight), torch.zeros(5, 6))
    torch.testing.assert_close(loss_of(model, 0, rank), loss_of(reference, 0, rank))


@pytest.mark.parametrize("make", [small, linear])
def test_a_compiled_part_is_as_a_compiled_root(rank, world, make):
    """A module of torch.nn inside of a sharded model, compiled and called by itself, by whichever backend."""
    for backend in ("zcompile", "aot_eager"):
        torch._dynamo.reset()
        part = zcompile.shard(nn.ModuleDict({"part": make()}))["part"]
        compiled_part = torch.compile(part, backend=backend)
        assert loss_of(compiled_part, 0, rank) > 0
        zeros = {name: torch.zeros_like(parameter) for name, parameter in compiled_part.named_parameters()}
        assert torch.equal(functional_call(compiled_part, zeros, (torch.ones(2, 6),)), torch.zeros(2, 6))
        assert loss_of(compiled_part, 0, rank) > 0
        first = next(part.parameters())
        first.data = torch.zeros_like(first)
        with pytest.raises(RuntimeError, match=r"'.data' of parameter 'part\."):
            loss_of(compiled_part, 0, rank)
