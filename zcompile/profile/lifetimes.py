"""What streams did in a traced step, and how long its largest parameters were unsharded."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from zcompile.profile.allocations import GATHER, Allocation
from zcompile.profile.timeline import Interval, busiest_stream, clock, drawn, interval, is_nccl, last_step, union

LARGEST = 20  # parameters
STREAMS = 5  # those that did most


@dataclass(frozen=True)
class ParamLifetime:
    """An unsharded parameter, from the start of its gather until its memory is freed, in ms since the step began."""

    parameter: str
    nbytes: int
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class StepLifetimes:
    """Of the last traced step.

    Attributes:
        streams: on a GPU its streams, on a CPU threads -> when they were at work, in ms since the step began.
        parameters: lifetimes of the largest parameters, in the order of their first.
        step_ms: how long the step was.
    """

    streams: dict[str, list[Interval]]
    parameters: list[ParamLifetime]
    step_ms: float


def lifetimes_of_step(
    trace: dict[str, Any], allocations: list[Allocation], count: int = LARGEST
) -> StepLifetimes | None:
    """None if the trace has no gather of zcompile's.

    Args:
        allocations: of the trace.
        count: how many parameters.
    """
    begin, end = last_step(trace)
    device_time = clock(trace)
    step = device_time(begin), device_time(end)

    def ms(time: float) -> float:
        return round((device_time(min(max(time, begin), end)) - step[0]) / 1e3, 3)

    lifetimes: dict[str, list[ParamLifetime]] = defaultdict(list)
    for block in allocations:
        named = GATHER.match(block.range["name"]) if block.range and block.kind == "unsharded" else None
        if named is None or block.lost or not begin <= block.begins < end:
            continue
        parameter = named["parameter"]
        lifetimes[parameter].append(ParamLifetime(parameter, block.nbytes, ms(block.begins), ms(block.ends)))
    if not lifetimes:
        return None
    largest = sorted(lifetimes, key=lambda name: -max(lifetime.nbytes for lifetime in lifetimes[name]))[:count]
    largest.sort(key=lambda name: lifetimes[name][0].begin_ms)
    parameters = [lifetime for name in largest for lifetime in lifetimes[name]]
    return StepLifetimes(streams_of(trace, step), parameters, ms(end))


def streams_of(trace: dict[str, Any], step: Interval) -> dict[str, list[Interval]]:
    """Streams of the GPU by what they do, or threads by what they are, the busiest first.

    Those with nothing in `step` are left out.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    rows: dict[str, list[Interval]] = defaultdict(list)
    busiest = busiest_stream(device) if device else None
    for event in device:
        stream = event["args"]["stream"]
        what = "compute" if stream == busiest else "NCCL" if is_nccl(event) else "side"
        rows[f"{what}, stream {stream}"].append(interval(event))
    if not device:
        for event in events:
            if event.get("cat") == "cpu_op" and event["name"].startswith(("aten::", "zcompile::")):
                rows[f"ops, thread {event['tid']}"].append(interval(event))
            elif event["name"].startswith("gloo:"):
                rows[f"gloo, thread {event['tid']}"].append(interval(event))
    at_work = {name: drawn(union(intervals), step) for name, intervals in rows.items()}
    busy = Counter({name: sum(end - begin for begin, end in bars) for name, bars in at_work.items() if bars})
    return {name: at_work[name] for name, _ in busy.most_common(STREAMS)}
