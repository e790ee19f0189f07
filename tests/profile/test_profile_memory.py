"""What the profiler reads from a trace: memory by kind, windows, bytes on the wire. Traces are made up; each has its oracle beside it."""

import math
import random
from dataclasses import replace
from itertools import count

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zcompile.analysis.hardware import H200
from zcompile.options import Settings
from zcompile.planning.command import install_trace_readers
from zcompile.planning.curve import thinned
from zcompile.planning.explain import Explanation, PlannedGraph, explanation, in_order, trace
from zcompile.profile.allocations import KINDS, allocations_of
from zcompile.profile.lifetimes import lifetimes_of_step
from zcompile.profile.memory import memory_of_step
from zcompile.profile.models import Workload
from zcompile.profile.owned import WALK, Owned, Walks
from zcompile.profile.plan import planned
from zcompile.profile.timeline import STEP, clock
from zcompile.profile.wire import wire_bytes

GAP = 100.0  # us between things that happen
CALLS = [  # from the outermost to the innermost range around an allocation, and what it is for
    ([], "activations"),
    (["aten::mm", "aten::empty"], "activations"),
    (["zcompile::gather_start", "aten::empty"], "full"),
    (["zcompile::gather a.weight (bf16, 1.0 MiB)"], "full"),
    (
        [
            "zcompile::gather a.weight and 2 more (bf16, 3.0 MiB)",
            "zcompile::gather a.weight (bf16, 1.0 MiB)",
            "aten::empty",
        ],
        "full",
    ),
    (
        ["zcompile::gather_group_start", "zcompile::gather a.weight and 2 more (bf16, 3.0 MiB)", "aten::empty"],
        "transport",
    ),
    (["FSDP::all_gather (0)", "c10d::_allgather_base_"], "transport"),
    (["FSDP::pre_backward (1)", "FSDP::all_gather (0)", "fsdp::all_gather_copy_in"], "full"),
    (["FSDP::all_gather (0)", "FSDP::post_backward_reduce (0)"], "gradients"),
]


def ranged(name, begin, end, thread=1, category="user_annotation", **args):
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": end - begin, "tid": thread, "args": args}


def report(time, address, nbytes, total, thread=1, device=None, reserved=1 << 50):
    kind, index = (0, -1) if device is None else (1, device)
    args = {
        "Addr": address,
        "Bytes": nbytes,
        "Total Allocated": total,
        "Total Reserved": reserved,
        "Device Type": kind,
        "Device Id": index,
    }
    return {"ph": "i", "name": "[memory]", "cat": "cpu_instant_event", "ts": time, "tid": thread, "args": args}


class Made:
    """A trace of random allocations, and what it was made from."""

    def __init__(self, generator: random.Random, device: int | None):
        self.device, self.events = device, []
        self.truth: list[list] = []  # [begins, ends, nbytes, kind, address] of each allocation
        self.times = count(1)
        self.unknown_bytes = 512 * generator.randrange(
            9
        )  # there before the trace, known to the allocator of a GPU alone
        self.total = self.unknown_bytes if device is not None else 0
        free = list(range(1 << 20, 60 << 20, 1 << 20))  # addresses
        generator.shuffle(free)
        for kind in ("shards", "optimizer", "gradients"):
            self.truth.append([-math.inf, math.inf, 512 * generator.randrange(1, 9), kind, free.pop()])
            self.total += self.truth[-1][2] if device is not None else 0
        alive: list[list] = []
        for _ in range(150):
            time, thread = next(self.times) * GAP, generator.choice((1, 2))
            if alive and generator.random() < 0.45:
                block = alive.pop(generator.randrange(len(alive)))
                block[1] = time
                free.append(block[4])
                self.report(time, block[4], -block[2], thread)
            else:
                names, kind = generator.choice(CALLS)
                for depth, name in enumerate(names, start=1):
                    self.events.append(ranged(name, time - GAP / 2 / depth, time + GAP / 2 / depth, thread))
                alive.append(
                    [time, math.inf, 512 * generator.randrange(1, 2000), kind, free.pop(generator.randrange(len(free)))]
                )
                self.truth.append(alive[-1])
                self.report(time, alive[-1][4], alive[-1][2], thread)
                if generator.random() < 0.1:
                    self.report(time, alive[-1][4], 1 << 40, thread, other=True)
                if device is not None and generator.random() < 0.2:
                    self.compose(generator, time + GAP / 4, thread, free.pop())
        self.end = next(self.times) * GAP
        self.step = (self.end / 2, self.end)
        self.walk(generator, alive)

    def report(self, time, address, nbytes, thread, other=False):
        if other:  # of another device
            self.events.append(
                report(time, address, nbytes, nbytes, thread, 0 if self.device is None else self.device + 1)
            )
            return
        self.total += nbytes
        self.events.append(report(time, address, nbytes, self.total, thread, self.device))

    def compose(self, generator, time, thread, address):
        """A full parameter in the transport's memory, of which the allocator knows nothing; a tenth was there before the trace."""
        nbytes, ends = 512 * generator.randrange(1, 2000), next(self.times) * GAP
        begins = -math.inf if generator.random() < 0.1 else time
        if begins == time:
            self.events.append(
                ranged("zcompile::gather b.weight (bf16, 1.0 MiB)", time - GAP / 16, time + GAP / 16, thread)
            )
            self.events.append(report(time, address, nbytes, 0, thread, self.device, reserved=0))
        self.events.append(report(ends, address, -nbytes, 0, thread, self.device, reserved=0))
        self.truth += [[begins, ends, nbytes, "full", address], [begins, ends, -nbytes, "transport", address]]

    def walk(self, generator, alive):
        """At the end: what was there before, and some of what was made, is known by its address, which counts more than ranges."""
        known = self.truth[:3] + [block for block in alive if generator.random() < 0.3]
        for block in known[3:]:
            block[3] = generator.choice(("gradients", "shards"))
        owned = [Owned(block[4], block[2], block[3]) for block in known]
        self.walks = Walks(None, on_gpu=False)
        self.walks.found = [owned]
        if (
            self.device is not None
        ):  # whose allocator gives out more than is asked for, and has not given out a transport's memory
            self.walks.before = {block[4]: block[2] for block in known[:3]}
            self.walks.found = [
                [replace(one, nbytes=one.nbytes - 500) for one in owned] + [Owned(1 << 40, 1 << 30, "gradients")]
            ]
        self.events += [ranged(WALK, self.end - GAP / 4, self.end - GAP / 8), ranged(STEP, *self.step)]

    def held(self, time) -> dict[str, int]:
        found = dict.fromkeys(KINDS, 0)
        for begins, ends, nbytes, kind, _ in self.truth:
            found[kind] += nbytes if begins <= time < ends else 0
        found["activations"] += self.unknown_bytes if self.device is not None else 0
        return found


@pytest.mark.parametrize("device", [None, 3], ids=["cpu", "cuda"])
def test_memory_by_kind_against_what_the_trace_was_made_from(device):
    generator = random.Random(0)
    for _ in range(20):
        made = Made(generator, device)
        generator.shuffle(made.events)
        trace = {"traceEvents": made.events}
        blocks = allocations_of(trace, device)
        for block in blocks if device is None else ():
            block.lost = False  # what is not freed here lives on
        found = memory_of_step(trace, made.walks, blocks, device, transport_bytes=7000, peak_bytes=None)
        begin, end = made.step
        for at, ms in enumerate(found.ms):
            expected = made.held(begin + 1e3 * ms + GAP / 10)
            expected["transport"] += 7000
            assert {kind: found.kinds[kind][at] for kind in KINDS} == expected
        peak = (
            max(
                sum(made.held(time).values())
                for time in map(float, range(int(begin), int(end)))
                if time % GAP in (0.0, GAP / 2)
            )
            + 7000
        )
        assert sum(found.at_peak.values()) == peak


def test_frees_that_nobody_saw():
    """Memory is freed by another thread: some of it is given out again, or, of a gather's, nothing is heard any more."""
    gather = "zcompile::gather_group_start"
    events = [
        ranged(STEP, 0, 1000),
        report(110, 5000, 400, 400),
        report(300, 5100, 50, 450),  # inside of it
        ranged(gather, 400, 500),
        report(410, 9000, 30, 480),
        report(600, 20000, 7, 487),
        report(700, 5100, -50, 437),
        report(800, 19999, 2, 439),  # begins before what it takes the place of
    ]
    trace = {"traceEvents": events}
    blocks = allocations_of(trace, None)
    found = memory_of_step(trace, Walks(None, on_gpu=False), blocks, None, 0, None)
    assert [(block.begins, block.ends, block.lost) for block in blocks] == [
        (110, 300, True),
        (300, 700, False),
        (410, 500, True),
        (600, 800, True),
        (800, math.inf, True),
    ]
    assert found.kinds["full"] == [0, 0, 0, 30, 0, 0, 0, 0]
    assert found.kinds["activations"] == [0, 400, 50, 50, 50, 57, 7, 2]
    assert sum(found.at_peak.values()) == 400 and found.allocator_bytes is None


def test_a_thinned_curve_keeps_its_peak():
    generator = random.Random(1)
    points = sorted((generator.random(), generator.randrange(1 << 30)) for _ in range(5000))
    few = thinned(points, 100, lambda point: point[1])
    assert 50 < len(few) <= 102 and set(few) <= set(points) and few == sorted(few)
    assert max(few, key=lambda point: point[1]) == max(points, key=lambda point: point[1])
    assert thinned(points[:7], 100, lambda point: point[1]) == points[:7]


def kernel(name, begin, end, stream, correlation=0):
    return ranged(name, begin, end, category="kernel", stream=stream, correlation=correlation)


GATHERS = [
    ranged(STEP, 0, 2000),
    ranged("zcompile::gather_group_start", 90, 200, category="cpu_op"),
    ranged("zcompile::gather a.weight and 1 more (bf16, 2.0 MiB)", 95, 190),
    ranged("zcompile::gather a.weight (bf16, 1.0 MiB)", 100, 110),
    report(105, 1000, 512, 512, device=0),
    ranged("zcompile::gather b.weight (bf16, 1.0 MiB)", 120, 130),
    report(125, 2000, 100, 612, device=0),
    report(150, 3000, 612, 1224, device=0),  # packed
    ranged("zcompile::gather c.weight (bf16, 1.0 MiB)", 200, 230),
    report(210, 4000, 50, 1274, device=0),
    report(220, 5000, 60, 1334, device=0),  # staging
    report(400, 1000, -512, 822, device=0),
    report(500, 4000, -50, 772, device=0),
    report(510, 5000, -60, 712, device=0),
    report(900, 2000, -100, 612, device=0),
    report(910, 3000, -612, 0, device=0),
]


def test_windows_by_name():
    """On a device whose kernels run 10,000 us after their launches."""
    launches = [
        ranged("cudaLaunchKernel", time, time + 1, category="cuda_runtime", correlation=time)
        for time in range(0, 2000, 10)
    ]
    kernels = [kernel("gemm", time + 10000, time + 10009, 7, time) for time in range(0, 2000, 10)]
    copy = ranged("Memcpy PtoP", 10500, 10600, category="gpu_memcpy", stream=24, correlation=1)
    other = [kernel("ncclDevKernel_AllGather", 10300, 10400, 20), copy]
    trace = {"traceEvents": GATHERS + launches + kernels + other}
    found = lifetimes_of_step(trace, allocations_of(trace, 0))
    assert [(one.parameter, one.nbytes) for one in found.windows] == [
        ("a.weight", 512),
        ("b.weight", 100),
        ("c.weight", 50),
    ]
    assert [(one.begin_ms, one.end_ms) for one in found.windows] == [(0.11, 0.4), (0.13, 0.9), (0.21, 0.5)]
    assert set(found.streams) == {"compute, stream 7", "NCCL, stream 20", "side, stream 24"}
    assert found.streams["NCCL, stream 20"] == [pytest.approx((0.3, 0.4), abs=2e-3)]
    assert clock(trace)(205.0) == 10210.0 and clock({"traceEvents": GATHERS})(205.0) == 205.0
    assert [one.parameter for one in lifetimes_of_step(trace, allocations_of(trace, 0), count=1).windows] == [
        "a.weight"
    ]


def test_windows_only_of_gathers():
    assert lifetimes_of_step({"traceEvents": GATHERS[:1]}, []) is None


def graph(kind, live, full, saved=0, ms=10.0):
    """One that has `live` and `full` bytes in its first half, and half of both in its second; and one transfer."""
    memory = ((0.0, live, full), (ms / 2, live // 2, full // 2))
    return PlannedGraph(kind, 2, (), (), 0, 0, ms - 0.25, 0.25, 0.0, full, full, live, saved, memory, ((1.0, 3.0),))


def test_a_plan_as_a_course():
    """Forwards, then backwards in reverse; what others have saved, and gradients of the first micro-step, are there beside each."""
    first = graph("forward", 100, 40), graph("backward", 80, 40, saved=16)
    graphs = (*first, graph("forward", 60, 20), graph("backward", 50, 20, saved=8))
    assert [(one.live_bytes, saved) for one, saved in in_order(graphs)] == [(100, 0), (60, 16), (50, 16), (80, 0)]
    explained = Explanation(2, "nccl", "", 0, 10, graphs, 5.0, 45.0, 1.0, 1100, 1000, 20, 0.0, "guesses", (), 0)
    found = planned(explained, micro_steps=2)
    assert (found.step_ms, found.exposed_ms, found.rests_on) == (85.0, 2.0, "guesses")
    assert planned(replace(explained, adding_ms=3.0), micro_steps=3).step_ms == 3 * 40 + 2 * 3 + 5
    forwards = [(0, 1100, 1040), (5, 1050, 1020), (10, 1076, 1020), (15, 1046, 1010)]
    once = forwards + [(20, 1066, 1020), (25, 1041, 1010), (30, 1080, 1040), (35, 1040, 1020)]
    gradients = 4 * 10 // 2
    again = [(40 + ms, nbytes + gradients, full) for ms, nbytes, full in once]
    assert found.memory == [*once, *again, (80, 1000 + gradients, 1000), (85, 1000 + gradients, 1000)]
    assert found.peak_bytes == 1120 and found.transfers == [(10 * at + 1, 10 * at + 3) for at in range(8)]


def test_a_plan_of_micro_steps_that_share():
    """All but the first forward find full what was gathered, which is then there beside them."""
    graphs = graph("forward", 100, 40), graph("backward", 80, 40, saved=16)
    again = graph("forward", 70, 10, ms=8.0), graph("backward", 60, 10, saved=16, ms=6.0)
    explained = Explanation(2, "nccl", "", 0, 10, graphs, 5.0, 25.0, 0.5, 1100, 1000, 20, 3.0, "guesses", again, 30)
    assert planned(explained, micro_steps=1).step_ms == 25.0
    found = planned(explained, micro_steps=2)
    assert found.step_ms == 10 + 6 + 8 + 6 + 5
    held = [(0, 0, 40), (10, 30, 10), (16, 30 + 20, 10), (24, 30 + 20, 10)]  # ms, what is kept and gradients, full
    live = (100, 60, 70, 60)
    assert found.memory[:8:2] == [
        (ms, 1000 + more + nbytes, 1000 + min(more, 30) + full)
        for (ms, more, full), nbytes in zip(held, live, strict=True)
    ]
    assert found.memory[-1] == (35.0, 1020, 1000)


@pytest.mark.parametrize("transport", ["p2p", "nccl"])
def test_a_plan_as_a_course_ends_with_the_gradients_that_backward_left(transport):
    """On two ranks, peer to peer, half of a shard's gradients lie where published shards did."""
    linear = nn.Linear(1024, 1024, bias=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        names = install_trace_readers(Workload(linear, lambda step, rank: None, None), torch.bfloat16)
        plan = Settings().plan(H200.over(transport, 2), 1 << 34)
        x = torch.zeros(8, 1024, dtype=torch.bfloat16)
        traced = trace(lambda: linear(x).sum(), plan, lambda leaf: names.get(id(leaf)))
    explained = explanation(traced, plan, 1024 * 1024, 1)
    assert explained.gradient_bytes == 1024 * 1024 * 4 // 2 // (2 if transport == "p2p" else 1)
    found = planned(explained, 1)
    assert (
        found.memory[-1][1]
        == explained.static_bytes + explained.gradient_bytes
        <= found.peak_bytes
        == explained.peak_bytes
    )


def test_bytes_on_the_wire():
    """Of eight ranks: a gather to 8 x 100 in bf16, a scatter of 800 in fp32, a sum of 10; barriers and broadcasts do not count."""

    def nccl(name, into, out, dtype):
        return ranged(
            "record_param_comms",
            0,
            1,
            **{"Collective name": name, "In msg nelems": into, "Out msg nelems": out, "dtype": dtype},
        )

    counted = [
        nccl("_allgather_base", 100, 800, "BFloat16"),
        nccl("_reduce_scatter_base", 800, 100, "Float"),
        nccl("allreduce", 10, 10, "Float"),
    ]
    others = [nccl("barrier", 1, 1, "Byte"), nccl("broadcast", 5, 5, "Float")]
    assert wire_bytes({"traceEvents": counted + others}, 8) == 1600 + 3200 + 40

    def gloo(name, elements, dtype):
        return ranged(f"gloo:{name}", 0, 1, **{"Input Dims": [[elements // 2, 2]], "Input type": [dtype]})

    events = [gloo("all_gather", 100, "c10::BFloat16"), gloo("all_reduce", 810, "float"), gloo("broadcast", 4, "float")]
    assert wire_bytes({"traceEvents": events}, 8) == 1600 + 3240
