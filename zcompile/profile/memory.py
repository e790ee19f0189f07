"""Memory over a traced step, by what it is for.

[Note: how kinds are told]
The trace has every allocation and every free. What it is for is told by the ranges around the allocation on its thread,
of which the innermost that tells counts (TELLS in allocations.py): a gather's is full parameters. What the engine keeps at the
end of a backward is told by its address (owned.py), which comes first. All else is activations and the rest.

What was there before the trace: on CUDA the allocator's own count says how much, and what of it has no known address is
the rest. On a CPU nobody counts before, so it is what has a known address; and with frees that are not seen, there is no
count to compare with.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from zcompile.planning.curve import thinned
from zcompile.profile.allocations import KINDS, Allocation, end_unseen, has_totals, reports_of
from zcompile.profile.owned import WALK, Owned, Walks
from zcompile.profile.timeline import clock, last_step

POINTS = 400  # of a curve


@dataclass(frozen=True)
class Memory:
    """Of the last traced step, bytes on one rank.

    Attributes:
        ms: since the step began, at most about POINTS, the peak's among them. On a GPU, when the device got there.
        kinds: kind -> bytes at each of these.
        at_peak: kind -> bytes when their sum is highest.
        allocator_bytes: what a GPU's allocator says of the peak, and the transport's memory: within 2 % of the kinds, or they are
            told wrong. None on a CPU.
    """

    ms: list[float]
    kinds: dict[str, list[int]]
    at_peak: dict[str, int]
    peak_ms: float
    allocator_bytes: int | None


def memory_of_step(
    trace: dict,
    walks: Walks,
    allocations: list[Allocation],
    device: int | None,
    transport_bytes: int,
    peak_bytes: int | None,
) -> Memory:
    """Args:
    walks: those of the trace.
    allocations: those of the trace; become of the kinds that `walks` say.
    device: the GPU's index; None for the CPU.
    transport_bytes: of the transport, outside of the allocator.
    peak_bytes: the allocator's in the last step, on a GPU.
    """
    reports = reports_of(trace, device)
    times = sorted(
        event["ts"]
        for event in trace["traceEvents"]
        if event.get("name") == WALK and event.get("cat") == "user_annotation"
    )
    allocations = allocations + tell_by_address(allocations, zip(times, walks.found), walks.before)
    if device is None:
        end_unseen(allocations)
    known = sum(block.nbytes for block in allocations if block.begins == -math.inf and not block.of_transport)
    first = next(report for report in reports if device is None or has_totals(report))
    counted = first["args"]["Total Allocated"] - first["args"]["Bytes"]  # before the trace
    allocations += [
        Allocation(0, -block.nbytes, block.begins, block.ends, "transport")
        for block in allocations
        if block.of_transport
    ]
    unknown = (
        0 if device is None else max(0, counted - known)
    )  # less than none would be an error, and shows beside the peak
    allocations += [Allocation(0, unknown, -math.inf), Allocation(0, transport_bytes, -math.inf, kind="transport")]
    begin, end = last_step(trace)
    at = clock(trace)
    points = thinned(list(bytes_over_time(allocations, begin, end)), POINTS, lambda point: sum(point[1].values()))
    ms = [max(0.0, (at(time) - at(begin)) / 1e3) for time, _ in points]
    peak = max(range(len(points)), key=lambda one: sum(points[one][1].values()))
    kinds = {kind: [held[kind] for _, held in points] for kind in KINDS}
    return Memory(ms, kinds, points[peak][1], ms[peak], None if peak_bytes is None else peak_bytes + transport_bytes)


def tell_by_address(
    allocations: list[Allocation], walks: Iterable[tuple[float, list[Owned]]], known: Mapping[int, int] | None
) -> list[Allocation]:
    """Give allocations that were alive at a walk the kind of what lay there; what no block is of was there before, and is returned.

    Args:
        known: address -> bytes before the trace, and nothing else was there; None if that is not known.
    """
    by_address: dict[int, list[Allocation]] = defaultdict(list)
    for block in allocations:
        by_address[block.address].append(block)
    before = []
    for time, one in ((time, one) for time, walk in walks for one in walk):
        block = next((other for other in by_address[one.address] if other.begins <= time < other.ends), None)
        if block is None:
            if known is not None and one.address not in known:
                continue
            until = min((other.begins for other in by_address[one.address] if other.begins > time), default=math.inf)
            block = Allocation(one.address, one.nbytes if known is None else known[one.address], -math.inf, until)
            by_address[one.address].append(block)
            before.append(block)
        block.kind, block.range = one.kind, None
    return before


def bytes_over_time(
    allocations: Iterable[Allocation], begin: float, end: float
) -> Iterator[tuple[float, dict[str, int]]]:
    """At `begin`, and whenever it changes until `end`: bytes of each kind."""
    held = dict.fromkeys(KINDS, 0)
    changes: list[tuple[float, int, str]] = []
    for block in allocations:
        changes += [(block.begins, block.nbytes, block.kind), (block.ends, -block.nbytes, block.kind)]
    changes.sort(key=lambda one: one[:2])  # frees first
    at = begin
    for time, nbytes, kind in changes:
        if time > end:
            break
        if time > at:
            yield at, dict(held)
            at = time
        held[kind] += nbytes
    yield at, dict(held)
