"""The programs in examples/ as a user starts them."""

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHORT = ["--steps", "3", "--log-every", "1", "--tokens", "32", "--dim", "32", "--layers", "1", "--heads", "2"]


ZCOMPILE = ["--engine", "zcompile", "--inner", "aot_eager", "--batch", "4", "--checkpoint-every", "3"]
FSDP2 = ["--engine", "fsdp2", "--batch", "4", "--corpus-mb", "0.2"]
MOE = ["--batch", "4", "--corpus-mb", "0.2", "--layers", "2", "--hidden", "16", "--routed", "8", "--inner", "aot_eager"]


@pytest.mark.parametrize(
    "program, arguments, written",
    [
        ("train.py", ZCOMPILE, "zcompile"),
        pytest.param("train.py", FSDP2, "fsdp2", marks=pytest.mark.slow),
        pytest.param("train.py", [*ZCOMPILE, "--tp", "2"], "zcompile", marks=pytest.mark.slow),
        pytest.param("moe.py", [*MOE, "--ep", "2"], "moe-zcompile-grouped-ep2", marks=pytest.mark.slow),
        ("deepspeed_train.py", ["--engine", "eager"], "deepspeed-eager"),
        ("moe.py", MOE, "moe-zcompile-grouped"),
        pytest.param("moe.py", [*MOE, "--experts", "looped"], "moe-zcompile-looped", marks=pytest.mark.slow),
        pytest.param("moe.py", [*MOE, "--engine", "eager"], "moe-eager-grouped", marks=pytest.mark.slow),
        pytest.param("moe.py", [*MOE, "--engine", "fsdp2"], "moe-fsdp2-grouped", marks=pytest.mark.slow),
    ],
)
def test_an_example_trains_and_writes_its_results(tmp_path, monkeypatch, program, arguments, written):
    if program.startswith("deepspeed"):
        if not importlib.util.find_spec("deepspeed"):
            pytest.skip("needs deepspeed")
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*ranks, EXAMPLES / program, *SHORT, *arguments, "--out", tmp_path], capture_output=True, text=True, timeout=150
    )
    assert run.returncode == 0, run.stderr[-4000:]
    records = json.loads((tmp_path / f"{written}.json").read_text())["records"]
    losses = [record["loss"] for record in records]
    assert len(losses) == 3 and all(4.5 < loss < 7.0 for loss in losses)  # log(256) and a little
    assert (tmp_path / "loss.png").stat().st_size > 0
    if program == "moe.py":
        assert (tmp_path / "load.png").stat().st_size > 0
        for record in records:
            (load,) = record["load"]  # of the one layer with experts, as multiples of an even load
            assert len(load) == 8 and sum(load) == pytest.approx(8, abs=0.01)
    assert ("--checkpoint-every" in arguments) == (tmp_path / "zcompile-step-3").is_dir()


TINY = ["--max_steps", "2", "--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "64"]


@pytest.mark.parametrize(
    "program, written",
    [("trainer.py", "held-out text"), pytest.param("sft.py", "never seen", marks=pytest.mark.slow)],
)
def test_an_example_of_hugging_face_trains_and_saves(tmp_path, monkeypatch, program, written):
    for name in ("datasets", "trl") if program == "sft.py" else ("accelerate",):
        if not importlib.util.find_spec(name):
            pytest.skip(f"needs {name}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = [*TINY, "--use_cpu", "True", "--bf16", "False", "--report_to", "none", "--output_dir", tmp_path]
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run([*ranks, EXAMPLES / program, *arguments], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    assert written in run.stdout
    for name in ("model.safetensors", "checkpoint-2/optimizer_0", "checkpoint-2/model.safetensors"):
        assert (tmp_path / name).exists(), name


@pytest.fixture
def moe(monkeypatch):
    """examples/moe.py as a module."""
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
