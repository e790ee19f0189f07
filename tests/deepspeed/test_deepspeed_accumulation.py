"""Microbatches of a step: what they share, and who says which of them is the last."""

import pytest
import torch

import zcompile
from tests.support.deepspeed import assert_taken_over, beside_eager, make_engine, train
from tests.support.deepspeed_config import MICROBATCHES
from tests.support.models import batch
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.slow


@on_ranks(2)
def test_microbatches_share_gathers(rank, world):
    expected, gathered = train(make_engine(None), rank, end=8), {}
    for microbatch_cache_bytes in (0, 1 << 20):
        engine = make_engine({"microbatch_cache_bytes": microbatch_cache_bytes, "bucket_bytes": 500})
        assert train(engine, rank, end=8) == expected
        assert_taken_over(engine)
        gathered[microbatch_cache_bytes] = zcompile.stats(engine.module)["gathered_bytes"]["float32"]
        with torch.no_grad():
            # The module sees the step, although no forward of the engine came between.
            alone = engine.module(batch(0, rank))
            assert torch.equal(engine(batch(0, rank)), alone)
        engine.destroy()
    assert gathered[1 << 20] < 0.6 * gathered[0], gathered


@on_ranks(2)
def test_boundaries_set_by_hand_equal_eager(rank, world):
    """As accelerate does it: the program says which microbatch is the last, and calls `step` after that one alone."""

    def drive(engine):
        curve = []
        for microbatch in range(8):
            engine.set_gradient_accumulation_boundary(microbatch % MICROBATCHES == MICROBATCHES - 1)
            with torch.no_grad():
                engine.eval()
                engine(batch(50, rank))
                engine.train()
            loss = engine(batch(microbatch, rank))
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                engine.step()
            curve.append(loss.item())
        return curve

    expected, curve = beside_eager(drive, flag={"microbatch_cache_bytes": 1 << 20, "bucket_bytes": 500})
    assert curve == expected
