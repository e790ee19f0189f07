"""Pages are no wider than code, link to what exists, and say what the code says."""

import functools
import re
import subprocess
from pathlib import Path

import pytest

from tests.support import pages, reference_page

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/lab/*.md")])
IDS = [page.relative_to(ROOT).as_posix() for page in PAGES]


@functools.cache
def tracked_files() -> list[str]:
    return subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()


@functools.cache
def notes() -> dict[str, set[str]]:
    """The notes in the sources, by name, and the files that hold them."""
    found: dict[str, set[str]] = {}
    for file in tracked_files():
        if file.endswith((".py", ".cpp", ".h", ".cu", ".cuh")):
            for name in re.findall(r"^\W*\[Note: (.*)\]$", (ROOT / file).read_text(), re.MULTILINE):
                found.setdefault(name, set()).add(Path(file).name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_no_line_is_too_long(page):
    for number, line in enumerate(page.read_text().splitlines(), 1):
        assert len(line) <= 120, f"line {number} has {len(line)} characters"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = page if not path else (page.parent / path).resolve()
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text().lower(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}, target


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_that_are_named_exist(page):
    if "lab" in page.parts or page.name == "CHANGELOG.md":
        pytest.skip("of what was there then")
    tracked = tracked_files()
    for name in re.findall(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|cpp|h|cu|cuh|md))(?:::[\w\[\].]+)?`", page.read_text()):
        of_others = name in ("run_clm.py", "run_glue.py", "zero_to_fp32.py")  # of transformers and DeepSpeed
        assert of_others or any(f"/{file}".endswith(f"/{name}") for file in tracked), name


@pytest.mark.parametrize("page", [page for page in IDS if "lab" not in page])
def test_commands_in_sentences_have_the_options_that_they_name(page):
    for command in pages.commands_of(page):
        pages.check_commands(command)


@pytest.mark.parametrize(
    "command",
    [
        "zcompile explain --rank 8", "zcompile explian --ranks 8", "zcompile profile --engines fsdp3", "make trian",
        "pip install 'zcompile[profiler]'", "pip install --no-isolation .", "pip install setuptools", "rm -r x", "# x",
    ],
)  # fmt: skip
def test_commands_that_do_not_exist_are_found(command):
    with pytest.raises((AssertionError, KeyError, SystemExit, ValueError)):
        pages.check_commands(command)


def test_blocks_are_found_with_their_headings(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n\n```\nno\n```\n\n## B\n\n- a list:\n\n  ~~~sh\n  # no heading\n  ```\n  ~~~\n\n````py\n```\n````\n"
    )
    found = [(block.heading, block.language, block.text) for block in pages.blocks_of("page.md")]
    assert found == [("A", "", "no\n"), ("B", "sh", "  # no heading\n  ```\n"), ("B", "py", "```\n")]
    page.write_text("```python\n")
    with pytest.raises(ValueError, match="line 1"):
        pages.blocks_of("page.md")


@pytest.mark.parametrize("page", [page for page in PAGES if "lab" not in page.parts], ids=lambda page: page.name)
def test_notes_that_are_named_exist(page):
    text = " ".join(page.read_text().split())
    for name, file in re.findall(r"\[Note: ([^\]]+)\](?: in `(?:[^`]*/)?([^`/]+)`)?", text):
        assert name in notes() and (not file or file in notes()[name]), (name, file)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 135  # 40 of them are the program of the quick start


def test_the_quick_start_is_the_minimal_example():
    docstring, body = (ROOT / "examples/minimal.py").read_text().split("\n\n", 1)
    assert docstring.startswith('"""') and pages.python_blocks("README.md") == [body]


@pytest.mark.parametrize("name", reference_page.PAGES)
def test_a_made_page_is_what_the_code_says(name):
    made = reference_page.PAGES[name]()
    assert (reference_page.DOCS / name).read_text() == made, "run `python -m tests.support.reference_page`"
