"""`python -m zcompile`: see command_line.py."""

import sys

from zcompile.command_line import main

if __name__ == "__main__":
    sys.exit(main())
