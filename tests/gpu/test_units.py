"""Units on GPUs."""

import functools
import itertools

import pytest
import torch

from tests.support.gpu import sharded_over
from tests.support.mixtures import Experts, MixtureModel, StackedExperts, routed_loss
from tests.support.ranks import on_gpus
from tests.support.reference import train_beside

TRANSPORTS, INNERS = ("c10d", "p2p", "late c10d", "delayed p2p"), (None, "aot_eager", "inductor")


def with_units(transport, model, inner=None):
    return sharded_over(transport, model, inner, units=[type(model.layers[0].experts)])


@pytest.mark.parametrize(
    "world, transport, experts, inner",
    [
        *((2, *case) for case in itertools.product(TRANSPORTS, (Experts, StackedExperts), INNERS)),
        *((4, transport, Experts, "aot_eager") for transport in TRANSPORTS[:2]),
    ],
)
@on_gpus()
def test_ranks_may_route_and_skip_as_they_like(rank, world, transport, experts, inner):
    def loss(model, step, rank):
        return routed_loss(model, step, rank, skip_experts=(0, 1) if rank == 1 and step == 2 else ())

    prepare = functools.partial(with_units, transport, inner=inner)
    train_beside(rank, world, prepare, make=lambda: MixtureModel(experts).cuda(), loss=loss, steps=5, tolerance=1e-4)
    torch.cuda.synchronize()
