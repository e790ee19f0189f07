"""Memory over a traced step, by what it is for.

[Note: how kinds are told]
The trace has every allocation and every free. What the engine owns at the end of a backward is told by its address
(owned_storages.py), which counts first. Else the ranges around the allocation on its thread tell what it is for, and
of these the innermost that tells (TELLS in allocations.py): what a gather allocates is unsharded parameters. All else
is activations and the rest.

What was there before the trace has no range. On a GPU the allocator's own count says how much there was, and what of
it has no known address is the rest. On a CPU nobody counts before, so it is what has a known address. Frees that are
not seen leave no count to compare with.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zcompile.explanation.curve import thinned
from zcompile.profile.allocations import KINDS, Allocation, end_unseen, has_totals, reports_of
from zcompile.profile.owned_storages import WALK, OwnedStorage, Walks
from zcompile.profile.timeline import STEP, clock, ranges_of

POINTS = 400  # of a curve


@dataclass(frozen=True)
class Memory:
    """Memory of one rank in the last traced step."""

    # About POINTS points in time at most, the peak's among them, in ms since the step began. On a GPU, when the device
    # came to the allocation, not the host.
    ms: list[float]
    kinds: dict[str, list[int]]  # kind -> bytes at each of these points
    at_peak: dict[str, int]  # kind -> bytes when their sum is highest
    peak_ms: float
    # The peak by the GPU's allocator, with the transport's memory; None on a CPU. If the sum of `at_peak` is within 2 %
    # of it, the kinds are told apart rightly.
    allocator_bytes: int | None


def memory_of_step(
    trace: dict[str, Any],
    walks: Walks,
    allocations: list[Allocation],
    device: int | None,
    transport_bytes: int,
    peak_bytes: int | None,
) -> Memory:
    """From what a trace has of memory. `allocations` get the kinds that `walks` tell.

    `transport_bytes` are outside of the allocator, whose own peak in the last step is `peak_bytes`, on a GPU.
    """
    times = [time for time, _ in ranges_of(trace, WALK)]
    allocations = allocations + tell_by_address(allocations, zip(times, walks.found), walks.before)
    unknown = 0
    if device is None:
        end_unseen(allocations)
    else:
        known = sum(block.nbytes for block in allocations if block.begins == -math.inf and not block.of_transport)
        first = next(filter(has_totals, reports_of(trace, device)))["args"]
        # Less than none would be an error, which shows in a peak that is not the allocator's.
        unknown = max(0, first["Total Allocated"] - first["Bytes"] - known)
    allocations += [
        Allocation(0, -block.nbytes, block.begins, block.ends, "transport")
        for block in allocations
        if block.of_transport
    ]
    allocations += [Allocation(0, unknown, -math.inf), Allocation(0, transport_bytes, -math.inf, kind="transport")]
    begin, end = ranges_of(trace, STEP)[-1]
    device_time = clock(trace)
    points = thinned(list(bytes_over_time(allocations, begin, end)), POINTS, lambda point: sum(point[1].values()))
    ms = [round(max(0.0, (device_time(time) - device_time(begin)) / 1e3), 3) for time, _ in points]
    peak = max(range(len(points)), key=lambda i: sum(points[i][1].values()))
    kinds = {kind: [held[kind] for _, held in points] for kind in KINDS}
    return Memory(ms, kinds, points[peak][1], ms[peak], None if peak_bytes is None else peak_bytes + transport_bytes)


def tell_by_address(
    allocations: list[Allocation], walks: Iterable[tuple[float, list[OwnedStorage]]], known: Mapping[int, int] | None
) -> list[Allocation]:
    """Give allocations that were alive at a walk (time, storages) the kind of the storage that lay there.

    Returns an allocation for each storage that has none in the trace: it was there before. `known` has the bytes of
    all that was, by address; None if that is not known.
    """
    by_address: dict[int, list[Allocation]] = defaultdict(list)
    for block in allocations:
        by_address[block.address].append(block)
    before: list[Allocation] = []
    for time, storage in ((time, storage) for time, walk in walks for storage in walk):
        there = by_address[storage.address]
        alive = next((block for block in there if block.begins <= time < block.ends), None)
        if alive is None:
            if known is not None and storage.address not in known:
                continue
            until = min((block.begins for block in there if block.begins > time), default=math.inf)
            nbytes = storage.nbytes if known is None else known[storage.address]
            alive = Allocation(storage.address, nbytes, -math.inf, until)
            there.append(alive)
            before.append(alive)
        alive.kind, alive.range = storage.kind, None
    return before


def bytes_over_time(
    allocations: Iterable[Allocation], begin: float, end: float
) -> Iterator[tuple[float, dict[str, int]]]:
    """(time, bytes of each kind) at `begin` and whenever that changes until `end`."""
    held = dict.fromkeys(KINDS, 0)
    changes: list[tuple[float, int, str]] = []
    for block in allocations:
        changes += [(block.begins, block.nbytes, block.kind), (block.ends, -block.nbytes, block.kind)]
    changes.sort(key=lambda change: change[:2])  # frees first
    now = begin
    for time, nbytes, kind in changes:
        if time > end:
            break
        if time > now:
            yield now, dict(held)
            now = time
        held[kind] += nbytes
    yield now, dict(held)
