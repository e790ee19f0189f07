"""`zcompile profile` and `zcompile explain`: short runs, and what they write."""

import json
from pathlib import Path
from typing import Any

from zcompile.cli import main

SHORT = ["--ranks", "2", "--steps", "3", "--warmup", "2", "--repeats", "1"]  # five steps in all


def results_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def explained(folder: Path, *arguments: str) -> dict[str, Any]:
    """What `zcompile explain` writes of these arguments."""
    file = folder / "plan.json"
    assert main(["explain", *arguments, "--json", str(file)]) == 0
    return json.loads(file.read_text())
