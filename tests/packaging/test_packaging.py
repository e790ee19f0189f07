"""An sdist and a wheel are complete, and `import torch` loads nothing of an installed zcompile."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from tests.support.time_limits import scaled

ROOT = Path(__file__).resolve().parents[2]


def setup(tmp_path: Path, *command: str) -> None:
    """Run `setup.py` of the checkout, which leaves nothing in it."""
    alone = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    run = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path), *command]
    done = subprocess.run(run, cwd=ROOT, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


STEP = """
import copy, os, sys
sys.path[:0] = {folders!r}
import torch, zcompile
from torch import distributed, nn

assert os.path.dirname(os.path.dirname(zcompile.__file__)) == {folders!r}[0], zcompile.__file__
distributed.init_process_group("gloo", store=distributed.FileStore("ranks", 2), rank=int(sys.argv[1]), world_size=2)

def train(model, run):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        losses.append(run(torch.ones(4, 8)).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]

torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
model = zcompile.shard(copy.deepcopy(plain))
compiled = torch.compile(model, backend="zcompile", options=dict(inner="aot_eager"))
losses, expected = train(model, compiled), train(plain, plain)
assert losses == expected and zcompile.stats(model)["gathers"] > 0, (losses, expected)
from zcompile import cli, profile
from zcompile.integrations import deepspeed
from zcompile import explanation as planning
print("trained")
"""


def train_from(folder: Path, elsewhere: Path) -> None:
    """Two ranks that know no other zcompile train three steps, in a folder that has nothing of the source."""
    code = STEP.format(folders=[str(folder), str(Path(torch.__file__).parents[1])])
    run = [sys.executable, "-ISc", code]
    pipes = {"cwd": elsewhere, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    for rank in [subprocess.Popen([*run, str(i)], **pipes) for i in range(2)]:
        out, err = rank.communicate(timeout=scaled(300))
        assert rank.returncode == 0 and out.endswith("trained\n"), err[-3000:]


def modules(folder: Path) -> set[str]:
    """Python files and type information below a folder, but caches."""
    paths = [path for pattern in ("*.py", "*.pyi", "*.j2", "py.typed") for path in folder.rglob(pattern)]
    return {path.relative_to(folder).as_posix() for path in paths}


def test_a_wheel_has_every_module_where_its_import_says(tmp_path):
    setup(tmp_path, "build_py", "--build-lib", str(tmp_path / "lib"))
    built = modules(tmp_path / "lib")
    assert built == {
        *(f"zcompile/{name}" for name in modules(ROOT / "zcompile") if not name.startswith("passes/")),
        *(f"zcompile/passes/{name}" for name in modules(ROOT / "passes")),
    }


@pytest.mark.slow
def test_a_wheel_made_of_the_sdist_trains_in_another_folder(tmp_path):
    """Compiles everything: two minutes on two cores."""
    setup(tmp_path, "sdist", "--dist-dir", str(tmp_path))
    (archive,) = tmp_path.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, archive]
    made = subprocess.run(build, env={**os.environ, "ZCOMPILE_CUDA": "0"}, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-3000:]
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "installed", wheel], check=True)
    (tmp_path / "elsewhere").mkdir()
    train_from(tmp_path / "installed", tmp_path / "elsewhere")


def test_an_sdist_has_all_that_a_build_takes(tmp_path):
    setup(tmp_path, "sdist", "--dist-dir", str(tmp_path))
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    starts = ("csrc/", "passes/", "tests/", "zcompile", "setup.py", "LICENSE")
    needed = [name for name in tracked if name.startswith(starts)]
    assert needed and not [name for name in needed if name not in names and name != "zcompile/passes"]


def test_make_install_keeps_the_torch_that_pip_knows(tmp_path):
    """The version of its package, which has no `+cu132`. pip finds nothing that the other would allow."""
    (line,) = (line for line in (ROOT / "Makefile").read_text().splitlines() if line.endswith("> $(CONSTRAINTS)"))
    code = line.split(" -c ")[1].split(" > ")[0].strip("'")
    (tmp_path / "torch.py").write_text('__version__ = "9.8.7+cu132"\n')
    package = tmp_path / "torch-9.8.7.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.8.7\n")
    here = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=here, check=True, capture_output=True, text=True)
    assert done.stdout == "torch==9.8.7\n"


PACKAGES = Path(torch.__file__).parents[1]
PROGRAM = """
import sys
sys.path[:0] = {folders!r}
import torch
print([name for name in sys.modules if name.startswith("zcompile")])
"""


def metadata(folder: Path) -> Path:
    """What an install says of itself, without the code: an editable install whose folder is gone."""
    folder.mkdir()
    setup(folder)
    assert (folder / "zcompile.egg-info" / "entry_points.txt").is_file()
    return folder


def import_torch(*folders: Path) -> str:
    """The modules of ours that `import torch` brings, with nothing on the path but `folders` and torch's own."""
    program = PROGRAM.format(folders=[*map(str, folders), str(PACKAGES)])
    done = subprocess.run([sys.executable, "-ISc", program], capture_output=True, text=True, timeout=scaled(120))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_torch_is_imported_where_the_folder_of_an_editable_install_is_gone(tmp_path):
    assert import_torch(metadata(tmp_path / "site")) == "[]"


def test_torch_imports_nothing_of_an_installed_zcompile(tmp_path):
    assert import_torch(metadata(tmp_path / "site"), ROOT) == "[]"
