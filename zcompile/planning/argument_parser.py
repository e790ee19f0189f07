"""What the command lines of zcompile.planning and zcompile.profile share."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Reports bad input as one line on stderr and exits with code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def positive(text: str) -> int:
    """A whole number of at least 1, as `type=` of an argument."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value
