"""The programs in examples/ as a user starts them."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHORT = ["--steps", "3", "--log-every", "1", "--tokens", "32", "--dim", "32", "--layers", "1", "--heads", "2"]


ZCOMPILE = ["--engine", "zcompile", "--inner", "aot_eager", "--batch", "4", "--checkpoint-every", "3"]
FSDP2 = ["--engine", "fsdp2", "--batch", "4", "--corpus-mb", "0.2"]


@pytest.mark.parametrize(
    "program, arguments, written",
    [
        ("train.py", ZCOMPILE, "zcompile"),
        pytest.param("train.py", FSDP2, "fsdp2", marks=pytest.mark.matrix),
        ("deepspeed_train.py", ["--engine", "eager"], "deepspeed-eager"),
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
    losses = [record["loss"] for record in json.loads((tmp_path / f"{written}.json").read_text())["records"]]
    assert len(losses) == 3 and all(4.5 < loss < 7.0 for loss in losses)  # log(256) and a little
    assert (tmp_path / "loss.png").stat().st_size > 0
    assert ("--checkpoint-every" in arguments) == (tmp_path / "zcompile-step-3").is_dir()
