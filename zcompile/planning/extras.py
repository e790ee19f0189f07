"""Packages that only some programs need: zcompile's extras, as in `pip install 'zcompile[profile]'`."""

import importlib.util
import sys


def require(program: str, extra: str, *packages: str) -> None:
    """End `program` with code 2 and one line on stderr if one of the `packages` of an extra is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{program} needs {', '.join(missing)}: pip install 'zcompile[{extra}]'", file=sys.stderr)
        sys.exit(2)
