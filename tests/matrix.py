"""Tests what touches torch's internals with several torches.

    python tests/matrix.py                                     # make matrix
    python tests/matrix.py --torch 2.15.0 --environments DIR   # make matrix TORCH=2.15.0 MATRIX_ENVS=DIR
    python tests/matrix.py --torch 2.15.0 --smoke              # make smoke TORCH=2.15.0

For each torch, build/matrix/VERSION holds a virtual environment and a copy of this checkout with the extension built
for that torch; without a GPU, for CPUs. A torch with CUDA takes 3 GB to download and 6 GB of disk: `--environments`
names a folder with environments called VERSION, whose packages are used and not changed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "matrix"
TORCHES = ("2.11.0", "2.13.0", "2.14.1", "2.15.0")
UNIT = [f"tests/unit/test_{name}.py" for name in ("entry_points", "planned_graphs", "explain_command")]
DISTRIBUTED = "activation_budget artifact compose explain freeing lifetimes subgraphs training units"
SMOKE = [*UNIT, "tests/distributed/test_inductor_lifetimes.py", "tests/distributed/test_ops.py"]
TESTS = [*SMOKE, "tests/unit/test_pipeline.py", "tests/unit/test_same_code.py", "tests/deepspeed"]
TESTS += [f"tests/distributed/test_{name}.py" for name in DISTRIBUTED.split()]
NOT_TESTED = r"torch|deepspeed|ruff|mypy|clang-format|PySide6"  # requirements that the tests here do without


def run(command: list[Any], **settings: Any) -> None:
    """Run a command; its output is shown."""
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, **settings)


def environment_of(version: str, given: Path | None) -> Path:
    """The Python of a virtual environment with this torch and all that tests need."""
    folder = FOLDER / version / "venv"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    lines = [str(FOLDER / version / "source")]
    if given is not None and (given / version).is_dir():
        lines += map(str, (given / version).glob("lib/python*/site-packages"))
    (packages / "a_matrix.pth").write_text("\n".join(lines) + "\n")
    text = (ROOT / "requirements-dev.txt").read_text()
    (FOLDER / version / "constraints.txt").write_text(f"torch=={version}\n")
    kept = [line for line in text.splitlines() if not re.match(rf"({NOT_TESTED})\b", line)]
    (FOLDER / version / "requirements.txt").write_text("\n".join(kept) + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["-c", FOLDER / version / "constraints.txt"]
    run([*pip, f"torch=={version}", "-r", FOLDER / version / "requirements.txt"])
    (deepspeed,) = [line for line in text.splitlines() if line.startswith("deepspeed==")]
    run([*pip, "--no-build-isolation", deepspeed], env=settings_of(python))
    return python


def settings_of(python: Path) -> dict[str, str]:
    """The environment variables of whatever runs in a virtual environment here."""
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
    left = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    alone = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1"}
    return left | alone | {"PATH": path, "VIRTUAL_ENV": str(python.parents[1])}


def copy_source(version: str) -> Path:
    """A copy of this checkout as it is. Files keep their times, so only changes are compiled."""
    source = FOLDER / version / "source"
    source.mkdir(exist_ok=True)
    for folder in ("zcompile", "passes", "csrc", "tests"):
        shutil.rmtree(source / folder, ignore_errors=True)
    copy = "git ls-files -z --cached --others --exclude-standard | xargs -0 cp -P --parents --preserve=timestamps -t"
    run(["sh", "-c", f"{copy} {source}"], cwd=ROOT)
    return source


def build(python: Path, source: Path) -> None:
    """Build the extension in its place, and write the names of entry points, as an install does."""
    settings = settings_of(python)
    code = "import torch; print(int(torch.cuda.is_available()))"
    gpu = subprocess.run([python, "-c", code], env=settings, check=True, capture_output=True, text=True).stdout.strip()
    settings.setdefault("ZCOMPILE_CUDA", gpu)
    run([python, "setup.py", "--quiet", "egg_info"], cwd=source, env=settings)
    run([python, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=source, env=settings)


def test(version: str, arguments: argparse.Namespace, more: list[str]) -> bool:
    """Prepare a torch and run the tests with it; whether all passed."""
    began = time.monotonic()
    (FOLDER / version).mkdir(parents=True, exist_ok=True)
    source = copy_source(version)
    python = environment_of(version, arguments.environments)
    build(python, source)
    workers = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    command = [str(python), "-m", "pytest", "-q", *workers, *(SMOKE if arguments.smoke else TESTS), *more]
    passed = subprocess.run(command, cwd=source, env=settings_of(python)).returncode == 0
    minutes = (time.monotonic() - began) / 60
    print(f"torch {version}: {'passed' if passed else 'failed'}, {minutes:.1f} minutes with building", flush=True)
    return passed


def main() -> int:
    """Returns: 0 if every test of every torch passed, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog="Further arguments go to pytest.")
    add = parser.add_argument
    add("--torch", action="append", help=f"a version; may be given several times (default: {', '.join(TORCHES)})")
    add("--environments", type=Path, help="a folder with an environment for some versions, named after them")
    add("--smoke", action="store_true", help="a handful of tests")
    arguments, more = parser.parse_known_args()
    passed = [test(version, arguments, more) for version in arguments.torch or TORCHES]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
