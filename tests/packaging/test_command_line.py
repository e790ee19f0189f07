"""`zcompile` and `python -m zcompile`, and that `zcompile.explain` is a function whoever imported what."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import zcompile
from zcompile import command_line

ROOT = Path(__file__).parents[2]


def python(*arguments):
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_shows_an_example_of_each_command(arguments, capsys):
    assert command_line.main(arguments) == 0
    text = capsys.readouterr().out
    assert all(f"example: zcompile {name} " in text for name in command_line.SUBCOMMANDS)
    assert all(len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize("name", command_line.SUBCOMMANDS)
def test_help_of_a_command_lists_its_options(name, capsys):
    if name == "profile":
        for package in ("jinja2", "matplotlib", "psutil", "rich"):
            pytest.importorskip(package)
    with pytest.raises(SystemExit) as stopped:
        command_line.main([name, "--help"])
    assert stopped.value.code == 0 and "--ranks" in capsys.readouterr().out


def test_examples_of_the_help_are_accepted_by_the_parser_of_explain():
    from zcompile.planning.command import parser

    _, name, *arguments = command_line.SUBCOMMANDS["explain"].example.split()
    assert name == "explain" and parser().parse_args(arguments).model == "2b"


def test_unknown_command_is_one_line(capsys):
    assert command_line.main(["explode"]) == 2
    names = "profile, explain, calibrate, precompile"
    assert capsys.readouterr().err == f"zcompile: unknown command 'explode'; commands are {names}\n"


def test_a_command_is_imported_only_when_it_is_asked_for():
    code = "import sys; from zcompile.command_line import main; main(['--help']); print(sorted(sys.modules))"
    modules = python("-c", code).stdout
    assert "zcompile.command_line" in modules
    for name in ("zcompile.planning", "zcompile.profile", "zcompile.backend", "torch._inductor.compile_fx"):
        assert f"'{name}'" not in modules


def test_version():
    (written,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE) or [
        zcompile.__version__  # setuptools reads it from the package
    ]
    printed = python("-m", "zcompile", "--version").stdout.strip()
    assert printed == zcompile.__version__ == written


def test_module_commands_still_work():
    assert "--ranks" in python("-m", "zcompile.explain", "--help").stdout
    assert "--ranks" in python("-m", "zcompile", "explain", "--help").stdout


@pytest.mark.parametrize(
    "imports",
    [
        "import zcompile",
        "import zcompile.explain",
        "import zcompile.planning.explain",
        "import zcompile.explain, zcompile.planning.explain",
        "import zcompile.planning.explain, zcompile.explain",
    ],
)
def test_explain_is_the_function_whatever_is_imported(imports):
    code = (
        f"import sys\n{imports}\nimport zcompile\n"
        "from zcompile import explain\n"
        "assert explain is zcompile.explain is sys.modules['zcompile.planning.explain'].explain\n"
        "import zcompile.explain\n"
        "assert zcompile.explain is explain and callable(explain)\n"
    )
    result = python("-c", code)
    assert result.returncode == 0, result.stderr


def test_shard_stays_a_function_and_a_module():
    import zcompile.sharding.shard

    assert zcompile.sharding.shard.shard is zcompile.shard
