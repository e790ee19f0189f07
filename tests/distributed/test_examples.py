"""The programs in examples/ as a user starts them."""

import argparse
import importlib
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import slow_case
from tests.support.time_limits import scaled
from zcompile.artifact.aot import lacking
from zcompile.cli import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHORT = ["--steps", "3", "--log-every", "1", "--tokens", "32", "--dim", "32", "--layers", "1", "--heads", "2"]

ZCOMPILE = ["--engine", "zcompile", "--inner", "aot_eager", "--batch", "4", "--checkpoint-every", "3"]
CORPUS = ["--corpus-mb", "0.2"]
MOE = ["--batch", "4", "--layers", "2", "--hidden", "16", "--routed", "8", "--inner", "aot_eager", *CORPUS]


def rank_runs(rank, world, program, arguments):
    """The program on the session's ranks, which have their process group already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [program, *arguments])
        patch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(dist, "init_process_group", lambda backend: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        runpy.run_path(str(EXAMPLES / program), run_name="__main__")


def check_results(folder, program, arguments, written):
    records = json.loads((folder / f"{written}.json").read_text())["records"]
    losses = [record["loss"] for record in records]
    assert len(losses) == 3 and all(4.5 < loss < 7.0 for loss in losses)  # log(256) and a little
    assert (folder / "loss.png").stat().st_size > 0
    if program == "moe.py":
        assert (folder / "load.png").stat().st_size > 0
        for record in records:
            (load,) = record["load"]  # of the one layer with experts, as multiples of an even load
            assert len(load) == 8 and sum(load) == pytest.approx(8, abs=0.01)
    assert ("--checkpoint-every" in arguments) == (folder / "zcompile-step-3").is_dir()


@pytest.mark.parametrize(
    "program, arguments, written",
    [
        ("train.py", [*ZCOMPILE, *CORPUS], "zcompile"),
        ("moe.py", MOE, "moe-zcompile-grouped"),
        slow_case("train.py", [*ZCOMPILE, *CORPUS, "--pp", "2", "--layers", "2"], "zcompile"),
        slow_case("train.py", ["--engine", "fsdp2", "--batch", "4", *CORPUS], "fsdp2"),
        slow_case("train.py", [*ZCOMPILE, *CORPUS, "--tp", "2"], "zcompile"),
        slow_case("moe.py", [*MOE, "--ep", "2"], "moe-zcompile-grouped-ep2"),
        slow_case("moe.py", [*MOE, "--experts", "looped"], "moe-zcompile-looped"),
        slow_case("moe.py", [*MOE, "--engine", "eager"], "moe-eager-grouped"),
        slow_case("moe.py", [*MOE, "--engine", "fsdp2"], "moe-fsdp2-grouped"),
    ],
)
def test_an_example_trains_and_writes_its_results(ranks, tmp_path, program, arguments, written):
    """The first imports matplotlib, which makes a list of the fonts."""
    ranks(2).run(rank_runs, program, [*SHORT, *arguments, "--out", str(tmp_path)])
    check_results(tmp_path, program, arguments, written)


def test_the_tour_trains_as_unsharded(ranks):
    ranks(2).run(rank_runs, "../docs/tour.py", [])  # it compares losses, parameters, memory and counts itself


def run_example(program, *arguments):
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    command = [*ranks, EXAMPLES / program, *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=scaled(300))
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "program, arguments, written",
    [("train.py", ZCOMPILE, "zcompile"), ("deepspeed_train.py", ["--engine", "eager"], "deepspeed-eager")],
)
def test_an_example_runs_under_torchrun(tmp_path, program, arguments, written):
    if program.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    run_example(program, *SHORT, *arguments, "--out", tmp_path)
    check_results(tmp_path, program, arguments, written)


@pytest.mark.slow
@pytest.mark.skipif(bool(lacking()), reason=lacking())
def test_an_example_trains_from_a_file_and_compiles_nothing(tmp_path):
    build, out = f"{EXAMPLES / 'precompiled.py'}:build", str(tmp_path / "a.zc")
    assert main(["precompile", "--module", build, "--mesh", "dp=2", "--device", "cpu", "--out", out]) == 0
    how, losses = run_example("precompiled.py", out).splitlines()
    assert "loaded from" in how and "0 graphs compiled" in how and losses.startswith("losses 2.15 2.04 ")


@pytest.mark.slow
def test_two_jobs_that_share_a_home_may_start_together(tmp_path, monkeypatch):
    """They compile at once, into one empty cache."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    with ThreadPoolExecutor() as threads:
        first, second = threads.map(run_example, ["minimal.py"] * 2)
    assert first == second and first.count("loss") == 10


TINY = ["--max_steps", "2", "--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "64"]


@pytest.mark.slow
@pytest.mark.parametrize("program, written", [("trainer.py", "held-out text"), ("sft.py", "never seen")])
def test_an_example_of_hugging_face_trains_and_saves(tmp_path, program, written):
    for name in ("datasets", "trl") if program == "sft.py" else ("accelerate",):
        if not importlib.util.find_spec(name):
            pytest.skip(f"needs {name}")
    arguments = [*TINY, "--use_cpu", "True", "--bf16", "False", "--report_to", "none", "--output_dir", tmp_path]
    assert written in run_example(program, *arguments)
    for name in ("model.safetensors", "checkpoint-2/optimizer_0", "checkpoint-2/model.safetensors"):
        assert (tmp_path / name).exists(), name


def test_no_example_has_the_name_of_a_python_module():
    """Python puts the folder of a program first on its path, so torch would import the example instead."""
    assert {path.stem for path in EXAMPLES.glob("*.py")}.isdisjoint(sys.stdlib_module_names)


@pytest.fixture
def moe(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(EXAMPLES)])
    return importlib.import_module("moe")


def test_grouped_and_looped_experts_begin_alike_and_compute_the_same(moe):
    """Loss, gradients and loads, unsharded, of a batch that leaves some experts without a token."""
    sizes = {"dim": 32, "layers": 2, "heads": 2, "tokens": 4, "hidden": 16, "routed": 16, "active": 2}
    losses, gradients, loads = {}, {}, {}
    for kind in ("grouped", "looped"):
        torch.manual_seed(0)
        model = moe.Mixture(argparse.Namespace(experts=kind, dense_layers=1, seed=0, **sizes))
        inputs = torch.arange(8).view(2, 4)
        losses[kind] = model(inputs, inputs + 1)
        losses[kind].backward()
        mixture = model.blocks[1].mlp
        found = {name: parameter.grad for name, parameter in model.named_parameters() if ".experts." not in name}
        if kind == "grouped":
            weights = (mixture.experts.gate, mixture.experts.up, mixture.experts.down)
            routed = [matrix for expert in zip(*(weight.grad for weight in weights)) for matrix in expert]
        else:
            made = mixture.experts.matrices()
            routed = [torch.zeros_like(matrix) if matrix.grad is None else matrix.grad for matrix in made]
        gradients[kind] = found | {f"expert matrix {i}": gradient for i, gradient in enumerate(routed)}
        loads[kind] = mixture.router.load.tolist()
    assert loads["grouped"] == loads["looped"] and sum(loads["looped"]) == 2 * 8 and 0 in loads["looped"]
    torch.testing.assert_close(losses["grouped"], losses["looped"])
    torch.testing.assert_close(gradients["grouped"], gradients["looped"])
