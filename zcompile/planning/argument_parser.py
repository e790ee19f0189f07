"""What the command lines of zcompile share."""

import argparse
import shutil
import textwrap
from collections.abc import Mapping
from typing import NoReturn

WIDTH = 100  # columns of a help text, or fewer in a narrower terminal


def _width() -> int:
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str, **how: object) -> None:
        super().__init__(prog, max_help_position=26, width=_width())


class Parser(argparse.ArgumentParser):
    """The parser of a subcommand. It reports bad input as one line on stderr and exits with code 2."""

    def __init__(
        self,
        prog: str,
        about: str,
        *,
        example: str,
        usage: str = "[options]",
        names: tuple[str, Mapping[str, str]] | None = None,
    ) -> None:
        """
        Args:
            about: what the subcommand does, and when one wants it.
            example: a whole command.
            usage: what follows the name: options that are required, and "[options]".
            names: a title, and what names that options take mean. The help ends with them.
        """
        super().__init__(
            prog=prog,
            usage=f"{prog} {usage}",
            description=f"{textwrap.fill(about, _width())}\n\nexample:\n  {example}",
            epilog=_listed(*names) if names else None,
            formatter_class=_HelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Exit with `message` alone: usage would hide it."""
        self.exit(2, f"{self.prog}: {message}\n")


def _listed(title: str, meanings: Mapping[str, str]) -> str:
    column = max(map(len, meanings)) + 4
    lines = [
        textwrap.fill(f"  {name:{column - 2}}{meaning}", _width(), subsequent_indent=" " * column)
        for name, meaning in meanings.items()
    ]
    return "\n".join([f"{title}:", *lines])


def positive(text: str) -> int:
    """A whole number of at least 1, as `type=` of an argument."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value
