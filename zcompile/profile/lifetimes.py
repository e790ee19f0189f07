"""What streams did in a traced step, and when its largest parameters were full."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from zcompile.profile.allocations import GATHER, Allocation
from zcompile.profile.timeline import Interval, busiest_stream, clock, drawn, interval, is_nccl, last_step, union

LARGEST = 20
STREAMS = 5  # those that did most


@dataclass(frozen=True)
class ParamLifetime:
    """A parameter in full: from the start of its gather until its memory is freed, ms since the step began."""

    parameter: str
    nbytes: int
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class ParamLifetimes:
    """Of the last traced step.

    Attributes:
        streams: on a GPU its streams, on a CPU threads -> when they were at work, ms since the step began.
        windows: of the largest parameters, in order of their first.
        step_ms: how long it was.
    """

    streams: dict[str, list[Interval]]
    windows: list[ParamLifetime]
    step_ms: float


def lifetimes_of_step(trace: dict, allocations: list[Allocation], count: int = LARGEST) -> ParamLifetimes | None:
    """None if the trace has no gather of zcompile's.

    Args:
        allocations: of the trace.
    """
    begin, end = last_step(trace)
    at = clock(trace)
    step = at(begin), at(end)
    found: dict[str, list[ParamLifetime]] = defaultdict(list)
    for one in allocations:
        named = one.range and one.kind == "full" and GATHER.match(one.range["name"])
        if not named or one.lost or not begin <= one.begins < end:
            continue
        times = [(at(min(max(time, begin), end)) - step[0]) / 1e3 for time in (one.begins, one.ends)]
        found[named["parameter"]].append(ParamLifetime(named["parameter"], one.nbytes, *times))
    if not found:
        return None
    largest = sorted(found, key=lambda one: -max(window.nbytes for window in found[one]))[:count]
    largest.sort(key=lambda one: found[one][0].begin_ms)
    return ParamLifetimes(
        streams_of(trace, step), [window for one in largest for window in found[one]], (step[1] - step[0]) / 1e3
    )


def streams_of(trace: dict, step: Interval) -> dict[str, list[Interval]]:
    """Streams of the GPU by what they do, or threads by what they are, the busiest first; those with nothing in `step` left out."""
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
    found = {name: drawn(union(ones), step) for name, ones in rows.items()}
    busy = Counter({name: sum(end - begin for begin, end in ones) for name, ones in found.items() if ones})
    return {name: found[name] for name, _ in busy.most_common(STREAMS)}
