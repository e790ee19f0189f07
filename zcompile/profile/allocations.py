"""Allocations of a trace, and what the ranges around them tell of what they are for.

[Note: frees that nobody saw]
The profiler sees what threads do that it follows. On a CPU, buffers that gloo's threads free by themselves seem to live
on. Memory that is given out again was free, so it was freed before; and a buffer of a gather or a reduce that is not freed
until the trace ends is taken to be one of these, and to have ended with the range that it was made in. On a GPU all frees
are seen.

[Note: memory of no allocator]
Full parameters that zcompile composes (csrc/cuda/composed.h) take memory from the transport's while they live, and are reported
without the totals that an allocator's reports have.
"""

import math
import re
from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

KINDS = ("shards", "optimizer", "transport", "full", "gradients", "activations")
TELLS = {  # how a range's name begins -> what is allocated there
    "zcompile::gather": "full",
    "FSDP::all_gather": "full",
    "deepspeed::fetch": "full",
    "dc::allgather": "full",  # DeepCompile's
    "dc::prefetch": "full",
    "_c10d_functional::all_gather": "full",
    "zcompile::reduce": "gradients",
    "FSDP::post_backward": "gradients",
    "deepspeed::reduce": "gradients",
    "dc::reduce": "gradients",
    "_c10d_functional::reduce_scatter": "gradients",
    "torch::autograd::AccumulateGrad": "gradients",
    "c10d::": "transport",  # staging of a backend
    "gloo:": "transport",
}
GATHER = re.compile(r"zcompile::gather (?P<parameter>\S+)(?P<more> and \d+ more)? \(")
CPU, CUDA = 0, 1  # "Device Type" in traces


@dataclass
class Allocation:
    """Addresses [address, address + nbytes) from `begins` until `ends`, us as in the trace; infinite if before or after it."""

    address: int
    nbytes: int
    begins: float
    ends: float = math.inf
    kind: str = "activations"
    range: dict | None = None  # the event that tells the kind
    lost: bool = False  # no free was seen
    of_transport: bool = False  # on a GPU, out of what the transport holds: [Note: memory of no allocator]


def reports_of(trace: dict, device: int | None) -> list[dict]:
    """The trace's events of one device's memory, in order."""
    wanted = (CPU, -1) if device is None else (CUDA, device)
    found = (event for event in trace["traceEvents"] if event.get("name") == "[memory]")
    return sorted(
        (one for one in found if (one["args"]["Device Type"], one["args"]["Device Id"]) == wanted),
        key=lambda one: one["ts"],
    )


def has_totals(report: dict) -> bool:
    """Whether a report is of an allocator's memory: one that gave something out has reserved it."""
    return bool(report["args"]["Total Reserved"])


def allocations_of(trace: dict, device: int | None) -> list[Allocation]:
    """All allocations of a trace, and of what was freed in it; of the kinds that ranges tell."""
    reports = reports_of(trace, device)
    tellers = tellers_of(trace, reports)
    live: dict[int, Allocation] = {}
    addresses: list[int] = []  # of `live`, in order
    found: list[Allocation] = []
    filled: set[int] = set()  # ranges that name one parameter, whose memory came first: the rest is staging

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
                kind = "full" if of_transport else "activations"
                found.append(Allocation(address, -nbytes, -math.inf, time, kind, of_transport=of_transport))
            continue
        at = bisect_left(addresses, address)
        overlapping = addresses[at : bisect_left(addresses, address + nbytes)]
        if at and addresses[at - 1] + live[addresses[at - 1]].nbytes > address:
            overlapping.append(addresses[at - 1])
        for one in overlapping:
            end(one, time).lost = True
        teller = tellers[id(report)]
        live[address] = Allocation(address, nbytes, time, range=teller, of_transport=of_transport)
        if teller:
            live[address].kind = "transport" if id(teller) in filled else kind_of(teller["name"])
            if GATHER.match(teller["name"]):
                filled.add(id(teller))
        insort(addresses, address)
        found.append(live[address])
    for block in live.values():
        block.lost = True
    return found


def end_unseen(allocations: list[Allocation]) -> None:
    """Give what was never seen to be freed an end: [Note: frees that nobody saw]."""
    for block in allocations:
        if block.lost and block.range:
            block.ends = min(block.ends, block.range["ts"] + block.range["dur"])


def kind_of(name: str) -> str | None:
    """What a range of this name tells of what is allocated in it."""
    named = GATHER.match(name)
    if named and named["more"]:
        return "transport"  # its parameters have ranges of their own
    return next((kind for beginning, kind in TELLS.items() if name.startswith(beginning)), None)


def tellers_of(trace: dict, reports: list[dict]) -> dict[int, dict | None]:
    """id of a report -> the innermost range around it on its thread that tells a kind."""
    threads: dict[int, list[dict]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("cat") in ("cpu_op", "user_annotation") and event.get("ph") == "X" and kind_of(event["name"]):
            threads[event["tid"]].append(event)
    stacks: dict[int, list[dict]] = defaultdict(list)
    for ranges in threads.values():
        ranges.sort(key=lambda one: (one["ts"], -one["dur"]), reverse=True)  # the next one last
    found = {}
    for report in reports:
        waiting, stack = threads[report["tid"]], stacks[report["tid"]]
        while waiting and waiting[-1]["ts"] <= report["ts"]:
            stack.append(waiting.pop())
        stack[:] = [one for one in stack if one["ts"] + one["dur"] >= report["ts"]]
        found[id(report)] = stack[-1] if stack else None
    return found
