"""Units on GPUs, where ranks do not agree before their collectives."""

import functools

import pytest
import torch

import zcompile
from tests.support.mixtures import Experts, MixtureModel, StackedExperts
from tests.support.reference import train_beside
from tests.support.units import routed_loss
from zcompile.sharding.model_state import models_of, state_of


def sharded_over(transport, model, inner=None):
    """`model` with its experts as units, over `transport`, one of the runtime's names."""
    zcompile.shard(model, units=[type(model.layers[0].experts)])
    for state in models_of(state_of(model)):
        state.runtime.use_transport(transport)
        if "p2p" in transport:
            state.agreement = None  # of NCCL, which was taken before
    if inner is not None:
        model.compile(backend="zcompile", options={"inner": inner})
    return model


def rank_routes(rank, world, transport, experts, inner):
    def loss(model, step, rank):
        return routed_loss(model, step, rank, skip_experts=(0, 1) if rank == 1 and step == 2 else ())

    train_beside(
        rank,
        world,
        functools.partial(sharded_over, transport, inner=inner),
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
