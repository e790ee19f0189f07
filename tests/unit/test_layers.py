"""House rules that a file can break unnoticed by any other test: layers (CONTRIBUTING.md), circles, names, sizes."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES, MOST_COLUMNS = 500, 120
PRODUCT = ("csrc", "passes", "zcompile", "setup.py")

# Lowest first. A module belongs to the entry that is the longest prefix of its name.
PYTHON_LAYERS = (
    ("zcompile._C", "zcompile.units.find"),
    (
        "zcompile.calibration.measure_compute",
        "zcompile.calibration.memory",
        "zcompile.calibration.results",
        "zcompile.costs",
        "zcompile.graph",
        "zcompile.options",
        "zcompile.source_hash",
        "zcompile.whole_files",
    ),
    ("zcompile.passes",),
    ("zcompile.ranks",),
    ("zcompile.calibration.machine",),
    ("zcompile.state", "zcompile.ranks.host_barrier"),
    ("zcompile.sharding.class_swap", "zcompile.sharding.substituted_parameters", "zcompile.sharding.traced_reads"),
    ("zcompile.unsharding", "zcompile.training", "zcompile.units"),
    ("zcompile.sharding", "zcompile.calibration"),
    ("zcompile.compiler",),
    ("zcompile.artifact",),
    ("zcompile.explanation",),
    ("zcompile.calibration.command", "zcompile.integrations"),
    ("zcompile.profile",),
    ("zcompile.cli", "zcompile.__main__", "zcompile.artifact.precompile"),
)
CPP_LAYERS = (("compat", "kernels", "p2p/schedule"), ("transport",), ("p2p",), ("runtime",), ("ops",), ("bindings",))


def python_files() -> dict[str, Path]:
    files: dict[str, Path] = {}
    for folder, package in ((ROOT / "zcompile", "zcompile"), (ROOT / "passes", "zcompile.passes")):
        for path in folder.rglob("*.py"):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            if parts[1] != "passes" or package != "zcompile":  # zcompile/passes is a link to passes/
                files[".".join(parts).removesuffix(".__init__")] = path
    return files


def nodes_that_run(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those below `if TYPE_CHECKING`, which import names for annotations alone."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from nodes_that_run(child)


def imported(module: str, path: Path, known: set[str]) -> Iterator[str]:
    """The modules of ours that `module` imports, wherever in the file the import stands."""
    for node in nodes_that_run(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively, in line {node.lineno}"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module or "" for name in found]
        else:
            continue
        yield from (name for name in names if name in known)


def layer_of(name: str, layers: tuple[tuple[str, ...], ...], separator: str) -> int | None:
    """The number of the layer that `name` is in; None if it is in none."""
    prefixes = [(len(prefix), i, prefix) for i, layer in enumerate(layers) for prefix in layer]
    found = [each for each in prefixes if name == each[2] or name.startswith(each[2] + separator)]
    return max(found)[1] if found else None


def circle_in(edges: dict[str, set[str]]) -> list[str]:
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for target in sorted(edges.get(node, ())):
            if circle := visit(target, [*path, node]):
                return circle
        done.add(node)
        return []

    return next((circle for node in sorted(edges) if (circle := visit(node, []))), [])


def python_edges() -> dict[str, set[str]]:
    files = python_files()
    known = {*files, "zcompile._C"}
    return {module: set(imported(module, path, known)) - {module} for module, path in files.items()}


def cpp_edges() -> dict[str, set[str]]:
    """What each part includes. A part is a header with the source of the same name: two such may make a circle."""
    folder = ROOT / "csrc"
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    edges: dict[str, set[str]] = {}
    for name, path in files.items():
        included = re.findall(r'^#include "([^"]+)"', path.read_text(), flags=re.MULTILINE)
        unknown = [target for target in included if target not in files]
        assert not unknown, f"csrc/{name} includes {unknown[0]}: paths are those below csrc"
        part = name.rpartition(".")[0]
        edges.setdefault(part, set()).update({target.rpartition(".")[0] for target in included} - {part})
    return edges


def upward(edges: dict[str, set[str]], layers: tuple[tuple[str, ...], ...], separator: str) -> list[str]:
    """What is used by a layer below its own."""
    layer = {name: layer_of(name, layers, separator) for each in edges for name in (each, *edges[each])}
    unknown = [name for name in edges if layer[name] is None]
    assert not unknown, f"{unknown[0]} is in no layer: put it into one, here and in CONTRIBUTING.md"
    pairs = [(name, target) for name, targets in edges.items() for target in targets if layer[target] is not None]
    return [f"{name} uses {target}" for name, target in pairs if layer[target] > layer[name]]


def test_python_modules_import_no_layer_above_their_own():
    edges = python_edges()
    del edges["zcompile"]  # what users import: it collects the public functions of all layers
    assert not upward(edges, PYTHON_LAYERS, ".")


def test_cpp_files_include_no_layer_above_their_own():
    assert not upward(cpp_edges(), CPP_LAYERS, "/")


@pytest.mark.parametrize("edges", [python_edges, cpp_edges])
def test_imports_and_includes_have_no_circle(edges):
    assert not circle_in(edges())


def test_inductor_is_known_where_graphs_are_compiled_and_where_kernels_are_loaded():
    is_import = re.compile(r"^\s*(from|import) torch\._inductor", re.MULTILINE)
    knows = {module for module, path in python_files().items() if is_import.search(path.read_text())}
    expected = {"zcompile.compiler.inductor", "zcompile.artifact.kernels"}
    assert {module for module in knows if not module.startswith("zcompile.profile")} == expected


PACKAGES = [name for name, path in python_files().items() if path.name == "__init__.py" and name != "zcompile"]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_name_of_a_package_hides_a_module_of_it(package):
    module = importlib.import_module(package)
    for found in pkgutil.iter_modules(module.__path__):
        here = module.__dict__.get(found.name)
        assert here is None or getattr(here, "__name__", "") == f"{module.__name__}.{found.name}", found.name


def code_files() -> list[Path]:
    folders = ("zcompile", "passes", "csrc", "tests", "examples", "benchmarks")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    code = [path for path in paths if path.suffix in (".py", ".pyi", ".cpp", ".h", ".cu", ".cuh", ".j2")]
    return [*code, ROOT / "setup.py", ROOT / "Makefile"]


def test_no_file_is_too_long():
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in code_files()}
    assert not [name for name, length in lengths.items() if length > MOST_LINES]


@pytest.mark.parametrize("names, budget", [(PRODUCT, 34_000), (("tests",), 26_000)], ids=["product", "tests"])
def test_lines_keep_to_their_budget(names, budget):
    """What is added is paid for by what goes. The budget may shrink."""
    files = [path for path in code_files() if path.relative_to(ROOT).parts[0] in names]
    code = [path for path in files if path.suffix in (".py", ".pyi", ".cpp", ".h", ".cu", ".cuh")]
    assert sum(len(path.read_text().splitlines()) for path in set(code)) <= budget


def test_no_line_of_code_is_too_long():
    lines = {str(path.relative_to(ROOT)): path.read_text().splitlines() for path in code_files()}
    assert not [(name, i) for name in lines for i, line in enumerate(lines[name], 1) if len(line) > MOST_COLUMNS]
