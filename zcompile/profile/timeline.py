"""Reads a step's compute, communication and idle time, and the bytes it transfers, from a trace of torch.profiler."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

STEP = "zcompile.profile::step"
GAPS = 1000  # per step: a gap shorter than 1 / GAPS of a step is too short to draw
MESSAGES = ("gloo:send", "gloo:recv")
# Prefixes of ops in which a CPU rank waits for others. Some waits, such as FSDP2's, are in no op.
HOST_WAITS = ("c10d::", "zcompile::gather", "zcompile::reduce", "_c10d_functional::wait_tensor")

# Bytes of a dtype, by its names in the events of gloo and of NCCL.
BYTES = {"double": 8, "long int": 8, "long": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2}
ONE_TO_ALL = ("broadcast", "barrier", "wait", "init", "send", "recv")  # not counted as collectives of a step
SENT = "gloo:send"  # a message of zcompile to one other rank, on CPUs

Interval = tuple[float, float]  # (begin, end), us as in the trace unless noted otherwise
Event = dict[str, Any]  # of a trace


@dataclass(frozen=True)
class Parts:
    """Parts of a step, ms. compute + exposed + idle = step; exposed is the communication that overlaps no compute."""

    step_ms: float
    traced_ms: float  # step time while it was traced
    compute_ms: float
    communication_ms: float
    exposed_ms: float
    idle_ms: float
    # Intervals of "compute", "communication" and "host link" in the last step, ms since it began. It is taken to begin
    # one mean step time before the end of the traced steps.
    timeline: dict[str, list[Interval]]

    def at_speed(self, timed_ms: float) -> "Parts":
        """Scale the parts of a traced step to a step that took `timed_ms` without tracing.

        Tracing slows the host of a GPU. This lengthens idle time, and transfers in which a rank waits for the host of
        another rank, but not compute. So compute is kept, and exposed and idle time are shortened.
        """
        left_ms = max(timed_ms - self.compute_ms, 0.0)
        exposed_ms = min(self.exposed_ms, left_ms)
        return replace(self, step_ms=self.compute_ms + left_ms, exposed_ms=exposed_ms, idle_ms=left_ms - exposed_ms)


def parts_of_step(trace: dict[str, Any], count: int) -> Parts:
    """Return the parts of a step: means over the `count` traced steps, which follow each other without a gap.

    On a GPU, the steps last from the first GPU event in the trace to the last. Compute is all events on the busiest
    stream except NCCL's kernels and zcompile's (other than AdamW). Communication is these kernels, and all events on
    other streams: copies between devices or with the host, packing, casts and sums. In a CUDA graph, the driver chooses
    the streams. So compute in a graph is all events except copies, the driver's copy kernels, and NCCL's and zcompile's
    kernels (other than AdamW).

    On a CPU, communication is gloo's collectives on its threads, and waits within collective ops. Gloo's send and recv
    events are left out, because they last until the wait. Compute is aten's ops and compiled graphs without the waits.
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
        link = [interval(event) for event in device if "HtoD" in event["name"] or "DtoH" in event["name"]]
    else:
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        ops = [event for event in events if event.get("cat") == "cpu_op"]
        computing = [event for event in ops if event["name"].startswith(("aten::", "## Call CompiledFxGraph"))]
        waits = union(interval(event) for event in ops if event["name"].startswith(HOST_WAITS))
        collectives = [event for event in events if event["name"].startswith("gloo:")]
        wire = [*waits, *(interval(event) for event in collectives if event["name"] not in MESSAGES)]
        compute, link = subtract(union(map(interval, computing)), waits), []
        steps = [interval(event) for event in events if event["name"] == STEP and event.get("cat") == "user_annotation"]
    begin, end = min(begin for begin, _ in steps), max(end for _, end in steps)
    compute, wire = clip(union(compute), (begin, end)), clip(union(wire), (begin, end))
    lengths = (end - begin, length(compute), length(wire), length(subtract(wire, compute)))
    step_ms, compute_ms, communication_ms, exposed_ms = (us / count / 1e3 for us in lengths)
    idle_ms = step_ms - compute_ms - exposed_ms
    last = (end - (end - begin) / count, end)
    rows = {"compute": compute, "communication": wire, "host link": union(link)}
    timeline = {name: drawn(intervals, last) for name, intervals in rows.items()}
    return Parts(step_ms, step_ms, compute_ms, communication_ms, exposed_ms, idle_ms, timeline)


def drawn(intervals: list[Interval], step: Interval) -> list[Interval]:
    """Clip `intervals` (us) to `step`, close gaps too short to see, and return them in ms since the step began."""
    gap = (step[1] - step[0]) / GAPS
    widened = union((begin, end + gap) for begin, end in clip(intervals, step))
    return [(round((begin - step[0]) / 1e3, 3), round((end - gap - step[0]) / 1e3, 3)) for begin, end in widened]


def is_nccl(event: Event) -> bool:
    return event["name"].startswith("nccl")


def is_ours(event: Event) -> bool:
    """Return whether `event` is a zcompile kernel other than AdamW: these move, cast or sum transferred tensors."""
    return "zcompile::" in event["name"] and "adam_kernel" not in event["name"]


def busiest_stream(device: list[Event]) -> int:
    """Return the stream with the most time in kernels that are not NCCL's."""
    busy: Counter[int] = Counter()
    for event in device:
        if event["cat"] == "kernel" and not is_nccl(event):
            busy[event["args"]["stream"]] += event["dur"]
    return busy.most_common(1)[0][0]


def graph_launches(events: list[Event]) -> set[int]:
    """Return the correlation ids of CUDA graph launches. The kernels and copies of a launched graph have its id."""
    return {event["args"]["correlation"] for event in events if event.get("name") == "cudaGraphLaunch"}


def interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals into disjoint ones that cover the same points, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def clip(intervals: list[Interval], to: Interval) -> list[Interval]:
    cut = [(max(begin, to[0]), min(end, to[1])) for begin, end in intervals]
    return [(begin, end) for begin, end in cut if begin < end]


def subtract(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    """Remove `others` from `intervals`. The intervals of each argument are disjoint and ordered, as in the result."""
    left: list[Interval] = []
    depth, since = 0, 0.0  # open `intervals` minus open `others`, from time `since` on
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
    """Return the size of the unsharded tensors that this rank gathered and reduced in the whole trace, bytes.

    These tensors are outputs of all-gathers, and inputs of reduce-scatters, all-reduces and all-to-alls.
    `zcompile.stats` counts the same tensors, but no other collectives, such as all-reduces of gradient norms. With W
    ranks, (W - 1) / W of the bytes cross a link (twice as many for an all-reduce). All bytes of zcompile's sends on
    CPUs cross a link, so they are multiplied by W / (W - 1).

    Args:
        ranks: number of ranks, W, which gloo's events of all-gathers do not contain.
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
