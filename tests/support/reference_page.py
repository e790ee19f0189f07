"""Pages made from signatures and docstrings: `python -m tests.support.reference_page` writes them."""

import ast
import inspect
import re
import textwrap
from pathlib import Path

import zcompile
from zcompile import options
from zcompile.costs.hardware import H200
from zcompile.passes import pipeline

DOCS = Path(__file__).resolve().parents[2] / "docs"
MARK = "<!-- from docstrings -->\n"  # before and after each list of passes in docs/passes.md

HEAD = """# Reference

Made from the code by `python -m tests.support.reference_page`; a test holds that it is up to date. How things are used:
[guide](guide.md).

## Functions

Each has a docstring with shapes, units and errors: `help(zcompile.shard)`.
"""

COUNTS_HEAD = """
## What is counted

`zcompile.stats(model)` returns a dictionary:
"""

OPTIONS_HEAD = """
## Options of the backend

`torch.compile(model, backend="zcompile", options={...})`, `model.compile(backend="zcompile", options={...})`, and the
block `"zcompile"` of a DeepSpeed config take these. `mode` is passed to Inductor.
"""


def wrapped(text: str, first: str = "", indent: str = "") -> str:
    how = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(" ".join(text.split()), 120, initial_indent=first, subsequent_indent=indent, **how)


def first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", " ".join(text.split()))[0]


def functions() -> str:
    """Signature and first sentence of each public name."""
    entries = []
    for name in (each for each in zcompile.__all__ if not each.startswith("__")):
        value = getattr(zcompile, name)
        parameters = [] if inspect.isclass(value) else inspect.signature(value).parameters.values()
        bare = [parameter.replace(annotation=parameter.empty, default=parameter.empty) for parameter in parameters]
        signature = str(inspect.Signature(bare)) if bare else ""
        sentence = first_sentence(inspect.getdoc(value).split("\n\n")[0])
        entries.append(wrapped(f"`zcompile.{name}{signature}`: {sentence}", "- ", "  "))
    return "\n".join(entries)


def counts() -> str:
    """Each key of `zcompile.stats`, from the docstring."""
    returns = inspect.getdoc(zcompile.stats).split("Returns:\n")[1].split("\n\nRaises:")[0]
    pairs = (entry.split(": ", 1) for entry in re.split(r"\n(?=\S)", textwrap.dedent(returns)))
    return "\n".join(wrapped(f"`{keys.replace(', ', '`, `')}`: {text}", "- ", "  ") for keys, text in pairs)


def option_entries() -> str:
    """Name, default and docstring of each field of Settings."""
    (settings,) = ast.parse(inspect.getsource(options.Settings)).body
    entries = []
    for field, text in zip(settings.body, settings.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(text, ast.Expr):
            continue
        default = "{}" if isinstance(field.value, ast.Call) else ast.unparse(field.value)
        entries.append(wrapped(f"`{ast.unparse(field.target)}` (`{default}`): {text.value.value}", "- ", "  "))
    return "\n".join(entries)


def passes() -> str:
    """docs/passes.md, with effect and first reason of each pass, in order of first runs, between its marks."""
    plan = options.Settings().plan(H200.over("p2p", 2), memory_bytes=1 << 30)
    parts = (DOCS / "passes.md").read_text().split(MARK)
    for i, graph_passes in ((1, pipeline.joint_passes(plan)), (3, pipeline.schedule_passes(plan))):
        parts[i] = ""
        for one in graph_passes:
            effect, *rest = inspect.getdoc(getattr(one, "func", one)).split("\n\n")
            why = next((first_sentence(part) for part in rest if part.startswith("Why: ")), "")
            entry = wrapped(f"`{pipeline.pass_name(one)}`: {effect} {why}", "- ", "  ") + "\n"
            parts[i] += "" if entry in parts[1] + parts[i] else entry
    return MARK.join(parts)


def reference() -> str:
    return f"{HEAD}\n{functions()}\n{COUNTS_HEAD}\n{counts()}\n{OPTIONS_HEAD}\n{option_entries()}\n"


PAGES = {"reference.md": reference, "passes.md": passes}

if __name__ == "__main__":
    for name, made in PAGES.items():
        (DOCS / name).write_text(made())
