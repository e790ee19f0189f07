"""The profiler's engines train as one rank does; engines that fail, and a profiler that is stopped."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import zcompile
from tests.support.commands import SHORT, results_in
from tests.support.models import Transformer, batch, loss_of
from tests.support.ranks import slow, slow_case
from tests.support.reference import finish_step
from tests.support.time_limits import scaled
from zcompile.cli import main
from zcompile.explanation.workloads import WithLoss
from zcompile.profile.engine import RATE_STEPS, Training
from zcompile.profile.engines import find

FAST = ("simplefsdp", "eager+units:offload=moments", "fsdp2:offload=all:gradient_sync=last")
SLOW = ("zcompile+blocks", "eager+compile", "fsdp2+tuned", "ddp", "eager")
CASES = [("compiled", 1), *((name, 2) for name in FAST), *(slow_case(name, 2) for name in SLOW)]


def model_for(engine):
    """Its scale is a scalar, which FSDP2 does not take."""
    model = Transformer()
    if engine.startswith("fsdp2"):
        model.scale = nn.Parameter(torch.ones(1))
    return WithLoss(model, loss_of)


def rank_losses(rank, world, engine, stance="force_eager"):
    """Losses of four steps of `engine`, those of the model on one rank with all ranks' batches, and its settings."""
    torch.manual_seed(0)
    with torch.compiler.set_stance(stance):
        entry, options = find(engine)
        trained = entry.make(model_for(engine), Training("fp32", 1e-2, 1), options)
        ours = [trained.step([batch(2 * step + i, rank) for i in range(2)]) for step in range(4)]
    torch.manual_seed(0)
    model = model_for(engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    expected = []
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 1e-2 * (step + 1) / RATE_STEPS
        losses = torch.stack([model(batch(2 * step + i, other)) for other in range(world) for i in range(2)])
        finish_step(optimizer, losses.mean())
        expected.append(losses[2 * rank :][:2].detach().mean())
    return [[loss.item() for loss in losses] for losses in (ours, expected)] + [trained.settings]


@pytest.mark.parametrize("engine, world", CASES)
def test_engines_train_as_one_rank_does(ranks, engine, world):
    for losses, expected, _ in ranks(world).run(rank_losses, engine):
        assert losses == pytest.approx(expected, rel=1e-5) and losses[0] != pytest.approx(losses[-1], rel=1e-3)


@slow
@pytest.mark.parametrize("engine, setting", [("fsdp2+tuned", "2 b"), ("simplefsdp+tuned", "enable_overlap_scheduling")])
def test_compiled_engines_have_their_settings_and_train_as_one_rank_does(ranks, engine, setting):
    for losses, expected, settings in ranks(2).run(rank_losses, engine, "default"):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert any(each.startswith(setting) for each in settings)


def test_one_rank_is_all_that_the_compiled_engine_takes(ranks):
    with pytest.raises(Exception, match="trains one rank on its own: take --ranks 1"):
        ranks(2).run(rank_losses, "compiled")


@slow
def test_the_example_profiles_a_model_of_ones_own(tmp_path):
    example = Path(__file__).resolve().parents[2] / "examples/profile_own_model.py"
    command = [sys.executable, example, *SHORT, "--engines", "eager", "--output", tmp_path]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    losses = results_in(tmp_path)["engines"]["eager"]["losses"]
    assert len(losses) == 5 and all(2.0 < loss < 4.0 for loss in losses)  # ten classes: log(10) and noise


FAILING = """
import json, os, signal, sys, time
import torch
from torch import nn

def build():
    engine, rank = json.load(open(sys.argv[1]))["engine"], int(os.environ["RANK"])  # the first is of a worker's job
    def batch(step, rank):
        return torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
    def loss(model, batch):
        if engine == "fsdp2" and rank == 1:
            raise ValueError("the second rank does not like this batch\\nat all")
        if engine == "ddp" and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if engine == "limit":
            time.sleep(1000)
        return model(batch).square().mean()
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), batch, loss
"""


def write_model(folder, more=""):
    """The argument that names a model of which engines fail, and which goes on with `more`."""
    (folder / "neighbour.py").write_text(FAILING + more)
    (folder / "mine.py").write_text("from neighbour import build")
    return ["--module", f"{folder}/mine.py:build"]


def wait_for(condition, seconds=60):
    """The profiler counts operations, in a process of its own, before it starts ranks."""
    deadline = time.monotonic() + scaled(seconds)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("by", [signal.SIGTERM, slow_case(signal.SIGKILL)])
def test_no_rank_outlives_the_profiler(tmp_path, by):
    arguments = [*SHORT, *write_model(tmp_path), "--engines", "limit", "--output", str(tmp_path)]
    profiler = subprocess.Popen([sys.executable, "-m", "zcompile", "profile", *arguments], stdout=subprocess.DEVNULL)

    def ranks():
        others = (each for each in psutil.process_iter(["cmdline"]) if each.pid != profiler.pid)
        return [each for each in others if str(tmp_path) in " ".join(each.info["cmdline"] or [])]

    wait_for(lambda: len(ranks()) == 2)
    profiler.send_signal(by)
    assert profiler.wait(scaled(20)) == (-signal.SIGKILL if by == signal.SIGKILL else 128 + by)
    if by == signal.SIGTERM:  # as a time limit sends it, after which what was measured is still there
        assert results_in(tmp_path)["engines"] == {"limit": {"failed": "interrupted"}}
    wait_for(lambda: not ranks())


@slow
def test_engines_that_raise_or_are_killed_or_take_too_long_leave_the_others(tmp_path, capsys):
    arguments = ["--engines", "fsdp2,ddp,limit,eager", "--timeout", "40", "--output", str(tmp_path)]
    assert main(["profile", *SHORT, *write_model(tmp_path), *arguments]) == 0
    engines = results_in(tmp_path)["engines"]
    assert engines["fsdp2"]["failed"] == "ValueError: the second rank does not like this batch"
    assert "SIGKILL" in engines["ddp"]["failed"] and "no result within 40 s" in engines["limit"]["failed"]
    assert len(engines["eager"]["losses"]) == 5
    printed = capsys.readouterr().out
    assert "the second rank does not like this batch" in printed and "eager" in printed


NO_PLAN = """
import zcompile
explain = zcompile.explain
def fails(*args, **kwargs):
    if os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("no room for a plan")
    return explain(*args, **kwargs)
zcompile.explain = fails
"""


@slow
def test_a_plan_that_fails_on_one_rank_takes_nothing_with_it(tmp_path, monkeypatch):
    """The other rank is in the forward by then, and waits."""
    monkeypatch.setattr(zcompile, "explain", zcompile.explain)  # the profiler imports the model here, too
    engine = 'zcompile:inner=aot_eager:skip_passes=["bucket"]'
    arguments = ["--engines", engine, "--output", str(tmp_path)]
    assert main(["profile", *SHORT, *write_model(tmp_path, NO_PLAN), *arguments]) == 0
    measured = results_in(tmp_path)["engines"][engine]
    assert measured["plan"] is None and measured["wire_bytes"] and len(measured["losses"]) == 5
    assert measured["missing"] == ["plan (OutOfMemoryError: no room for a plan)"]
    assert "has no plan (OutOfMemoryError" in (tmp_path / "report.html").read_text()
