"""In which order units gather and reduce, and how much is unsharded meanwhile."""

import itertools

import pytest
import torch

import zcompile
from tests.support.mixtures import Experts, MixtureModel, bytes_of, compiled, routed_loss, sharded
from tests.support.reference import train_beside
from zcompile.state.sharded_model import state_of

slow = pytest.mark.slow


def not_ahead(model):
    """With a budget in which no unit is gathered ahead."""
    state_of(sharded(model)).unit_order.budget_bytes = 0
    return model


@pytest.mark.parametrize("prepare", [sharded, pytest.param(compiled, marks=slow), pytest.param(not_ahead, marks=slow)])
@pytest.mark.parametrize(
    "skipped", [(0,), (2,), (0, 1, 2), *(pytest.param(each, marks=slow) for each in [(1,), (1, 2), (0, 1)])]
)
def test_a_rank_may_skip_a_unit(rank, world, prepare, skipped):
    def loss(model, step, rank):
        return routed_loss(model, step, rank, skip_experts=skipped if rank == 1 and step > 0 else ())

    train_beside(rank, world, prepare, make=MixtureModel, loss=loss, steps=4)


@slow
def test_each_rank_may_skip_another_unit(rank, world):
    loss = lambda model, step, rank: routed_loss(model, step, rank, skip_experts=(rank + 1,) if step % 2 == 0 else ())
    train_beside(rank, world, sharded, make=lambda: MixtureModel(Experts, 4), loss=loss, steps=4)


def test_a_unit_is_gathered_twice_and_reduced_once_in_a_step(rank, world):
    torch.manual_seed(0)
    model = sharded(MixtureModel(Experts, 3), units=[Experts])
    for step in range(3):
        routed_loss(model, step, rank).backward()
    zcompile.reset_stats(model)
    routed_loss(model, 3, rank).backward()
    moved = zcompile.stats(model)
    of_unit = 3 * len(Experts().experts)
    assert moved["gathers"] == 3 * (2 * of_unit + 4) + 4, moved  # each parameter of the root block once
    assert moved["reduces"] == 3 * (of_unit + 4) + 4, moved
    one = bytes_of(model, experts=True) / 3
    dense = bytes_of(model, experts=False)
    assert moved["peak_unsharded_bytes"] <= 2 * one + dense  # one unit, and the next on its way


def test_units_start_the_same_collectives_on_all_ranks(rank, world):
    torch.manual_seed(0)
    model = sharded(MixtureModel(Experts, 3))
    counts = []
    for step in range(4):
        routed_loss(model, step, rank, skip_experts=(1,) if rank == 1 and step == 2 else ()).backward()
        marks = state_of(model).units.runtime.order()
        counts.append(marks[-1][0])
    everywhere: list = [None] * world
    torch.distributed.all_gather_object(everywhere, marks)
    assert everywhere[0] == everywhere[1]
    assert counts == [9, 18, 27, 36]  # one gather in forward, one gather and one reduce in backward, of each unit


class Backwards(MixtureModel):
    """Calls its layers in another order than that in which it has them."""

    def forward(self, x, routes, skip_experts=()):
        x = self.enter(x)
        for i, layer in reversed(list(enumerate(self.layers))):
            x = layer(x, routes, i in skip_experts)
        return self.leave(x)


def test_the_order_of_calls_is_learned(rank, world):
    counts = [0]

    def count(model, reference, step):
        counts.append(state_of(model).units.runtime.order()[-1][0])

    def loss(model, step, rank):
        return routed_loss(model, step, rank, skip_experts=(1,) if rank == 1 and step == 3 else ())

    train_beside(rank, world, sharded, make=Backwards, loss=loss, steps=5, after_step=count)
    moved = [end - begin for begin, end in itertools.pairwise(counts)]
    assert moved[0] > 9 and moved[1:] == [9] * 4, moved  # after the first step, in the order of calls


def test_a_budget_limits_what_is_gathered_ahead(rank, world):
    model = train_beside(rank, world, not_ahead, make=MixtureModel, loss=routed_loss, steps=2)
    zcompile.reset_stats(model)
    routed_loss(model, 3, rank).backward()
    one = bytes_of(model, experts=True) / 3
    assert zcompile.stats(model)["peak_unsharded_bytes"] <= one + bytes_of(model, experts=False)
