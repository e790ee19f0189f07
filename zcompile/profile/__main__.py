"""`python -m zcompile.profile`: see command.py, which needs the packages of the extra "profile"."""

import sys

from zcompile.planning.extras import require


def main(argv: list[str] | None = None) -> int:
    """Compare and report; see `zcompile.profile.command.main`. Exits with 2 and one line if a package is missing."""
    require("zcompile profile", "profile", "jinja2", "matplotlib", "psutil", "rich")
    from zcompile.profile import command  # imports them

    return command.main(argv)


if __name__ == "__main__":
    sys.exit(main())
