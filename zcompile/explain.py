"""`zcompile.explain` the function, and `python -m zcompile.explain` the command; see planning/ for both.

The module puts the function in its own place in `sys.modules`. So `import zcompile.explain` does not rebind the name
from the function to a module: whatever is imported in whatever order, `zcompile.explain` is callable.
"""

import sys

from zcompile.planning.command import main
from zcompile.planning.explain import explain

if __name__ == "__main__":
    sys.exit(main())

sys.modules[__name__] = explain  # type: ignore[assignment]
