"""Flex attention, which torch trains on GPUs alone."""

import functools

import pytest
from torch import nn

from tests.distributed.test_subgraphs import Attention, loss_of
from tests.support.gpu import sharded_over
from tests.support.reference import train_beside


def make():
    return nn.Sequential(*(Attention() for _ in range(2))).cuda()


def rank_trains(rank, world, transport):
    prepare = functools.partial(sharded_over, transport, inner="inductor")
    train_beside(rank, world, prepare, make=make, loss=loss_of, tolerance=1e-3)  # products in TF32


@pytest.mark.parametrize("transport", ["c10d", "p2p"])
def test_flex_attention_trains_as_unsharded(gpus, transport):
    """Under Inductor: torch's own aot_eager has no gradient of what a score function reads, unless it is an input."""
    gpus(2).run(rank_trains, transport)
