"""`zcompile` and `python -m zcompile`, and the one line by which programs say which of zcompile's extras they need."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import zcompile
from tests.support.pages import check_commands, parser_of
from tests.support.ranks import slow_case
from tests.support.time_limits import scaled
from zcompile import cli
from zcompile.cli import WIDTH

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_shows_an_example_of_each_command(arguments, capsys):
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert f" {name} {command.about} {command.when} example: {command.example} " in " ".join(text.split())
    examples = re.findall("example: (.*)", text)
    assert [example.split()[1] for example in examples] == list(cli.COMMANDS)
    for example in examples:
        check_commands(example)
    assert all(len(line) <= WIDTH for line in text.splitlines())


def help_of(name, columns, monkeypatch, capsys):
    """What `zcompile NAME --help` prints in a terminal of so many columns."""
    for package in cli.COMMANDS[name].packages:
        pytest.importorskip(package)
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_a_command_has_one_example_that_its_parser_takes(name, columns, monkeypatch, capsys):
    text = help_of(name, columns, monkeypatch, capsys)
    usage, blank, about, *_ = text.splitlines()
    assert usage.startswith(f"usage: zcompile {name} ") and not blank and about
    (example,) = re.findall(r"^example:\n  (.*)\n\n", text, re.MULTILINE)
    assert example.startswith(f"zcompile {name} ")
    check_commands(example)
    assert len(usage) <= WIDTH
    assert all(len(line) <= min(columns, WIDTH) for line in text.splitlines()[1:])


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_a_command_says_the_default_of_each_option(name, monkeypatch, capsys):
    text = help_of(name, WIDTH, monkeypatch, capsys)
    for action in parser_of(name)._actions:
        if action.dest == "help":
            continue
        assert action.option_strings[0] in text
        told = re.search(r"\(default: (.*)\)$", action.help)
        assert bool(told) != action.required, action.dest
        if action.default:
            ours = f"{action.default:g}".replace("e-0", "e-") if isinstance(action.default, float) else action.default
            assert told[1] == str(ours), action.dest


def test_unknown_command_is_one_line(capsys):
    assert cli.main(["explode"]) == 2
    names = "profile, explain, calibrate, precompile"
    assert capsys.readouterr().err == f"zcompile: unknown command 'explode'; commands are {names}\n"


def test_a_command_is_imported_only_when_it_is_asked_for():
    code = "import sys; from zcompile.cli import main; main(['--help']); print(sorted(sys.modules))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled(120)).stdout
    assert "zcompile.cli" in modules
    for name in ("zcompile.profile", "zcompile.compiler.backend", "torch._inductor.compile_fx"):
        assert f"'{name}'" not in modules


def test_version(monkeypatch, capsys):
    (written,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE) or [
        zcompile.__version__  # setuptools reads it from the package
    ]
    monkeypatch.setattr(sys, "argv", ["zcompile", "--version"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("zcompile", run_name="__main__", alter_sys=True)
    assert not stopped.value.code
    assert capsys.readouterr().out.strip() == zcompile.__version__ == written


WITHOUT = """
import runpy, sys
sys.modules[{missing!r}] = None  # as if it were not installed
sys.argv = {arguments!r}
{run}
"""
RUN_MODULE = "runpy.run_module({!r}, run_name='__main__', alter_sys=True)"
RUN_FILE = "sys.path.insert(0, 'examples'); runpy.run_path('examples/{}.py', run_name='__main__')"
CASES = [
    pytest.param("psutil", RUN_MODULE.format("zcompile"), "zcompile profile", "profile", id="command"),
    *(
        slow_case(missing, RUN_FILE.format(example), program, extra, id=example)
        for missing, example, program, extra in [
            ("tqdm", "train", "examples/train.py", "train"),
            ("matplotlib", "moe", "examples/moe.py", "train"),
            ("deepspeed", "deepspeed_train", "examples/deepspeed_train.py", "deepspeed,train"),
            ("jinja2", "profile_own_model", "zcompile profile", "profile"),
        ]
    ),
]


@pytest.mark.parametrize("missing, run, program, extra", CASES)
def test_a_missing_extra_is_one_line(missing, run, program, extra):
    arguments = ["zcompile", "profile"] if "'zcompile'" in run else [program]
    code = WITHOUT.format(missing=missing, arguments=arguments, run=run)
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().splitlines()[-1] == f"{program} needs {missing}: pip install 'zcompile[{extra}]'"
    assert "Traceback" not in done.stderr
