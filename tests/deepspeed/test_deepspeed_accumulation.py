"""What engines gather: microbatches of a step share it, and under torch_autocast it is two bytes an element."""

import pytest
import torch
from torch import nn

import zcompile
from tests.support.deepspeed import assert_taken_over, make_engine, train
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


@pytest.mark.parametrize("first", [0, 1])
@on_ranks(2, needs="deepspeed.runtime.torch_autocast")  # since 0.17.1
def test_autocast_gathers_exactly_two_bytes_a_use(rank, world, first):
    """From the first step, or from the one behind it where `engine.compile()` is not called.
    A linear layer's weight is used in forward and in backward, its bias in forward.
    """
    engine = make_engine({}, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    engine.compile() if first == 0 else train(engine, rank, end=first)
    uses = {"weight": 2, "bias": 1}
    linears = [name for name, module in engine.module.named_modules() if isinstance(module, nn.Linear)]
    sizes = {name: parameter.ds_numel for name, parameter in engine.module.named_parameters()}
    used = sum(
        sizes[f"{name}.{kind}"] * count for name in linears for kind, count in uses.items() if f"{name}.{kind}" in sizes
    )
    before = None
    for step in range(first, 8):
        zcompile.reset_stats(engine.module)
        train(engine, rank, begin=step, end=step + 1)
        gathered = zcompile.stats(engine.module)["gathered_bytes"]
        assert gathered["bfloat16"] == 2 * used * MICROBATCHES, step
        assert step <= 1 or gathered == before
        before = gathered
    assert_taken_over(engine)
    engine.destroy()
