"""`python -m zcompile.explain`: see paper.py. Nothing imports this module, whose name in the package is the function's."""

import sys

from zcompile.paper import main

if __name__ == "__main__":
    sys.exit(main())
