"""Run the tests of FSDP2 in a checkout of pytorch with zcompile, or FSDP2 itself, on CPU ranks; see README.md.

Each test runs in processes of its own, which are forked from one that has imported the tests. torch's own classes of
tests, which start processes and ask for GPUs, are replaced while the tests are imported.
"""

import argparse
import datetime
import json
import os
import re
import signal
import sys
import tempfile
import traceback
import types
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed, common_fsdp, common_utils
from torch.testing._internal.distributed._tensor import common_dtensor

from tests.fsdp2 import shim

FOLDER = "test/distributed/_composable"
FILES = ("fsdp/test_fully_shard_*.py", "test_composability/test_2d_composability.py")
FSDP1 = re.compile("FSDP1|fsdp1|TestNew2d")  # tests of the older FullyShardedDataParallel
FOUR_RANKS = re.compile("HSDP|ND|2D|2d|hsdp|tp_|force_sum_both")  # tests of meshes of two dimensions
OUTCOMES = ("passed", "passed, other collectives", "passed in part", "not offered", "failed")  # the last counts
COLLECTIVES = r"(gather|scatter|reduce|backward)_count\b|comm_counts|total_counts|\bevents\b"
REPLACED = (  # in the source of tests: GPUs, and assertions about FSDP2's own collectives and hooks
    (r"(['\"])cuda\1", "'cpu'"),
    (r"\.cuda\(\)", ".cpu()"),
    (r"torch\.cuda\.", "torch.cpu."),
    (r"device_ids=\[self\.rank\]", "device_ids=None"),
    (r"torch\.accelerator\.current_accelerator\([^)]*\)", "torch.device('cpu')"),
    (r"torch\.accelerator\.(synchronize|set_device_index)\(.*\)", "None"),
    (rf"self\.(assert\w+)\((?=.*({COLLECTIVES}))", r"self.check_collectives(self.\1, "),
)
SEEN = {"passed"}  # of OUTCOMES, by the test that runs on this rank


class RankTest(common_utils.TestCase):
    """A test on one of the ranks, all of which are there when it starts."""

    device_type = backend = "cpu"
    rank = property(lambda self: dist.get_rank())
    process_group = property(lambda self: dist.group.WORLD)
    build_device_mesh = lambda self: dist.init_device_mesh("cpu", (dist.get_world_size(),))

    def run_subtests(self, config: dict[str, list[Any]], test: Any, *args: Any, **kwargs: Any) -> None:
        """Run `test` for each combination of `config`, also behind one that zcompile does not offer."""

        def call(*args: Any, **kwargs: Any) -> None:
            print("SUBTEST", kwargs)
            try:
                test(*args, **kwargs)
            except shim.NotOffered as missing:
                print("NOT OFFERED", missing)
                SEEN.add("passed in part")
                shim.forget_waiting()

        common_distributed.run_subtests(self, config, call, *args, **kwargs)

    def check_collectives(self, check: Any, *args: Any) -> None:
        """An assertion about which collectives FSDP2 starts, and in which order. zcompile starts others."""
        try:
            check(*args)
        except AssertionError:
            if shim.ENGINE.groups == "fsdp2":
                raise
            SEEN.add("passed, other collectives")


def prepare() -> None:
    as_it_is = lambda *args, **kwargs: lambda test: test
    torch.cpu.device_count = lambda: 8
    torch.cpu._sleep = lambda cycles: None
    common_utils.get_cycles_per_ms = common_fsdp.get_cycles_per_ms = lambda *args: 1.0
    for name in ("skip_if_lt_x_gpu", "requires_nccl_version", "skip_if_rocm_arch_multiprocess"):
        setattr(common_distributed, name, as_it_is)
    common_fsdp.compiled_fsdp_test = as_it_is
    for name in ("FSDPTest", "FSDPTestMultiThread", "FSDPTestContinuous"):
        setattr(common_fsdp, name, RankTest)
    common_dtensor.DTensorContinuousTestBase = RankTest
    common_dtensor.with_comms = lambda test: test


def tests_of(path: Path) -> dict[str, type]:
    """Name -> class, of each test in a file."""
    source = path.read_text()
    for old, new in REPLACED:
        source = re.sub(old, new, source)
    module = sys.modules[path.stem] = types.ModuleType(path.stem)
    exec(compile(source, str(path), "exec"), module.__dict__)
    short = path.stem.removeprefix("test_").removeprefix("fully_shard_")
    return {
        f"{short}.{kind.__name__}.{name}": kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, RankTest) and kind is not RankTest
        for name in dir(kind)
        if name.startswith("test_") and not FSDP1.search(kind.__name__ + name)
    }


def run_rank(kind: type, method: str, rank: int, world: int, store: str) -> None:
    """Run a test as one of the ranks, and exit with the position of the outcome in OUTCOMES."""
    try:
        dist.init_process_group("gloo", f"file://{store}", datetime.timedelta(seconds=60), world, rank)
        common_utils.set_rng_seed()
        kind.world_size = property(lambda self: world)  # that of tests depends on the number of GPUs
        getattr(kind(method), method)()
        dist.barrier()
    except shim.NotOffered as missing:
        print("NOT OFFERED", missing)
        SEEN.add("not offered")
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        SEEN.add("failed")
    sys.stdout.flush()
    os._exit(max(OUTCOMES.index(each) for each in SEEN))


def run_test(name: str, kind: type, log: TextIO) -> str:
    """Run a test on its ranks: one of OUTCOMES. It fails after five minutes."""
    world = 8 if "3D" in name else 4 if FOUR_RANKS.search(name) else 1 if "WorldSize1" in name else 2
    print("=====", name, file=log, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[int] = []
        for rank in range(world):
            ranks.append(os.fork())
            if ranks[-1] == 0:
                signal.alarm(300)  # kills
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                run_rank(kind, name.rpartition(".")[2], rank, world, f"{folder}/store")
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    return "failed" if min(codes) < 0 else OUTCOMES[max(codes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-source", type=Path, required=True, help="a checkout of pytorch")
    parser.add_argument("--as", dest="groups", choices=("fsdp2", "blocks", "small", "units"), default="blocks")
    parser.add_argument("--compiled", action="store_true", help="compile each model with zcompile's backend")
    parser.add_argument("--tests", default="", help="a regular expression of names")
    parser.add_argument("--only", type=Path, help="only what passed in this file, which --save wrote")
    parser.add_argument("--save", type=Path, default=Path("fsdp2.json"), help="for results; logs go to .log beside it")
    options = parser.parse_args()
    prepare()
    if options.groups != "fsdp2":
        shim.install(options.groups, options.compiled)
        common_fsdp.fully_shard, common_fsdp.FSDPModule = shim.fully_shard, shim.FSDPModule
    tests: dict[str, type] = {}
    for path in (each for pattern in FILES for each in sorted((options.torch_source / FOLDER).glob(pattern))):
        try:
            tests |= tests_of(path)
        except Exception as error:
            print(f"cannot import {path.name}: {error!r}")
    passed = json.loads(options.only.read_text()) if options.only else dict.fromkeys(tests, "passed")
    results: dict[str, str] = {}
    with options.save.with_suffix(".log").open("w") as log:
        for name, kind in tests.items():
            if re.search(options.tests, name) and passed.get(name) == "passed":
                results[name] = run_test(name, kind, log)
                print(f"{results[name]:26} {name}", flush=True)
    print({outcome: list(results.values()).count(outcome) for outcome in OUTCOMES})
    options.save.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
