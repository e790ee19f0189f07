"""Inductor's code is the same on every rank, and a restart finds it in the cache whatever memory is free."""

import io
import os
import re

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.support.artifacts import cache_in
from tests.support.meshes import as_rank
from tests.support.reference import compiled


class Uneven(nn.Module):
    """Of three ranks, the last has fewer rows of one parameter, and the last two have none of another."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.b(self.a(x).relu()) * self.scale


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """A cache folder in which the second test finds the C++ kernels of the first."""
    folder = tmp_path_factory.mktemp("inductor")
    with cache_in(folder):
        yield folder


def step():
    torch.manual_seed(0)
    compiled(Uneven(), inner="inductor")(torch.ones(2, 5)).sum().backward()


def test_code_is_the_same_on_all_ranks(kernels):
    codes, number = [], r"# AOT ID: \['\d+_"  # of the graph in this process, which each rank would count from 0
    for rank in range(3):
        with as_rank(rank, 3), torch._inductor.config.patch(fx_graph_cache=False):
            step()
        written = [path for path in kernels.rglob("*.py") if "def call" in path.read_text()]
        codes.append(sorted(re.sub(number, "", path.read_text()) for path in written))
        for path in written:
            path.unlink()
    assert len(codes[0]) == 2, "a forward and a backward"
    assert codes[0] == codes[1] == codes[2]


def free_memory(monkeypatch, nbytes):
    """Let what tells a process how much memory is free say `nbytes`."""
    sysconf, page, read = os.sysconf, os.sysconf("SC_PAGE_SIZE"), open
    meminfo = f"MemTotal: 1073741824 kB\nMemFree: {nbytes >> 10} kB\nMemAvailable: {nbytes >> 10} kB\n"

    def open_file(file, *args, **kwargs):
        if file != "/proc/meminfo":
            return read(file, *args, **kwargs)
        return io.BytesIO(meminfo.encode()) if "rb" in args else io.StringIO(meminfo)

    monkeypatch.setattr("builtins.open", open_file)
    monkeypatch.setattr(os, "sysconf", lambda name: nbytes // page if name == "SC_AVPHYS_PAGES" else sysconf(name))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (nbytes, 1 << 40))


def test_a_run_with_other_free_memory_hits_the_cache(kernels, monkeypatch):
    for free_gib, expected in ((64, "fxgraph_cache_miss"), (3, "fxgraph_cache_hit")):
        free_memory(monkeypatch, free_gib << 30)
        counters.clear()
        with as_rank(0, 3):
            step()
        names = ("fxgraph_cache_hit", "fxgraph_cache_miss")
        assert {name: n for name, n in counters["inductor"].items() if name in names} == {expected: 2}
