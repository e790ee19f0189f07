"""DeepSpeed's own tests of its compiler, with zcompile in the compiler's place and rtol 1e-5 in place of their 0.5.

In bf16 and fp16 the baseline is eager ZeRO-3, because stage 0 rounds a linear layer elsewhere. The inner compiler is
then `aot_eager`, because Inductor rounds less often. Terms cancel in their losses, which differ by percents between the
two.

    DEEPSPEED_SOURCE=/a/checkout/of/DeepSpeed python -m pytest tests/deepspeed/test_deepspeed_suite.py

Their files are read from the checkout: tests/unit/v1/compile/test_compile_zero.py, its util.py, and
tests/unit/simple_model.py. This project's ranks, on CPU or with a GPU each, replace their launcher (unit.common).
"""

import importlib
import itertools
import os
import sys
import types
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import zcompile  # noqa: F401  the flag needs no more
from tests.support.ranks import Ranks

SOURCE = os.environ.get("DEEPSPEED_SOURCE")
FILE = "tests/unit/v1/compile/test_compile_zero.py"
RTOL = 1e-5

pytestmark = pytest.mark.skipif(not SOURCE, reason="set DEEPSPEED_SOURCE to a checkout of DeepSpeed")


def close(actual, expected, message="", rtol=0.5, atol=0.01):
    """Stands in for `unit.common.allclose_on_all_ranks`."""
    torch.testing.assert_close(actual, expected, rtol=RTOL, atol=atol, msg=lambda text: f"{message} {text}")


def load():
    """Their test module, over stand-ins for their launcher, with zcompile switched on where ZeRO-3 is compiled."""
    sys.path.insert(0, str(Path(SOURCE) / "tests"))
    common, util = types.ModuleType("unit.common"), types.ModuleType("unit.util")
    common.DistributedTest, common.allclose_on_all_ranks = object, close
    common.preferred_dtype = lambda: torch.float32
    util.bf16_required_version_check = lambda: True
    util.skip_on_arch = lambda min_arch: None
    sys.modules.update({"unit.common": common, "unit.util": util})
    module = importlib.import_module("unit.v1.compile.test_compile_zero")
    helpers = importlib.import_module("unit.v1.compile.util")
    helpers.deepspeed = switched = _Switched(helpers.deepspeed)
    gathered = helpers.GatheredParameters
    helpers.GatheredParameters = lambda parameters, **how: gathered([*parameters, *switched.parameters()], **how)
    accelerator = _NotCpu(module.get_accelerator())
    module.get_accelerator = lambda: accelerator
    return module


class _Switched:
    """DeepSpeed, whose ZeRO-3 engines have the flag."""

    def __init__(self, deepspeed):
        self._deepspeed = deepspeed
        self.engines = []

    def __getattr__(self, name):
        return getattr(self._deepspeed, name)

    def parameters(self):
        """Those of the baseline, where that is eager ZeRO-3."""
        parameters = [parameter for engine in self.engines[:1] for parameter in engine.module.parameters()]
        return [parameter for parameter in parameters if hasattr(parameter, "ds_id")]

    def initialize(self, *args, config, **kwargs):
        stage, narrow = config["zero_optimization"]["stage"], {"bf16", "fp16", "torch_autocast"} & config.keys()
        not_compiled = {name: value for name, value in config.items() if name != "compile"}
        if stage == 0 and narrow:
            config = not_compiled | {"zero_optimization": {"stage": 3}}
        elif stage == 3:
            block = {"enabled": True, "inner": "aot_eager" if narrow else "inductor"}
            config = not_compiled | {"zero_optimization": not_compiled["zero_optimization"] | {"zcompile": block}}
        initialized = self._deepspeed.initialize(*args, config=config, **kwargs)
        self.engines.append(initialized[0])
        return initialized


class _NotCpu:
    """The accelerator, which does not say that it is a CPU. Their tests skip CPUs, because of DeepCompile."""

    def __init__(self, accelerator):
        self._accelerator = accelerator

    def __getattr__(self, name):
        return getattr(self._accelerator, name)

    def device_name(self):
        return "any"


def cases():
    """(class, method, arguments) of everything in their file that compiles ZeRO-3 without offload."""
    compiled_cases = []
    for holder in [value for name, value in vars(load()).items() if name.startswith("Test")]:
        for name, method in [(name, value) for name, value in vars(holder).items() if name.startswith("test")]:
            marks = [mark.args for mark in getattr(method, "pytestmark", []) if mark.name == "parametrize"]
            names = [names for names, _ in marks]
            for values in itertools.product(*(values for _, values in marks)):
                arguments = dict(zip(names, values, strict=True))
                offload = str(getattr(arguments.get("offload_device"), "value", "none"))
                if arguments.get("zero_stage") == 3 and offload == "none":
                    compiled_cases.append((holder.__name__, name, arguments))
    return compiled_cases


def rank_runs_case(rank, world, holder, name, arguments):
    import deepspeed

    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    module = load()
    test = getattr(module, holder)()
    if "offload_device" in arguments:
        arguments = arguments | {"tmpdir": None}
    getattr(test, name)(**arguments)
    engines = [engine for engine in module.compare_loss.__globals__["deepspeed"].engines if hasattr(engine, "zcompile")]
    assert engines and all(engine.zcompile.given_back == "the engine is destroyed" for engine in engines)


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        parameters = cases() if SOURCE else []
        ids = ["-".join([holder, name, *map(str, arguments.values())]) for holder, name, arguments in parameters]
        metafunc.parametrize("case", parameters, ids=ids)


@pytest.fixture(scope="module")
def pool():
    ranks = Ranks(2, "nccl" if torch.cuda.device_count() >= 2 else "gloo")
    yield ranks
    ranks.stop()


def test_their_case(pool, case):
    pool.run(rank_runs_case, *case)
