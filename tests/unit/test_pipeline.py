"""The pipeline's passes, their files and their names in options agree."""

import importlib
import pkgutil
import types

import pytest

import zcompile.passes
from zcompile.costs.hardware import H200
from zcompile.options import OPTIONAL_PASSES, Settings
from zcompile.passes import pipeline

SUBMODULES = sorted(module.name for module in pkgutil.iter_modules(zcompile.passes.__path__))
NOT_PASSES = {"pipeline", "verify"}  # the runner, and the checks that it runs after each pass


def pass_names(**settings) -> list[str]:
    """Names of all passes in the order in which they run: those on the joint graph, then those on each of its parts."""
    plan = Settings(**settings).plan(H200.over("p2p", 2), memory_bytes=1 << 30)
    return [pipeline.pass_name(one) for one in (*pipeline.joint_passes(plan), *pipeline.schedule_passes(plan))]


def test_every_optional_name_is_a_pass():
    assert set(OPTIONAL_PASSES) <= set(pass_names())


@pytest.mark.parametrize("name", OPTIONAL_PASSES)
def test_a_skipped_pass_does_not_run(name):
    remaining = [other for other in pass_names() if other != name]
    if name in ("sink_gathers", "regather"):  # without them, nothing keeps a graph within its budget
        remaining.remove("warn_over_budget")
    assert pass_names(skip_passes=[name]) == remaining


@pytest.mark.parametrize("name", sorted(set(SUBMODULES) - NOT_PASSES))
def test_a_file_of_a_pass_has_a_function_of_its_name_that_says_effect_why_and_how(name):
    function = getattr(importlib.import_module(f"zcompile.passes.{name}"), name)
    assert isinstance(function, types.FunctionType) and function.__module__ == f"zcompile.passes.{name}"
    effect, _, rest = function.__doc__.partition("\n\n")
    assert effect.rstrip().endswith(".") and "Why: " in rest and "How: " in rest


def test_every_file_of_a_pass_is_in_the_pipeline():
    assert set(pass_names()) - {"warn_over_budget"} == set(SUBMODULES) - NOT_PASSES
