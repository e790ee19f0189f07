"""A script of a user of Trainer, changed by one line, under torchrun."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import run_clm
from tests.support.huggingface import LOSSES, tiny_llama, tokenizer
from tests.support.time_limits import scaled

LINE = "from zcompile.huggingface import Trainer\n"


def run(script: Path, folder: Path, output: str, *others: str) -> dict:
    """The results of `script` on two ranks."""
    arguments = {
        "model_name_or_path": folder / "model", "train_file": folder / "train.txt", "block_size": 16,
        "validation_file": folder / "validation.txt", "output_dir": folder / output, "max_steps": 5,
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 1e-2, "use_cpu": True,
        "gradient_accumulation_steps": 2, "logging_steps": 1, "save_steps": 3, "report_to": "none",
    }  # fmt: skip
    flags = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    done = subprocess.run([*map(str, launch), *flags, *others], capture_output=True, text=True, timeout=scaled(600))
    assert done.returncode == 0, "\n".join(
        line for line in done.stderr.splitlines() if "default0" in line or "Error" in line
    )
    state = json.loads((folder / output / "trainer_state.json").read_text())
    losses = [each["loss"] for each in state["log_history"] if "loss" in each]
    return json.loads((folder / output / "all_results.json").read_text()) | {"losses": losses}


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--torch_compile_backend", "zcompile")])
def test_one_line_makes_a_script_train_sharded_and_one_flag_compiled(tmp_path, monkeypatch, flags):
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    tiny_llama().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    lines = [" ".join(f"w{(i * i + 3 * k) % 59}" for k in range(5 + i % 20)) for i in range(120)]
    (tmp_path / "train.txt").write_text("\n".join(lines[:100]))
    (tmp_path / "validation.txt").write_text("\n".join(lines[100:]))

    theirs, ours = tmp_path / "run_clm.py", tmp_path / "run_sharded.py"
    theirs.write_text(Path(run_clm.__file__).read_text())
    before, mark, behind = theirs.read_text().partition("\n\n\n@dataclass")
    ours.write_text(before + "\n" + LINE.rstrip() + mark + behind)
    assert len(ours.read_text().splitlines()) == len(theirs.read_text().splitlines()) + 1

    under_ddp, sharded = run(theirs, tmp_path, "theirs"), run(ours, tmp_path, "ours", *flags)
    assert len(sharded["losses"]) == 5 and sharded["losses"] == pytest.approx(under_ddp["losses"], abs=LOSSES)
    assert sharded["eval_loss"] == pytest.approx(under_ddp["eval_loss"], abs=LOSSES)
    assert any((tmp_path / "cache").rglob("*.py")) == bool(flags)
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    resume = ("--resume_from_checkpoint", str(tmp_path / "ours/checkpoint-3"))
    resumed = run(ours, tmp_path, "ours", *flags, *resume)
    assert resumed["eval_loss"] == pytest.approx(under_ddp["eval_loss"], abs=LOSSES)
