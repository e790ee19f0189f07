"""The command `zcompile`, also as `python -m zcompile`: it hands its arguments to one of the subcommands below."""

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Subcommand(NamedTuple):
    """A module whose `main(argv)` returns an exit code. It is imported only when the subcommand is asked for."""

    module: str
    about: str
    example: str


SUBCOMMANDS = {
    "profile": Subcommand(
        "zcompile.profile.__main__",
        "Train one model under several engines; compare step time, peak memory and losses in a report.",
        "zcompile profile --model tiny --engines zcompile,fsdp2 --ranks 2",
    ),
    "explain": Subcommand(
        "zcompile.planning.command",
        "Show the plan of a model and predict its step time and memory for any number of ranks, without running it.",
        "zcompile explain --model 2b --ranks 8,64 --hardware h200",
    ),
    "calibrate": Subcommand(
        "zcompile.planning.calibrate_command",
        "Measure what this machine reaches, once, so that plans and predictions rest on it.",
        "zcompile calibrate --ranks 2",
    ),
    "precompile": Subcommand(
        "zcompile.precompile",
        "Compile a model once, into a file that all ranks of a training run load.",
        "zcompile precompile --module train.py:build --ranks 8 --out model.zc",
    ),
}


def help_text() -> str:
    """What `zcompile --help` prints."""
    lines = ["usage: zcompile COMMAND [options]", "", "ZeRO-3 training as a torch.compile backend.", "", "commands:"]
    for name, subcommand in SUBCOMMANDS.items():
        lines += [f"  {name}", f"      {subcommand.about}", f"      example: {subcommand.example}", ""]
    return "\n".join(
        [
            *lines,
            "options:",
            "  -h, --help   print this",
            "  --version    print the version of zcompile",
            "",
            "`zcompile COMMAND --help` lists the options of a command. `python -m zcompile COMMAND` does the same.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 0; 2, with one line on stderr, for bad input."""
    name, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(help_text())
        return 0
    if name == "--version":
        print(importlib.import_module("zcompile").__version__)
        return 0
    if name not in SUBCOMMANDS:
        print(f"zcompile: unknown command {name!r}; commands are {', '.join(SUBCOMMANDS)}", file=sys.stderr)
        return 2
    code: int = importlib.import_module(SUBCOMMANDS[name].module).main(arguments)
    return code
