"""Lifetimes of unsharded parameters, and streams, as the profiler reads them from a trace."""

import pytest

from tests.support.trace_events import memory_report, ranged
from zcompile.profile.allocations import allocations_of
from zcompile.profile.lifetimes import lifetimes_of_step
from zcompile.profile.timeline import STEP, clock


def kernel(name, begin, end, stream, correlation=0):
    return ranged(name, begin, end, category="kernel", stream=stream, correlation=correlation)


GATHERS = [
    ranged(STEP, 0, 2000),
    ranged("zcompile::gather_group_start", 90, 200, category="cpu_op"),
    ranged("zcompile::gather a.weight and 1 more (bf16, 2.0 MiB)", 95, 190),
    ranged("zcompile::gather a.weight (bf16, 1.0 MiB)", 100, 110),
    memory_report(105, 1000, 512, 512, device=0),
    ranged("zcompile::gather b.weight (bf16, 1.0 MiB)", 120, 130),
    memory_report(125, 2000, 100, 612, device=0),
    memory_report(150, 3000, 612, 1224, device=0),  # packed
    ranged("zcompile::gather c.weight (bf16, 1.0 MiB)", 200, 230),
    memory_report(210, 4000, 50, 1274, device=0),
    memory_report(220, 5000, 60, 1334, device=0),  # staging
    memory_report(400, 1000, -512, 822, device=0),
    memory_report(500, 4000, -50, 772, device=0),
    memory_report(510, 5000, -60, 712, device=0),
    memory_report(900, 2000, -100, 612, device=0),
    memory_report(910, 3000, -612, 0, device=0),
]


def test_lifetimes_by_name():
    """On a device whose kernels run 10,000 us after their launches."""
    launches = [
        ranged("cudaLaunchKernel", time, time + 1, category="cuda_runtime", correlation=time)
        for time in range(0, 2000, 10)
    ]
    kernels = [kernel("gemm", time + 10000, time + 10009, 7, time) for time in range(0, 2000, 10)]
    copy = ranged("Memcpy PtoP", 10500, 10600, category="gpu_memcpy", stream=24, correlation=1)
    other = [kernel("ncclDevKernel_AllGather", 10300, 10400, 20), copy]
    trace = {"traceEvents": GATHERS + launches + kernels + other}
    lifetimes = lifetimes_of_step(trace, allocations_of(trace, 0))
    rows = [(entry.parameter, entry.nbytes, entry.begin_ms, entry.end_ms) for entry in lifetimes.parameters]
    assert rows == [("a.weight", 512, 0.11, 0.4), ("b.weight", 100, 0.13, 0.9), ("c.weight", 50, 0.21, 0.5)]
    assert set(lifetimes.streams) == {"compute, stream 7", "NCCL, stream 20", "side, stream 24"}
    assert lifetimes.streams["NCCL, stream 20"] == [pytest.approx((0.3, 0.4), abs=2e-3)]
    assert clock(trace)(205.0) == 10210.0 and clock({"traceEvents": GATHERS})(205.0) == 205.0
    largest = lifetimes_of_step(trace, allocations_of(trace, 0), count=1)
    assert [entry.parameter for entry in largest.parameters] == ["a.weight"]


def test_without_gathers_there_are_no_lifetimes():
    assert lifetimes_of_step({"traceEvents": GATHERS[:1]}, []) is None
