"""The profiler's engines train as they should, and a model of one's own is profiled like the built-in ones."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.commands import SHORT, results_in
from tests.support.models import Transformer, batch, loss_of
from zcompile.explanation.workloads import WithLoss
from zcompile.profile.engine import RATE_STEPS, Training
from zcompile.profile.engines import find

slow = pytest.mark.slow
SLOW = ("zcompile+blocks", "eager+compile", "fsdp2+tuned", "ddp", "eager")


def model_for(engine):
    """Its scale is a scalar, which FSDP2 does not take."""
    model = Transformer()
    if engine.startswith("fsdp2"):
        model.scale = nn.Parameter(torch.ones(1))
    return WithLoss(model, loss_of)


def rank_losses(rank, world, engine, stance="force_eager"):
    """Losses of four steps of a model with tied weights and a scalar, compiled if torch.compile's `stance` lets it be.

    Returns those of `engine`, and those of the same model on one rank with the batches of all ranks.
    """
    torch.manual_seed(0)
    with torch.compiler.set_stance(stance):
        entry, options = find(engine)
        trained = entry.make(model_for(engine), Training("fp32", 1e-2, 1), options)
        ours = [trained.step([batch(step, rank)]) for step in range(4)]
    torch.manual_seed(0)
    model = model_for(engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    expected = []
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 1e-2 * (step + 1) / RATE_STEPS
        losses = [model(batch(step, other)) for other in range(world)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(losses[rank].detach())
    return [[loss.item() for loss in losses] for losses in (ours, expected)] + [trained.settings]


@pytest.mark.parametrize(
    "engine",
    [
        "simplefsdp",
        "eager+units:offload=moments",
        "fsdp2:offload=all",
        *(pytest.param(name, marks=slow) for name in SLOW),
    ],
)
def test_engines_train_as_one_rank_does(ranks, engine):
    for losses, expected, _ in ranks(2).run(rank_losses, engine):
        assert losses == pytest.approx(expected, rel=1e-5) and losses[0] != pytest.approx(losses[-1], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("engine, setting", [("fsdp2+tuned", "2 b"), ("simplefsdp+tuned", "enable_overlap_scheduling")])
def test_compiled_engines_have_their_settings_and_train_as_one_rank_does(ranks, engine, setting):
    for losses, expected, settings in ranks(2).run(rank_losses, engine, "default"):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert any(each.startswith(setting) for each in settings)


def test_a_compiled_model_on_one_rank_trains_as_uncompiled(ranks):
    ((losses, expected, _),) = ranks(1).run(rank_losses, "compiled")
    assert losses == pytest.approx(expected, rel=1e-5) and losses[0] != pytest.approx(losses[-1], rel=1e-3)


def test_one_rank_is_all_that_the_compiled_engine_takes(ranks):
    with pytest.raises(Exception, match="trains one rank on its own: take --ranks 1"):
        ranks(2).run(rank_losses, "compiled")


@pytest.mark.slow
def test_the_example_profiles_a_model_of_ones_own(tmp_path):
    example = Path(__file__).resolve().parents[2] / "examples/profile_own_model.py"
    run = subprocess.run(
        [sys.executable, example, *SHORT, "--engines", "eager", "--output", tmp_path], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    losses = results_in(tmp_path)["engines"]["eager"]["losses"]
    assert len(losses) == 5 and all(2.0 < loss < 4.0 for loss in losses)  # ten classes: log(10) and noise
