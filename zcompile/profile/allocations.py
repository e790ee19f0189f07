"""Allocations of a trace, and what the ranges around them tell of what they are for.

[Note: frees that nobody saw]
The profiler follows some threads and sees what they free. On a CPU, gloo's threads free buffers by themselves, and
these seem to live on. Two rules give them an end. Memory that is given out again was free, so it was freed before. A
buffer of a gather or a reduce that is not freed until the trace ends is taken to be one of gloo's, and to have ended
with the range that it was made in. On a GPU all frees are seen.

[Note: memory of no allocator]
Unsharded parameters that alias cached shards (csrc/p2p/aliased_params.h) take memory from the transport's while they
live. They are reported without the totals that an allocator's reports have.
"""

import math
import re
from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from zcompile.profile.timeline import Event

KINDS = ("shards", "optimizer", "transport", "unsharded", "gradients", "activations")
# How the name of a range begins -> what is allocated there.
TELLS = {
    "zcompile::gather": "unsharded",
    "FSDP::all_gather": "unsharded",
    "deepspeed::fetch": "unsharded",
    "dc::allgather": "unsharded",  # DeepCompile's
    "dc::prefetch": "unsharded",
    "_c10d_functional::all_gather": "unsharded",
    "zcompile::reduce": "gradients",
    "FSDP::post_backward": "gradients",
    "deepspeed::reduce": "gradients",
    "dc::reduce": "gradients",
    "_c10d_functional::reduce_scatter": "gradients",
    "torch::autograd::AccumulateGrad": "gradients",
    "c10d::": "transport",  # staging of a backend
    "gloo:": "transport",
}
GATHER = re.compile(r"zcompile::gather \S+(?P<more> and \d+ more)? \(")
CPU, CUDA = 0, 1  # "Device Type" in traces


@dataclass
class Allocation:
    """Addresses [address, address + nbytes) from `begins` until `ends`."""

    address: int
    nbytes: int
    begins: float  # us as in the trace, as `ends`; infinite if before or after it
    ends: float = math.inf
    kind: str = "activations"
    range: Event | None = None  # the event that tells the kind
    lost: bool = False  # no free was seen
    of_transport: bool = False  # on a GPU, out of what the transport holds: [Note: memory of no allocator]


def reports_of(trace: dict[str, Any], device: int | None) -> list[Event]:
    """The trace's events of one device's memory, in order."""
    wanted = (CPU, -1) if device is None else (CUDA, device)
    reports = (event for event in trace["traceEvents"] if event.get("name") == "[memory]")
    return sorted(
        (report for report in reports if (report["args"]["Device Type"], report["args"]["Device Id"]) == wanted),
        key=lambda report: report["ts"],
    )


def has_totals(report: Event) -> bool:
    """Whether a report is of an allocator's memory. An allocator that gave something out has reserved it."""
    return bool(report["args"]["Total Reserved"])


def allocations_of(trace: dict[str, Any], device: int | None) -> list[Allocation]:
    """All allocations that a trace shows, and all that it frees, with the kinds that ranges tell."""
    reports = reports_of(trace, device)
    tellers = tellers_of(trace, reports)
    live: dict[int, Allocation] = {}
    addresses: list[int] = []  # of `live`, in order
    allocations: list[Allocation] = []
    filled: set[int] = set()  # ranges of one parameter, whose memory came first: what follows in them is staging

    def end(address: int, time: float) -> Allocation:
        block = live.pop(address)
        del addresses[bisect_left(addresses, address)]
        block.ends = time
        return block

    for report in reports:
        time, address, nbytes = report["ts"], report["args"]["Addr"], report["args"]["Bytes"]
        of_transport = device is not None and not has_totals(report)
        if nbytes < 0:
            if address in live:
                end(address, time)
            else:
                kind = "unsharded" if of_transport else "activations"
                allocations.append(Allocation(address, -nbytes, -math.inf, time, kind, of_transport=of_transport))
            continue
        i = bisect_left(addresses, address)
        overlapping = addresses[i : bisect_left(addresses, address + nbytes)]
        if i and addresses[i - 1] + live[addresses[i - 1]].nbytes > address:
            overlapping.append(addresses[i - 1])
        for other in overlapping:
            end(other, time).lost = True
        teller = tellers[id(report)]
        live[address] = Allocation(address, nbytes, time, range=teller, of_transport=of_transport)
        if teller:
            live[address].kind = "transport" if id(teller) in filled else kind_of(teller["name"]) or "activations"
            if GATHER.match(teller["name"]):
                filled.add(id(teller))
        insort(addresses, address)
        allocations.append(live[address])
    for block in live.values():
        block.lost = True
    return allocations


def end_unseen(allocations: list[Allocation]) -> None:
    """Give allocations whose free was not seen an end: [Note: frees that nobody saw]."""
    for block in allocations:
        if block.lost and block.range:
            block.ends = min(block.ends, block.range["ts"] + block.range["dur"])


def kind_of(name: str) -> str | None:
    """What a range of this name tells of what is allocated in it, one of KINDS; None if it tells nothing."""
    named = GATHER.match(name)
    if named and named["more"]:
        return "transport"  # its parameters have ranges of their own
    return next((kind for beginning, kind in TELLS.items() if name.startswith(beginning)), None)


def tellers_of(trace: dict[str, Any], reports: list[Event]) -> dict[int, Event | None]:
    """id of a report -> the innermost range around it on its thread that tells a kind."""
    threads: dict[int, list[Event]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("cat") in ("cpu_op", "user_annotation") and event.get("ph") == "X" and kind_of(event["name"]):
            threads[event["tid"]].append(event)
    stacks: dict[int, list[Event]] = defaultdict(list)
    for ranges in threads.values():
        ranges.sort(key=lambda event: (event["ts"], -event["dur"]), reverse=True)  # the next one last
    tellers: dict[int, Event | None] = {}
    for report in reports:
        waiting, stack = threads[report["tid"]], stacks[report["tid"]]
        while waiting and waiting[-1]["ts"] <= report["ts"]:
            stack.append(waiting.pop())
        stack[:] = [event for event in stack if event["ts"] + event["dur"] >= report["ts"]]
        tellers[id(report)] = stack[-1] if stack else None
    return tellers
