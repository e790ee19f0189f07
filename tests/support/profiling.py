"""Runs of the profiler that are as short as they can be, and their results."""

import json
from pathlib import Path
from typing import Any

SHORT = ["--ranks", "2", "--steps", "3", "--warmup", "2", "--repeats", "1"]  # five steps in all


def results_in(folder: Path) -> dict[str, Any]:
    """What a run wrote to `folder`."""
    return json.loads((folder / "results.json").read_text())
