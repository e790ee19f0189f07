"""Units on GPUs."""

import functools

import pytest
import torch

from tests.support.gpu import sharded_over
from tests.support.mixtures import Experts, MixtureModel, StackedExperts
from tests.support.reference import train_beside
from tests.support.units import routed_loss


def with_units(transport, model, inner=None):
    """`model` with its experts as units."""
    return sharded_over(transport, model, inner, units=[type(model.layers[0].experts)])


def rank_routes(rank, world, transport, experts, inner):
    def loss(model, step, rank):
        return routed_loss(model, step, rank, skip_experts=(0, 1) if rank == 1 and step == 2 else ())

    train_beside(
        rank,
        world,
        functools.partial(with_units, transport, inner=inner),
        make=lambda: MixtureModel(experts).cuda(),
        loss=loss,
        steps=5,
        tolerance=1e-4,
    )
    torch.cuda.synchronize()


@pytest.mark.parametrize("inner", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("experts", [Experts, StackedExperts])
@pytest.mark.parametrize("transport", ["c10d", "p2p", "late c10d", "delayed p2p"])
def test_ranks_may_route_and_skip_as_they_like(gpus, transport, experts, inner):
    gpus(2).run(rank_routes, transport, experts, inner)


@pytest.mark.parametrize("transport", ["c10d", "p2p"])
def test_four_ranks_may_route_and_skip_as_they_like(gpus, transport):
    gpus(4).run(rank_routes, transport, Experts, "aot_eager")
