"""How the profiler divides a traced step into compute, communication, exposed and idle time, and counts bytes sent."""

import random
from types import SimpleNamespace

import pytest

from zcompile.profile.timeline import Parts, clip, length, parts_of_step, subtract, union, wire_bytes
from zcompile.profile.worker import MOST_TRACES, Run


def test_intervals_against_points():
    """union, clip and subtract, against sets of integers."""
    generator = random.Random(0)

    def intervals():
        begins = [generator.randrange(40) for _ in range(generator.randrange(8))]
        return [(begin, begin + generator.randrange(1, 6)) for begin in begins]

    points = lambda intervals: {point for begin, end in intervals for point in range(begin, end)}
    for _ in range(300):
        first, second = intervals(), intervals()
        merged, removed = union(first), union(second)
        assert points(merged) == points(first) and length(merged) == len(points(first))
        assert points(subtract(merged, removed)) == points(first) - points(second)
        assert points(clip(merged, (10, 25))) == points(first) & set(range(10, 25))


def event(name, category, begin, end, thread=1, **args):
    """What takes time, from `begin` to `end` in microseconds, as torch's profiler writes it in a trace."""
    times = {"ts": begin, "dur": end - begin, "tid": thread, "args": {"stream": thread, **args}}
    return {"ph": "X", "name": name, "cat": category, **times}


STEP = event("zcompile.profile::step", "user_annotation", 0, 1000)

ON_GPU = [
    event("rotate", "kernel", 0, 0.5),
    event("gemm", "kernel", 100, 400),
    event("ncclDevKernel_AllGather", "kernel", 300, 600, 2),
    event("ncclDevKernel_AllReduce", "kernel", 550, 570),  # a norm, on the stream of compute
    event("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 550, 650, 3),
    event("void zcompile::cuda::cast_kernel<float, __nv_bfloat16>", "kernel", 600, 640, 3),
    event("void zcompile::cuda::adam_kernel<__nv_bfloat16>", "kernel", 700, 900),  # a step that writes copies
    event("adam", "kernel", 999.5, 1000),
]

ON_CPU = [
    STEP,
    event("aten::mm", "cpu_op", 100, 400),
    event("zcompile::gather_wait", "cpu_op", 400, 600),
    event("aten::copy_", "cpu_op", 450, 500),  # inside the wait
    event("gloo:all_gather", "user_annotation", 300, 650, 2),
    event("gloo:recv", "user_annotation", 50, 600),  # from its start to the wait
    event("aten::add", "cpu_op", 700, 900),
]

# The same from 100 us on in a CUDA graph, whose kernels are on streams of the driver's choice.
IN_GRAPH = [
    event("rotate", "kernel", 0, 0.5),
    event("cudaGraphLaunch", "cuda_runtime", 0, 50, correlation=7),
    event("gemm", "kernel", 100, 250, 5, correlation=7),
    event("gemm", "kernel", 250, 400, 6, correlation=7),
    event("memcpy128", "kernel", 300, 600, 6, correlation=7),  # of the driver: a copy within the device
    event("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 550, 650, 6, correlation=7),
    event("Memset (Unknown)", "gpu_memset", 700, 900, 5, correlation=7),
    event("adam", "kernel", 999.5, 1000),
]


@pytest.mark.parametrize("events", [ON_GPU, IN_GRAPH, ON_CPU], ids=["gpu", "graph", "cpu"])
def test_parts_of_a_step(events):
    parts = parts_of_step({"traceEvents": events}, 1)
    assert (parts.step_ms, parts.compute_ms, parts.communication_ms) == pytest.approx((1.0, 0.5, 0.35), abs=2e-3)
    assert (parts.exposed_ms, parts.idle_ms) == pytest.approx((0.25, 0.25), abs=2e-3)
    assert parts.timeline["communication"] == [pytest.approx((0.3, 0.65))]
    assert parts_of_step({"traceEvents": events}, 2).exposed_ms == parts.exposed_ms / 2
    faster = parts.at_speed(0.8)
    assert (faster.traced_ms, faster.step_ms, faster.idle_ms) == pytest.approx((1.0, 0.8, 0.05), abs=2e-3)
    waiting = parts.at_speed(0.6)  # for another rank's host, which the trace slowed too
    assert (waiting.step_ms, waiting.compute_ms, waiting.exposed_ms, waiting.idle_ms) == pytest.approx(
        (0.6, 0.5, 0.1, 0.0), abs=2e-3
    )
    assert parts.at_speed(0.4).step_ms == parts.compute_ms  # what the device computed is not denied


@pytest.mark.parametrize(
    "traced_ms, taken_ms", [([10.4, 9.0], 10.4), ([20.0, 10.6], 10.6), ([20.0, 13.0, 14.0, 10.0], 13.0)]
)
def test_a_slow_trace_is_made_again(monkeypatch, traced_ms, taken_ms):
    """Steps take 10.5 ms. The first trace about as fast is taken, or else the fastest of as many as are made."""
    times = iter(traced_ms)
    run = object.__new__(Run)
    run.cuda, run.job = True, SimpleNamespace(trace=True)
    run.traced = lambda: Parts(0.0, next(times), 0.0, 0.0, 0.0, 0.0, {})
    monkeypatch.setattr("zcompile.profile.worker.dist.broadcast_object_list", lambda objects: None)
    monkeypatch.setattr("zcompile.profile.worker.dist.get_rank", lambda: 0)
    assert run.parts(10.5).traced_ms == taken_ms
    assert MOST_TRACES == 3


def test_bytes_on_the_wire():
    """On eight ranks: a gather to 8 x 100 in bf16, a scatter of 800 in fp32, a sum of 10.

    Barriers and broadcasts do not count.
    """

    def nccl(name, into, out, dtype):
        args = {"Collective name": name, "In msg nelems": into, "Out msg nelems": out, "dtype": dtype}
        return event("record_param_comms", "user_annotation", 0, 1, **args)

    counted = [
        nccl("_allgather_base", 100, 800, "BFloat16"),
        nccl("_reduce_scatter_base", 800, 100, "Float"),
        nccl("allreduce", 10, 10, "Float"),
    ]
    others = [nccl("barrier", 1, 1, "Byte"), nccl("broadcast", 5, 5, "Float")]
    assert wire_bytes({"traceEvents": counted + others}, 8) == 1600 + 3200 + 40

    def gloo(name, elements, dtype):
        args = {"Input Dims": [[elements // 2, 2]], "Input type": [dtype]}
        return event(f"gloo:{name}", "user_annotation", 0, 1, **args)

    events = [gloo("all_gather", 100, "c10::BFloat16"), gloo("all_reduce", 810, "float"), gloo("broadcast", 4, "float")]
    assert wire_bytes({"traceEvents": events}, 8) == 1600 + 3240
    messages = [gloo(name, 200, "byte") for name in ("send", "recv") for _ in range(7)]  # a gather to 8 x 100 in bf16
    assert wire_bytes({"traceEvents": messages}, 8) == 1600
