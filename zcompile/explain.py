"""`python -m zcompile.explain`: see planning/command.py.

Importing this module gives the function: `zcompile.explain` is callable whoever imported what.
"""

import sys

from zcompile.planning.command import main
from zcompile.planning.explain import explain

if __name__ == "__main__":
    sys.exit(main())

sys.modules[__name__] = explain  # type: ignore[assignment]
