"""`import torch` does not depend on zcompile: torch loads nothing of it, whatever became of its files."""

import subprocess
import sys
from pathlib import Path

import torch

from tests.support.time_limits import scaled

ROOT = Path(__file__).resolve().parents[2]
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
    run = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(folder)]
    subprocess.run(run, cwd=ROOT, check=True, capture_output=True)
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
