"""The code blocks of Markdown pages, and checks of those that are no Python: commands and parts of configs."""

import importlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from torch.distributed import run

from tests.support.deepspeed_config import config_of
from zcompile import cli
from zcompile.integrations.deepspeed.config import options_of

ROOT = Path(__file__).resolve().parents[2]


class Block(NamedTuple):
    """A fenced block. `language` is what stands behind the fence, "" if nothing does."""

    page: str
    heading: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.heading}"


def blocks_of(page: str) -> list[Block]:
    """All fenced blocks of a page, a path from the root of the source; ValueError if one does not end."""
    found: list[Block] = []
    heading, opened, lines = "", None, []
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        fence = re.match(r"\s*(```+|~~~+)\s*(\S*)", line)
        if opened is None and fence:
            opened, lines = (number, fence[1], fence[2]), []
        elif opened is not None and line.strip() == opened[1]:
            found.append(Block(page, heading, opened[0], opened[2], "\n".join(lines) + "\n"))
            opened = None
        elif opened is not None:
            lines.append(line)
        elif line.startswith("#"):
            heading = line.lstrip("# ")
    if opened is not None:
        raise ValueError(f"{page}: the block of line {opened[0]} does not end")
    return found


def python_blocks(page: str) -> list[str]:
    """The programs of a page, in order."""
    return [block.text for block in blocks_of(page) if block.language == "python"]


def commands_of(page: str) -> list[str]:
    """The commands `zcompile COMMAND --option ...` of a page, in its sentences and in its `sh` blocks."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    for block in blocks_of(page):
        if block.language == "sh":
            spans += block.text.replace("\\\n", " ").splitlines()
    return [span for span in spans if re.match(r"zcompile [a-z]+ .*--", span)]


def check_config(text: str) -> None:
    """`text`, a DeepSpeed config or entries of one, asks for zcompile, and zcompile takes it."""
    config = json.loads(text if text.lstrip().startswith("{") else f"{{{text}}}")
    assert options_of(config_of(None) | config) is not None


def check_commands(text: str) -> None:
    """Each line is a command that exists, with options that it has, else ValueError. Nothing is run."""
    commands = [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]
    assert commands
    torchrun = run.get_args_parser().parse_args
    checks = {"zcompile": check_zcompile, "make": check_make, "pip": check_pip, "torchrun": torchrun}
    for program, *arguments in commands:
        if program == "srun":  # whose own options are before the command that it runs
            program, *arguments = itertools.dropwhile(lambda word: word.startswith("--"), arguments)
        check = checks.get(program)
        if check is None:
            raise ValueError(f"no check for the command {program!r}")
        check(arguments)


def parser_of(command: str):
    """The parser of `zcompile COMMAND`. Skips the test that asks for it where packages of an extra are missing."""
    for package in cli.COMMANDS[command].packages:
        pytest.importorskip(package)
    return cli.Parser(command, cli.COMMANDS[command])


def check_zcompile(arguments: list[str]) -> None:
    """Names a subcommand and options that its parser takes, and engines that there are."""
    command, *options = arguments
    parser = parser_of(command)
    parser.allow_abbrev = False
    parsed = parser.parse_args(options)
    if command == "profile":
        engines = importlib.import_module("zcompile.profile.engines")
        for name in engines.names_of(parsed.engines):
            engines.find(name)


def check_make(arguments: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    dry = ["make", "--dry-run", "--always-make", *arguments]
    done = subprocess.run(dry, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr


def check_pip(arguments: list[str]) -> None:
    """Names options that `pip install` has, extras that zcompile has, and packages that a build of it needs."""
    command, *rest = arguments
    assert command == "install"
    project = (ROOT / "pyproject.toml").read_text()
    listed = subprocess.run([sys.executable, "-m", "pip", "install", "--help"], capture_output=True, text=True).stdout
    for word in rest:
        if word.startswith("-"):
            assert re.search(rf"(?<!\S){word}(?![\w-])", listed), word
        elif own := re.fullmatch(r"(?:zcompile|\.)(?:\[(.*)\])?", word):
            for extra in filter(None, (own[1] or "").split(",")):
                assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra
        else:
            assert word == "ninja" or f'"{word}"' in project, word
