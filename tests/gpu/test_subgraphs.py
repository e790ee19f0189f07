"""Flex attention, which torch trains on GPUs alone."""

import functools

import pytest
from torch import nn

from tests.distributed.test_subgraphs import Attention, loss_of
from tests.support.gpu import sharded_over
from tests.support.ranks import on_gpus
from tests.support.reference import train_beside


def make():
    return nn.Sequential(*(Attention() for _ in range(2))).cuda()


@pytest.mark.parametrize("transport", ["c10d", "p2p"])
@on_gpus(2)
def test_flex_attention_trains_as_unsharded(rank, world, transport):
    """Under Inductor: torch's own aot_eager has no gradient of what a score function reads, unless it is an input."""
    prepare = functools.partial(sharded_over, transport, inner="inductor")
    train_beside(rank, world, prepare, make=make, loss=loss_of, tolerance=1e-3)  # products in TF32
