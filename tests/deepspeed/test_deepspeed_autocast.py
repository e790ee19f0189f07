"""Bytes that engines gather under torch_autocast."""

import pytest
from torch import nn

import zcompile
from tests.support.deepspeed import is_taken_over, make_engine, train
from tests.support.deepspeed_config import MICROBATCHES

pytestmark = pytest.mark.slow


def rank_gathers_two_bytes(rank, world):
    engine = make_engine({}, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    train(engine, rank, end=1)
    before = {}
    for step in range(1, 8):
        zcompile.reset_stats(engine.module)
        train(engine, rank, begin=step, end=step + 1)
        gathered = zcompile.stats(engine.module)["gathered_bytes"]
        narrow = sum(parameter.ds_numel for name, parameter in engine.module.named_parameters() if narrows(name))
        assert gathered["bfloat16"] % (2 * MICROBATCHES) == 0
        assert gathered["bfloat16"] >= 2 * MICROBATCHES * narrow
        if step > 1:
            assert gathered == before
        before = gathered
    engine.destroy()


def narrows(name):
    return name.endswith("weight") and "norm" not in name and "embed" not in name


def test_autocast_gathers_two_bytes(ranks):
    pytest.importorskip("deepspeed.runtime.torch_autocast")  # since 0.17.1
    ranks(2).run(rank_gathers_two_bytes)


def rank_gathers_exactly_two_bytes(rank, world):
    """A linear layer's weight is used in forward and in backward, its bias in forward."""
    engine = make_engine({}, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    engine.compile()
    uses = {"weight": 2, "bias": 1}
    linears = [name for name, module in engine.module.named_modules() if isinstance(module, nn.Linear)]
    sizes = {name: parameter.ds_numel for name, parameter in engine.module.named_parameters()}
    used = sum(
        sizes[f"{name}.{kind}"] * count for name in linears for kind, count in uses.items() if f"{name}.{kind}" in sizes
    )
    for step in range(8):
        zcompile.reset_stats(engine.module)
        train(engine, rank, begin=step, end=step + 1)
        assert zcompile.stats(engine.module)["gathered_bytes"]["bfloat16"] == 2 * used * MICROBATCHES, step
    assert is_taken_over(engine), engine.zcompile.given_back
    engine.destroy()


def test_autocast_gathers_exactly_two_bytes_a_use_from_the_first_step(ranks):
    pytest.importorskip("deepspeed.runtime.torch_autocast")  # since 0.17.1
    ranks(2).run(rank_gathers_exactly_two_bytes)
