"""Engines that fail, and a profiler that is stopped: what is left, and who is gone."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

import zcompile
from tests.support.commands import SHORT, results_in
from tests.support.time_limits import scaled
from zcompile.cli import main

FAILING = """
import json, os, signal, sys, time
import torch
from torch import nn

def build():
    engine = json.load(open(sys.argv[1]))["engine"]  # where a worker's job is
    rank = int(os.environ["RANK"])
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
    (folder / "mine.py").write_text(FAILING + more)
    return ["--module", f"{folder}/mine.py:build"]


def wait_for(condition, seconds=60):
    """The profiler counts operations, in a process of its own, before it starts ranks."""
    deadline = time.monotonic() + scaled(seconds)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("by", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_no_rank_outlives_the_profiler(tmp_path, by):
    arguments = [*SHORT, *write_model(tmp_path), "--engines", "limit", "--output", str(tmp_path)]
    profiler = subprocess.Popen([sys.executable, "-m", "zcompile", "profile", *arguments], stdout=subprocess.DEVNULL)

    def ranks():
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if str(tmp_path) in " ".join(process.info["cmdline"] or []) and process.pid != profiler.pid
        ]

    wait_for(lambda: len(ranks()) == 2)
    profiler.send_signal(by)
    assert profiler.wait(scaled(20)) == (-signal.SIGKILL if by == signal.SIGKILL else 128 + by)
    if by == signal.SIGTERM:  # as a time limit sends it, after which what was measured is still there
        assert results_in(tmp_path)["engines"] == {"limit": {"failed": "interrupted"}}
    wait_for(lambda: not ranks())


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_plan_that_fails_on_one_rank_takes_nothing_with_it(tmp_path, monkeypatch):
    """The other rank is in the forward by then, and waits."""
    monkeypatch.setattr(zcompile, "explain", zcompile.explain)  # the profiler imports the model here, too
    engine = 'zcompile:inner=aot_eager:skip_passes=["bucket"]'
    arguments = ["--engines", engine, "--output", str(tmp_path)]
    assert main(["profile", *SHORT, *write_model(tmp_path, NO_PLAN), *arguments]) == 0
    measured = results_in(tmp_path)["engines"][engine]
    assert measured["plan"] is None and measured["wire_bytes"] and len(measured["losses"]) == 5
    assert measured["missing"] == ["plan (OutOfMemoryError: no room for a plan)"]
    assert "there is no plan (OutOfMemoryError" in (tmp_path / "report.html").read_text()
