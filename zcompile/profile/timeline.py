"""The parts of a step, and the bytes that it sends, read from a trace of torch.profiler."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

STEP = "zcompile.profile::step"
GAPS = 1000  # of a step: what is shorter is no pixel of a picture
MESSAGES = ("gloo:send", "gloo:recv")
# How ops begin in which a CPU rank waits for others. Some waits, as FSDP2's, are in no op.
HOST_WAITS = ("c10d::", "zcompile::gather", "zcompile::reduce", "_c10d_functional::wait_tensor")

# Bytes of a dtype, by its names in the events of gloo and of NCCL.
BYTES = {"double": 8, "long int": 8, "long": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2}
ONE_TO_ALL = ("broadcast", "barrier", "wait", "init", "send", "recv")  # what sets up or waits
SENT = "gloo:send"  # to one of the others, of zcompile on CPUs

Interval = tuple[float, float]  # us, as in the trace, unless said otherwise
Event = dict[str, Any]  # of a trace


@dataclass(frozen=True)
class Parts:
    """Of one step, ms. Compute, exposed and idle add up to it. Communication is what was on the wire at all."""

    step_ms: float
    traced_ms: float  # what the step took while it was traced
    compute_ms: float
    communication_ms: float
    exposed_ms: float
    idle_ms: float
    # "compute" and "communication" of about the last traced step, ms since it began.
    timeline: dict[str, list[Interval]]

    def at_speed(self, timed_ms: float) -> "Parts":
        """The parts of a step that took `timed_ms` without tracing.

        Tracing slows a GPU's host, and with it what waits for a host: idle time, and transfers in which a rank waits
        for the host of another rank. It does not slow compute.
        """
        left_ms = max(timed_ms - self.compute_ms, 0.0)
        exposed_ms = min(self.exposed_ms, left_ms)
        return replace(self, step_ms=self.compute_ms + left_ms, exposed_ms=exposed_ms, idle_ms=left_ms - exposed_ms)


def parts_of_step(trace: dict[str, Any], count: int) -> Parts:
    """Means over the `count` traced steps, which follow each other without a gap.

    On a GPU the steps last from the first thing that it does to the last. Compute is what runs on the busiest stream,
    but for NCCL's kernels and zcompile's. Communication is those kernels and whatever runs on other streams: copies
    between devices, the packing for them, casts and sums. In a CUDA graph the driver chooses streams, so all kernels
    are compute there, but for those and the driver's own, which copy. On a CPU, communication is gloo's work on its
    threads and the waits of zcompile's ops. Events of zcompile's messages do not count, because they last until the
    wait.
    Compute is aten's ops and compiled graphs, but for such waits.
    """
    device = [event for event in trace["traceEvents"] if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if device:
        launches = graph_launches(trace["traceEvents"])
        in_graph = [event["args"].get("correlation") in launches for event in device]
        busiest = busiest_stream([event for event, is_in in zip(device, in_graph) if not is_in] or device)
        compute: list[Interval] = []
        wire: list[Interval] = []
        for event, is_in_graph in zip(device, in_graph):
            if is_in_graph:
                in_compute = event["cat"] != "gpu_memcpy" and not event["name"].startswith("memcpy")
            else:
                in_compute = event["args"]["stream"] == busiest
            is_compute = in_compute and not (is_nccl(event) or is_ours(event))
            (compute if is_compute else wire).append(interval(event))
        steps = [interval(event) for event in device]
    else:
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        ops = [event for event in events if event.get("cat") == "cpu_op"]
        computing = [event for event in ops if event["name"].startswith(("aten::", "## Call CompiledFxGraph"))]
        waits = union(interval(event) for event in ops if event["name"].startswith(HOST_WAITS))
        collectives = [event for event in events if event["name"].startswith("gloo:")]
        wire = [*waits, *(interval(event) for event in collectives if event["name"] not in MESSAGES)]
        compute = subtract(union(map(interval, computing)), waits)
        steps = [interval(event) for event in events if event["name"] == STEP and event.get("cat") == "user_annotation"]
    begin, end = min(begin for begin, _ in steps), max(end for _, end in steps)
    compute, wire = clip(union(compute), (begin, end)), clip(union(wire), (begin, end))
    lengths = (end - begin, length(compute), length(wire), length(subtract(wire, compute)))
    step_ms, compute_ms, communication_ms, exposed_ms = (us / count / 1e3 for us in lengths)
    idle_ms = step_ms - compute_ms - exposed_ms
    last = (end - (end - begin) / count, end)
    timeline = {"compute": drawn(compute, last), "communication": drawn(wire, last)}
    return Parts(step_ms, step_ms, compute_ms, communication_ms, exposed_ms, idle_ms, timeline)


def drawn(intervals: list[Interval], step: Interval) -> list[Interval]:
    """What of `intervals` lies in `step`, in ms since it began, to the us and without gaps too small to see."""
    gap = (step[1] - step[0]) / GAPS
    widened = union((begin, end + gap) for begin, end in clip(intervals, step))
    return [(round((begin - step[0]) / 1e3, 3), round((end - gap - step[0]) / 1e3, 3)) for begin, end in widened]


def is_nccl(event: Event) -> bool:
    return event["name"].startswith("nccl")


def is_ours(event: Event) -> bool:
    """Whether it is a kernel of zcompile's. But for the optimizer's, all of them move, cast or add up what travels."""
    return "zcompile::" in event["name"] and "adam_kernel" not in event["name"]


def busiest_stream(device: list[Event]) -> int:
    """The stream with most time in kernels that are not NCCL's."""
    busy: Counter[int] = Counter()
    for event in device:
        if event["cat"] == "kernel" and not is_nccl(event):
            busy[event["args"]["stream"]] += event["dur"]
    return busy.most_common(1)[0][0]


def graph_launches(events: list[Event]) -> set[int]:
    """Correlation ids of the launches of CUDA graphs, which the kernels and copies of these graphs have, too."""
    return {event["args"]["correlation"] for event in events if event.get("name") == "cudaGraphLaunch"}


def interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def clip(intervals: list[Interval], to: Interval) -> list[Interval]:
    """What of disjoint intervals lies inside `to`."""
    cut = [(max(begin, to[0]), min(end, to[1])) for begin, end in intervals]
    return [(begin, end) for begin, end in cut if begin < end]


def subtract(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    """What of disjoint, ordered intervals lies in none of `others`, which are so too."""
    left: list[Interval] = []
    depth, since = 0, 0.0  # in how many of `intervals` less those of `others` all times since then are
    changes = [change for begin, end in intervals for change in ((begin, 1), (end, -1))]
    changes += [change for begin, end in others for change in ((begin, -1), (end, 1))]
    for time, change in sorted(changes):
        if depth == 1 and time > since:
            left.append((since, time))
        depth, since = depth + change, time
    return left


def length(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def wire_bytes(trace: dict[str, Any], ranks: int) -> int:
    """Bytes of unsharded tensors that this rank gathered and reduced in all of the trace.

    They are outputs of all-gathers, and inputs of reduce-scatters, all-reduces and all-to-alls. `zcompile.stats`
    counts the same, without what else an engine sends, such as norms of gradients. What really crosses a link is
    (W - 1) / W of it, and twice that of an all-reduce. Messages are what crosses. `ranks` is W of the groups in which
    gloo gathers, whose events do not tell.
    """
    total = sent = 0
    for event in trace["traceEvents"]:
        name, args = event.get("name", ""), event.get("args", {})
        if name == "record_param_comms" and "Collective name" in args:
            if not any(word in args["Collective name"] for word in ONE_TO_ALL):
                elements = max(args.get("In msg nelems", 0), args.get("Out msg nelems", 0))
                total += elements * _width(args["dtype"])
        elif name.startswith("gloo:") and args.get("Input Dims"):
            nbytes = sum(math.prod(dims) * _width(dtype) for dims, dtype in zip(args["Input Dims"], args["Input type"]))
            if name == SENT:
                sent += nbytes
            elif not name.endswith(ONE_TO_ALL):
                total += nbytes * (ranks if name == "gloo:all_gather" else 1)
    return total + sent * ranks // max(ranks - 1, 1)


def _width(dtype: str) -> int:
    return BYTES.get(dtype.lower().removeprefix("c10::"), 1)
