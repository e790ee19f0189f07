"""Programs say in one line which of zcompile's extras they need, before they do anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import runpy, sys
sys.modules[{missing!r}] = None  # as if it were not installed
sys.argv = {arguments!r}
{run}
"""
RUN_MODULE = "runpy.run_module({!r}, run_name='__main__', alter_sys=True)"
RUN_FILE = "sys.path.insert(0, 'examples'); runpy.run_path({!r}, run_name='__main__')"
CASES = [
    pytest.param("psutil", RUN_MODULE.format("zcompile"), "zcompile profile", "profile", id="command"),
    pytest.param("tqdm", RUN_FILE.format("examples/train.py"), "examples/train.py", "train", id="train"),
    pytest.param(
        "matplotlib", RUN_FILE.format("examples/moe.py"), "examples/moe.py", "train", id="moe", marks=pytest.mark.slow
    ),
    pytest.param(
        "deepspeed", RUN_FILE.format("examples/deepspeed_train.py"), "examples/deepspeed_train.py", "deepspeed,train",
        id="deepspeed", marks=pytest.mark.slow,
    ),
    pytest.param(
        "jinja2", RUN_FILE.format("examples/profile_own_model.py"), "zcompile profile", "profile", id="profile",
        marks=pytest.mark.slow,
    ),
]  # fmt: skip


@pytest.mark.parametrize("missing, run, program, extra", CASES)
def test_a_missing_extra_is_one_line(missing, run, program, extra):
    arguments = ["zcompile", "profile"] if "'zcompile'" in run else [program]
    code = PROGRAM.format(missing=missing, arguments=arguments, run=run)
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().splitlines()[-1] == f"{program} needs {missing}: pip install 'zcompile[{extra}]'"
    assert "Traceback" not in done.stderr
