"""A thread compares what ranks started."""

import re
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.blocks import OneOfTwo, shard_in_blocks
from tests.support.meshes import short_mesh
from tests.support.time_limits import scaled
from zcompile.ranks import order_watch
from zcompile.ranks.order_watch import difference
from zcompile.ranks.process_groups import Groups

MESSAGE = r"number 2 is gather '[ab].weight' on rank [01] and gather '[ab].weight' on rank [01]"


def test_ranks_that_read_different_parameters_of_one_size_are_told(rank, world):
    model = shard_in_blocks(OneOfTwo(), short_mesh(scaled(5)))
    model(torch.ones(1, 6), False)
    with pytest.raises(RuntimeError, match=MESSAGE):
        for _ in range(100):
            model(torch.ones(1, 6), rank == 1)
            time.sleep(0.1)


@pytest.mark.parametrize("trains", [False, True])
def test_ranks_that_wait_for_parameters_of_other_sizes_are_told_long_before_the_timeout(rank, world, trains):
    model = shard_in_blocks(OneOfTwo(7), short_mesh(1000))
    model(torch.ones(1, 6), False)
    begin = time.monotonic()
    with torch.set_grad_enabled(trains), pytest.raises(RuntimeError, match=MESSAGE):
        model(torch.ones(1, 6), rank == 1).sum().backward()
    assert time.monotonic() - begin < scaled(20)
    with pytest.raises(RuntimeError, match=MESSAGE):  # nor does anything else go on
        model(torch.ones(1, 6), False)


def test_a_rank_that_comes_late_is_told_why_its_wait_ends(rank, world):
    """Rank 1 is in a wait when the thread finds the difference."""
    model = shard_in_blocks(OneOfTwo(), short_mesh(scaled(5)))
    model(torch.ones(1, 6), False)
    model(torch.ones(1, 6), rank == 1)
    with pytest.raises(RuntimeError, match=MESSAGE):
        for _ in range(100):
            time.sleep(scaled(6) if rank == 0 else 0)
            model(torch.ones(1, 6), rank == 1)


def test_ranks_that_do_the_same_are_not_told(rank, world):
    model = shard_in_blocks(OneOfTwo(), short_mesh(scaled(5)))
    for _ in range(50):
        time.sleep(0.04 * rank)
        for second in (False, True):
            model(torch.ones(1, 6), second).sum().backward()


EXIT = """
import atexit, os, threading, time
import torch.distributed as dist
from zcompile.ranks.order_watch import watch_order

class Runtime:
    def order(self):
        begun.set()
        time.sleep(0.5)
        return []

    def order_failure(self):
        return ""

    def nccl_failure(self):
        return ""

def leave():
    os._exit(any(thread.name == "zcompile order" for thread in threading.enumerate()))

atexit.register(leave)  # called last
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
begun, runtime = threading.Event(), Runtime()
watch_order(runtime, Groups("gather", "reduce", "", rank=0, world=1, number=0), 1.0)
begun.wait()
"""


def test_the_thread_ends_before_the_interpreter():
    """A thread in a call of C++ when the interpreter ends would end the process by an abort."""
    assert subprocess.run([sys.executable, "-c", EXIT], timeout=scaled(120)).returncode == 0


class FailedRuntime:
    """As of a model whose NCCL lost another rank."""

    def __init__(self):
        self.said, self.aborted = "", threading.Event()

    def order(self):
        return [(3, 7, "gather 'a'")]

    def order_failure(self):
        return self.said

    def nccl_failure(self):
        return "NCCL lost another rank"

    def fail_order(self, message):
        self.said = message

    def abort_nccl(self):
        self.aborted.set()


def test_a_lost_rank_makes_the_next_collective_an_error_and_ends_those_that_wait(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(order_watch, "base_store", lambda: store)
    runtime, groups = FailedRuntime(), Groups("gather", "reduce", "", rank=0, world=2, number=0)
    watch = order_watch.OrderWatch(runtime, groups, 1.0)
    assert runtime.aborted.wait(scaled(10))
    watch.close()
    assert re.search(r"rank 0 can no longer .* lost another rank.* is number 3, gather 'a'; rank 1", runtime.said)
    assert watch.store.get("failed").decode() == runtime.said


def test_what_is_compared():
    alike = [(256, 7, ""), (300, 8, "gather 'a'"), (301, 9, "gather 'b'")]
    assert difference({0: alike, 1: alike[:2]}) == ""
    assert difference({0: alike, 1: [(257, 1, "gather 'c'")]}) == ""  # no number that both know
    other = [(300, 8, "gather 'a'"), (301, 3, "reduce 'b'")]
    assert "number 301 is gather 'b' on rank 0 and reduce 'b' on rank 1" in difference({0: alike, 1: other})
    assert "between number 1 and number 256" in difference({0: alike, 1: [(256, 6, "")]})
