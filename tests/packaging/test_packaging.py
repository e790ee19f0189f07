"""What an sdist and a wheel contain. Nothing is compiled here; `make test` runs on an editable install."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def setup(tmp_path: Path, *command: str) -> None:
    """Run `setup.py` of the checkout, which leaves nothing in it."""
    alone = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    run = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path), *command]
    done = subprocess.run(run, cwd=ROOT, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def modules(folder: Path) -> set[str]:
    """Python files and type information below a folder, but caches."""
    paths = [path for pattern in ("*.py", "*.pyi", "*.j2", "py.typed") for path in folder.rglob(pattern)]
    return {path.relative_to(folder).as_posix() for path in paths}


def test_a_wheel_has_every_module_where_its_import_says(tmp_path):
    setup(tmp_path, "build_py", "--build-lib", str(tmp_path / "lib"))
    built = modules(tmp_path / "lib")
    assert built == {
        "zcompile_flag.py",
        *(f"zcompile/{name}" for name in modules(ROOT / "zcompile") if not name.startswith("passes/")),
        *(f"zcompile/passes/{name}" for name in modules(ROOT / "passes")),
    }


def test_an_sdist_has_all_that_a_build_takes(tmp_path):
    setup(tmp_path, "sdist", "--dist-dir", str(tmp_path))
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    needed = [
        name for name in tracked if name.startswith(("csrc/", "passes/", "tests/", "zcompile", "setup.py", "LICENSE"))
    ]
    assert needed and not [name for name in needed if name not in names and name != "zcompile/passes"]
