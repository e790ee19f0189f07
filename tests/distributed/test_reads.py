"""Eager forwards read parameters in all ways that users know, and train as the unsharded model does."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import zcompile
from tests.support.blocks import shard_in_blocks
from tests.support.ranks import on_ranks
from tests.support.reads import WAYS, WIDTH, Reader, reading
from tests.support.reference import full

slow = pytest.mark.slow


def as_root(model):
    return zcompile.shard(model)


def as_units(model):
    return zcompile.shard(model, units=[Reader])


def batch(step, rank):
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def freeze(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("b.weight"))


def difference(rank, world, prepare, way, state):
    """The largest difference between losses, and between gradients, of three steps and those of the unsharded model."""
    torch.manual_seed(0)
    reference = nn.Sequential(reading(way)(), reading(way)())
    model = prepare(copy.deepcopy(reference))
    if state == "frozen":
        freeze(model), freeze(reference)
    found = 0.0
    for step in range(3):
        with torch.no_grad() if state == "no_grad" else contextlib.nullcontext():
            ours = model(batch(step, rank)).square().mean()
            theirs = [reference(batch(step, other)).square().mean() for other in range(world)]
        found = max(found, abs(ours - theirs[rank]).item())
        if state == "no_grad":
            continue
        ours.backward(), (sum(theirs) / world).backward()
        for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), f"{name} has a gradient: {mine.grad is not None}"
            if mine.grad is not None:
                found = max(found, (full(mine.grad) - other.grad).abs().max().item())
        with torch.no_grad():
            for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
                if mine.grad is not None:
                    mine.sub_(mine.grad, alpha=0.1), other.sub_(other.grad, alpha=0.1)
        model.zero_grad(), reference.zero_grad()
    return found


@pytest.mark.parametrize("prepare", [as_root, shard_in_blocks, as_units])
@pytest.mark.parametrize("state", ["train", "frozen", pytest.param("no_grad", marks=slow)])
@pytest.mark.parametrize("world", [pytest.param(1, marks=slow), 2, pytest.param(3, marks=slow)])
@on_ranks(timeout=300)
def test_a_forward_may_read_its_parameters_in_any_way(rank, world, state, prepare):
    wrong = {}
    for way in WAYS:
        try:
            found = difference(rank, world, prepare, way, state)
        except Exception as error:
            wrong[way] = f"{type(error).__name__}: {str(error)[:200]}"
        else:
            if found > 2e-6:
                wrong[way] = found
    assert not wrong, wrong
