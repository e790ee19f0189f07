"""`results.json` with few lines: what fits stays on one line, and numbers fill lines."""

import json
import textwrap
from typing import Any

WIDTH = 116


def dumps(value: Any, indent: int = 0) -> str:
    """JSON, indented by one column a level.

    Args:
        indent: of the lines behind the first.
    """
    flat = json.dumps(value)
    if indent + len(flat) <= WIDTH:
        return flat
    pad = "\n" + " " * (indent + 1)
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {dumps(item, indent + 1)}" for key, item in value.items()]
        return "{" + pad + ("," + pad).join(items) + "\n" + " " * indent + "}"
    if isinstance(value, (list, tuple)):
        if '"' not in flat:  # numbers, which may be parted at each blank
            return pad.join(textwrap.wrap(flat, WIDTH - indent, break_long_words=False, break_on_hyphens=False))
        return "[" + pad + ("," + pad).join(dumps(item, indent + 1) for item in value) + "\n" + " " * indent + "]"
    return flat
