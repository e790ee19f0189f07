"""NCCL's own reduce-scatter, which `shard(native_reduce=True)` asks for."""

import pytest
import torch

from tests.support.gpu import rank_trains_as_over_nccl
from tests.support.reduce_checks import rank_native_sums
from tests.support.reference import autocast_loss, lm_loss


@pytest.mark.parametrize("world", [2, 4, 8])
def test_native_reduces_are_close_to_sums(gpus, world):
    gpus(world).run(rank_native_sums, "cuda")


@pytest.mark.parametrize("transport", ["c10d", "late c10d", "delayed c10d"])
@pytest.mark.parametrize("loss", [lm_loss, autocast_loss], ids=["fp32", "bf16"])
def test_native_reduces_of_two_ranks_in_fp32_are_exact(gpus, loss, transport):
    """Two numbers have one sum."""
    gpus(2).run(rank_trains_as_over_nccl, loss, transport, {"native_reduce": True, "reduce_dtype": torch.float32})
