"""`python -m zcompile`: see cli.py."""

import sys

from zcompile.cli import main

if __name__ == "__main__":
    sys.exit(main())
