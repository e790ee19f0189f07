"""DeepSpeed's own tests of its compiler, with zcompile in the compiler's place and rtol 1e-5 in place of their 0.5.

In bf16 and fp16 the baseline is eager ZeRO-3 instead of stage 0, which rounds a linear layer elsewhere, and the inner compiler is
`aot_eager`, because Inductor rounds less often: losses of theirs, in which terms cancel, differ by percents between those.

    DEEPSPEED_SOURCE=/a/checkout/of/DeepSpeed python -m pytest tests/test_deepspeed_suite.py

Their files are read from the checkout: tests/unit/v1/compile/test_compile_zero.py, its util.py, and tests/unit/simple_model.py.
Their launcher (unit.common) is replaced by this project's ranks, on CPU or with a GPU each.
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


def close(one, other, message="", rtol=0.5, atol=0.01):
    """Stands in for `unit.common.allclose_on_all_ranks`."""
    torch.testing.assert_close(one, other, rtol=RTOL, atol=atol, msg=lambda text: f"{message} {text}")


def load():
    """Their test module, over stand-ins for their launcher, with zcompile switched on where ZeRO-3 is compiled."""
    sys.path.insert(0, str(Path(SOURCE) / "tests"))
    common, util = types.ModuleType("unit.common"), types.ModuleType("unit.util")
    common.DistributedTest, common.allclose_on_all_ranks = object, close
    util.bf16_required_version_check = lambda: True
    util.skip_on_arch = lambda min_arch: None
    sys.modules.update({"unit.common": common, "unit.util": util})
    module = importlib.import_module("unit.v1.compile.test_compile_zero")
    helpers = importlib.import_module("unit.v1.compile.util")
    helpers.deepspeed = switched = _Switched(helpers.deepspeed)
    gathered = helpers.GatheredParameters
    helpers.GatheredParameters = lambda parameters, **how: gathered([*parameters, *switched.parameters()], **how)
    module.get_accelerator = lambda accelerator=module.get_accelerator(): _NotCpu(accelerator)
    return module


class _Switched:
    """DeepSpeed, whose ZeRO-3 engines have the flag."""

    def __init__(self, deepspeed):
        self._deepspeed = deepspeed
        self.engines = []

    def __getattr__(self, name):
        return getattr(self._deepspeed, name)

    def parameters(self):
        """Of the baseline, where that is eager ZeRO-3."""
        return [one for engine in self.engines[:1] for one in engine.module.parameters() if hasattr(one, "ds_id")]

    def initialize(self, *args, config, **kwargs):
        zero, narrow = config["zero_optimization"], {"bf16", "fp16", "torch_autocast"} & config.keys()
        if zero["stage"] == 0 and narrow:
            config = {name: value for name, value in config.items() if name != "compile"} | {
                "zero_optimization": {"stage": 3}
            }
        elif zero["stage"] == 3:
            flag = {"enabled": True, "inner": "aot_eager" if narrow else "inductor"}
            config = {name: value for name, value in config.items() if name != "compile"} | {"zcompile": flag}
        made = self._deepspeed.initialize(*args, config=config, **kwargs)
        self.engines.append(made[0])
        return made


class _NotCpu:
    """The accelerator, which does not say that it is a CPU: their tests skip there, for DeepCompile's sake."""

    def __init__(self, accelerator):
        self._accelerator = accelerator

    def __getattr__(self, name):
        return getattr(self._accelerator, name)

    def device_name(self):
        return "any"


def cases():
    """(class, method, arguments) of everything in their file that compiles ZeRO-3 without offload."""
    found = []
    for holder in [one for name, one in vars(load()).items() if name.startswith("Test")]:
        for name, method in [(name, one) for name, one in vars(holder).items() if name.startswith("test")]:
            marks = [mark.args for mark in getattr(method, "pytestmark", []) if mark.name == "parametrize"]
            names = [names for names, _ in marks]
            for values in itertools.product(*(values for _, values in marks)):
                arguments = dict(zip(names, values, strict=True))
                offload = str(getattr(arguments.get("offload_device"), "value", "none"))
                if arguments.get("zero_stage") == 3 and offload == "none":
                    found.append((holder.__name__, name, arguments))
    return found


def one_case(rank, world, holder, name, arguments):
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
        found = cases() if SOURCE else []
        names = ["-".join([holder, name, *(str(value) for value in given.values())]) for holder, name, given in found]
        metafunc.parametrize("case", found, ids=names)


@pytest.fixture(scope="module")
def pool():
    made = Ranks(2, "nccl" if torch.cuda.device_count() >= 2 else "gloo")
    yield made
    made.stop()


def test_their_case(pool, case):
    pool.run(one_case, *case)
