"""Engines that zcompile gives back to eager ZeRO-3, that it never takes, that step on nothing that ranks mixed up."""

import pytest
import torch
from torch import nn

from tests.support.blocks import OneOfTwo
from tests.support.deepspeed import LanguageModel, assert_taken_over, deepspeed, is_taken_over, make_engine, train
from tests.support.deepspeed_config import MICROBATCHES, config_of
from tests.support.models import batch
from tests.support.reference import same_values
from zcompile.ranks import order_watch

pytestmark = pytest.mark.slow

STAGES = ("take over", "hooks", "compile", "forward", "norm", "step")


@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_gives_the_engine_back(rank, world, stage):
    expected_engine = make_engine(None)
    expected = train(expected_engine, rank, end=4)
    expected_engine.destroy()
    engine = make_engine({})
    takeover = engine.zcompile

    def fail(*args, **kwargs):
        raise RuntimeError("injected")

    patched = {"take over": "add", "compile": "compile_modules", "forward": "compiled_forward"}
    curve = []
    if stage == "hooks":
        takeover.hooks.remove = fail
    elif stage in patched:
        setattr(takeover, patched[stage], fail)
    else:
        curve = train(engine, rank, end=2)
        setattr(takeover.lean_step, {"norm": "square", "step": "cut"}[stage], fail)
    curve += train(engine, rank, begin=len(curve) // MICROBATCHES, end=4)
    assert not is_taken_over(engine) and "injected" in takeover.given_back
    assert curve == expected, (curve, expected)
    assert len(engine.optimizer._grad_acc_hooks) > 0 and len(engine.optimizer.parameter_offload.forward_hooks) > 0
    assert type(engine.module.blocks[0].up) is nn.Linear and engine.tput_timer.config.synchronized
    persistent = engine.optimizer.persistent_parameters
    assert persistent and all(parameter.ds_persist for parameter in persistent)
    engine.destroy()


@pytest.mark.skipif(not hasattr(deepspeed.DeepSpeedEngine, "coalesce_grad_reduction"), reason="this DeepSpeed has none")
def test_coalesced_reduction_is_refused(rank, world):
    engine = make_engine({})
    with pytest.raises(RuntimeError, match="coalesce_grad_reduction"), engine.coalesce_grad_reduction():
        engine.backward(engine(batch(0, rank)))
    engine.destroy()


def test_an_engine_without_optimizer_stays_eager(rank, world):
    losses = []
    for flag in (None, {}):
        config = config_of(flag)
        del config["optimizer"]
        torch.manual_seed(0)
        engine = deepspeed.initialize(model=LanguageModel(), config=config)[0]
        with torch.no_grad():
            losses.append(engine(batch(0, rank)).item())
    assert losses[0] == losses[1] and "no optimizer" in engine.zcompile.given_back


@pytest.mark.parametrize("late, hooked", [(False, (0, 1)), (False, (1,)), (True, (0, 1))])
def test_a_hook_on_a_parameter_gives_the_engine_back(rank, world, late, hooked):
    """A hook, on the ranks `hooked`, sees the values that it sees in eager ZeRO-3, and losses are those of eager."""
    seen = []
    for flag in (None, {}):
        engine = make_engine(flag)
        grads: list = []
        curve = train(engine, rank, end=1) if late else []
        parameter = engine.module.head.weight
        if rank in hooked:
            parameter.register_hook(lambda grad, grads=grads: grads.append(grad.detach().float().norm().item()))
        curve += train(engine, rank, begin=len(curve) // MICROBATCHES, end=3)
        seen.append((curve, grads))
        if flag is not None:
            assert not is_taken_over(engine) and "parameter 'embed.weight' has hooks" in engine.zcompile.given_back
            assert late or f"rank {hooked[0]} cannot" in engine.zcompile.given_back
        engine.destroy()
    assert (len(seen[0][1]) > 0) is (rank in hooked) and len(seen[0][1]) == len(seen[1][1])
    (curve, grads), (our_curve, our_grads) = seen
    assert our_grads == pytest.approx(grads, rel=1e-5)
    for theirs, ours in zip(curve, our_curve, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


class Experts(OneOfTwo):
    def forward(self, x, second):
        return super().forward(x, second).square().sum()


def train_step(engine, second):
    for _ in range(MICROBATCHES):
        engine.backward(engine(torch.ones(2, 6), second))
        engine.step()


def rank_mixes_up(rank, world):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(order_watch, "PERIOD_S", 1000.0)  # the check before a step is to find it
        engine = make_engine({}, Experts(), zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
        for second in (False, True, False):
            train_step(engine, second)
    assert_taken_over(engine)
    assert engine.global_steps == 3
    partitions = engine.optimizer.fp16_partitioned_groups_flat + engine.optimizer.fp32_partitioned_groups_flat
    before = [partition.clone() for partition in partitions]
    with pytest.raises(RuntimeError, match=r"ranks started different gathers.* gather '[ab].weight' on rank 0 and"):
        train_step(engine, rank == 1)
    assert is_taken_over(engine) and engine.global_steps == 3
    same_values(partitions, before)
    engine.destroy()


def test_no_step_on_what_ranks_mixed_up(ranks):
    ranks(2).run(rank_mixes_up)
    ranks(2).stop()  # the order of engines of other tests would stay wrong
