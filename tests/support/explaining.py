"""`zcompile explain`, called in this process."""

import json
from pathlib import Path
from typing import Any

from zcompile.cli import main


def explained(folder: Path, *arguments: str) -> dict[str, Any]:
    """What `zcompile explain` writes of these arguments."""
    file = folder / "plan.json"
    assert main(["explain", *arguments, "--json", str(file)]) == 0
    return json.loads(file.read_text())
