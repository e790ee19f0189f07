"""In eager, reduces start as soon as their gradients are there, whatever earlier graphs are still alive."""

import pytest
import torch
from torch import nn

import zcompile
from tests.support.blocks import shard_in_blocks
from tests.support.models import normal
from tests.support.ranks import on_ranks


def reduces_by_layer(model, x):
    """(the loss, how many reduces have started when backward has come to the input of each layer but the first)."""
    started = []
    for layer in model:
        if x.requires_grad:
            x.register_hook(lambda grad: started.append(zcompile.stats(model)["reduces"]))
        x = layer(x)
    zcompile.reset_stats(model)
    return x.square().mean(), started


@pytest.mark.parametrize("runs_backward", [True, False])
@on_ranks(2)
def test_reduces_start_early_while_an_earlier_loss_is_held(rank, world, runs_backward):
    """Of a step, or one whose backward never runs, such as that of a validation batch."""
    model = shard_in_blocks(nn.Sequential(*(nn.Linear(6, 6) for _ in range(5))))
    x = normal(0, rank, 4, 6)
    loss, first = reduces_by_layer(model, x)
    loss.backward()
    del loss
    held = []
    for _ in range(2):
        held.append(reduces_by_layer(model, x)[0])
        if runs_backward:
            held[-1].backward()
    loss, last = reduces_by_layer(model, x)
    loss.backward()
    assert first == last == [0, 2, 4, 6], (first, last)  # those of the layers behind the last one


@on_ranks(2)
def test_a_parameter_that_is_read_twice_is_reduced_once(rank, world):
    first, *others = (nn.Linear(6, 6, bias=False) for _ in range(3))
    model = zcompile.shard(nn.Sequential(first, *others, first))
    zcompile.reset_stats(model)
    model(torch.ones(2, 6)).sum().backward()
    assert zcompile.stats(model)["reduces"] == 3
