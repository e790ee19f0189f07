"""The compiled module: what zcompile/_C.pyi names, the C++ runtime that it uses, and its sums of gradients on a CPU."""

import ast
from pathlib import Path

import zcompile
from tests.support.reduce_checks import check_means
from zcompile import _C

STUB = ast.parse((Path(zcompile.__file__).parent / "_C.pyi").read_text())
ONLY_A_TYPE = {"Stats"}  # names a dict of the compiled module


def names_in(body):
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign):
            yield node.target.id


def public(names):
    return {name for name in names if not name.startswith("_")}


def test_stub_has_the_names_of_the_module():
    assert public(names_in(STUB.body)) - ONLY_A_TYPE == public(dir(_C))


def test_stub_has_the_methods_of_each_class():
    for node in STUB.body:
        if isinstance(node, ast.ClassDef) and node.name not in ONLY_A_TYPE:
            assert public(names_in(node.body)) == public(vars(getattr(_C, node.name))), node.name


def test_the_extension_needs_the_shared_runtime():
    """A second C++ runtime in the process crashes at the first number in an error."""
    assert b"\0libstdc++.so.6\0" in Path(_C.__file__).read_bytes()


def test_means_are_those_of_the_same_arithmetic_op_by_op():
    check_means("cpu")
