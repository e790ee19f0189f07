"""The command `zcompile`, also as `python -m zcompile`: it hands its arguments to one of the subcommands below."""

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Subcommand(NamedTuple):
    """A module whose `main(argv)` returns an exit code. It is imported only when the subcommand is asked for."""

    module: str
    about: str
    when: str
    example: str


SUBCOMMANDS = {
    "profile": Subcommand(
        "zcompile.profile.__main__",
        "Train one model under several engines, and compare step time, peak memory and losses.",
        "Use it to learn whether zcompile is faster for your model on your machine, and why.",
        "zcompile profile --model tiny --engines zcompile,fsdp2 --ranks 2",
    ),
    "explain": Subcommand(
        "zcompile.planning.command",
        "Print the plan of a model, and predict time and memory of a step for any number of ranks.",
        "Use it before you rent the machines, or to choose budgets: no GPU is needed.",
        "zcompile explain --model 2b --ranks 8,64 --hardware h200",
    ),
    "calibrate": Subcommand(
        "zcompile.planning.calibrate_command",
        "Measure what this machine reaches; plans and predictions then use it.",
        "Use it once per machine, and again after an update of torch or of the driver.",
        "zcompile calibrate",
    ),
    "precompile": Subcommand(
        "zcompile.precompile",
        "Compile a model into a file, in one process, for all ranks of a training run.",
        "Use it so that a run starts without a compiler.",
        "zcompile precompile --module train.py:build --ranks 8 --out model.zc",
    ),
}


def help_text() -> str:
    """What `zcompile --help` prints."""
    lines = [
        "usage: zcompile COMMAND [options]",
        "",
        "ZeRO-3 training as a torch.compile backend: measure, predict and compile ahead of time.",
        "",
        "commands:",
    ]
    for name, (_, about, when, example) in SUBCOMMANDS.items():
        lines += [f"  {name}", f"      {about}", f"      {when}", f"      example: {example}", ""]
    return "\n".join(
        [
            *lines,
            "options:",
            "  -h, --help   print this",
            "  --version    print the version of zcompile",
            "",
            "`zcompile COMMAND --help` lists a command's options. `python -m zcompile` is the same program.",
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
