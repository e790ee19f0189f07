"""Losses and gradient norms of engines with the flag, against eager ZeRO-3."""

import pytest
import torch
from torch import nn

from tests.support.deepspeed import (
    LanguageModel,
    beside_eager,
    deepspeed,
    is_taken_over,
    make_engine,
    rank_trains_beside_eager,
    stage3,
    train,
)
from tests.support.deepspeed_config import BF16, MICROBATCHES, config_of
from tests.support.models import VOCABULARY, batch
from tests.support.ranks import on_ranks


@pytest.mark.parametrize(
    "flag, tolerance",
    [
        pytest.param({}, 0, id="aot_eager"),
        pytest.param({"inner": "inductor"}, 1e-6, id="inductor", marks=pytest.mark.slow),
    ],
)
def test_fp32_equals_eager(ranks, flag, tolerance):
    """On two ranks. Of four, gloo's reduce-scatter sums in an order of its own."""
    ranks(2).run(rank_trains_beside_eager, flag, (tolerance, tolerance), {})


def reduce_scatter_in_rank_order(tensors, group=None):
    """Stands in for DeepSpeed's `reduce_scatter_coalesced`: this rank's part of each mean, summed from rank 0 on."""
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    parts = []
    for tensor in tensors:
        gathered = [torch.empty_like(tensor) for _ in range(world)]
        torch.distributed.all_gather(gathered, tensor.contiguous(), group=group)
        length = -(-tensor.numel() // world)
        mean = sum(gathered[1:], gathered[0]) / world
        parts.append(mean.flatten()[rank * length : (rank + 1) * length])
    return parts


@pytest.mark.slow
@on_ranks(4)
def test_four_ranks_equal_eager_bitwise_in_one_order(rank, world):
    """On four ranks, the order of a sum is the only difference."""
    theirs, stage3.reduce_scatter_coalesced = stage3.reduce_scatter_coalesced, reduce_scatter_in_rank_order
    try:
        rank_trains_beside_eager(rank, world, {}, (0, 0), {})
    finally:
        stage3.reduce_scatter_coalesced = theirs


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_bf16_is_close_to_eager(ranks, world):
    ranks(world).run(rank_trains_beside_eager, {}, (2e-3, 1e-2), BF16, 200)


class Checkpointed(LanguageModel):
    """Recomputes its blocks in backward."""

    def forward(self, tokens):
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x)) * self.scale * self.mix.sum()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make_sharded():
    with deepspeed.zero.Init(config_dict_or_path=config_of(None)):
        return LanguageModel()


HAS_LOSS_BACKWARD = hasattr(stage3.DeepSpeedZeroOptimizer_Stage3, "exit_backward")
NEEDS_LOSS_BACKWARD = pytest.mark.skipif(not HAS_LOSS_BACKWARD, reason="this DeepSpeed wants engine.backward()")


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["zero.Init", pytest.param("loss.backward", marks=NEEDS_LOSS_BACKWARD), "checkpointed", "fp16"]
)
@on_ranks(2)
def test_engines_made_and_used_otherwise_equal_eager(rank, world, how):
    # DeepSpeed wants AMX for fp16, torch does not.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True

    def drive(engine):
        curve = []
        for microbatch in range(8 * MICROBATCHES):
            loss = engine(batch(microbatch, rank))
            loss.backward() if how == "loss.backward" else engine.backward(loss)
            engine.step()
            curve.append(loss.item())
        if how == "fp16":
            curve.append(engine.optimizer.cur_scale)
            assert engine.optimizer.cur_scale < 2**40  # steps were skipped
        return curve

    config = {"fp16": {"enabled": True, "initial_scale_power": 40}} if how == "fp16" else {}
    make = {"zero.Init": make_sharded, "checkpointed": Checkpointed}.get(how, LanguageModel)
    expected, curve = beside_eager(drive, make, **config)
    assert curve == (pytest.approx(expected, rel=2e-3) if how == "fp16" else expected)


class Lora(nn.Module):
    """A frozen model with a trained low-rank addition to its head."""

    def __init__(self):
        super().__init__()
        self.base = LanguageModel().requires_grad_(False)
        self.a = nn.Linear(18, 3, bias=False)
        self.b = nn.Linear(3, 18, bias=False)

    def forward(self, tokens):
        hidden = self.base.embed(tokens[:, :-1])
        hidden = hidden + self.b(self.a(hidden))
        for block in self.base.blocks:
            hidden = block(hidden)
        logits = self.base.head(self.base.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class WithCodes(LanguageModel):
    """Has a frozen parameter of integers, as quantized models do."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.arange(VOCABULARY), requires_grad=False)

    def forward(self, tokens):
        return super().forward(self.codes[tokens])


@pytest.mark.slow
@pytest.mark.parametrize("make", [Lora, WithCodes])
@on_ranks(2)
def test_frozen_parameters_equal_eager(rank, world, make):
    expected, curve = beside_eager(lambda engine: train(engine, rank, end=6), make)
    assert curve == expected


@pytest.mark.slow
@on_ranks(2)
def test_several_engines_that_evaluate_and_edit_equal_eager(rank, world):
    """Two engines with the flag and one without take turns. Between steps they evaluate, and parameters are edited."""
    flags = [None, {}, {}]
    engines = [make_engine(flag) for flag in flags]
    curves = [[], [], []]
    for step in range(4):
        for flag, engine, curve in zip(flags, engines, curves, strict=True):
            curve += train(engine, rank, begin=step, end=step + 1)
            engine.eval()
            with torch.no_grad():
                curve.append(engine(batch(100, rank, 9)).item())
            engine.train()
            weight = engine.module.blocks[0].down.weight
            with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
                if rank == 0:
                    weight.data.mul_(0.9)
            # Eager ZeRO-3 copies its partitions from the main parameter, which is edited too.
            main = deepspeed.utils.safe_get_full_fp32_param(weight)
            deepspeed.utils.safe_set_full_fp32_param(weight, main if flag is not None else main * 0.9)
            engine.module.blocks[1].up.weight.requires_grad = step != 1  # by attribute
    assert is_taken_over(engines[1]) and is_taken_over(engines[2])
    assert curves[0] == curves[1] == curves[2]
    for engine in engines:
        engine.destroy()
