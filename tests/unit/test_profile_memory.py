"""Memory by kind, as the profiler reads it from traces. Traces are random, and know what they were made from."""

import math
import random
from dataclasses import replace
from itertools import count

import pytest

from tests.support.trace_events import memory_report, ranged
from zcompile.profile.allocations import KINDS, allocations_of
from zcompile.profile.memory import memory_of_step
from zcompile.profile.owned_storages import WALK, OwnedStorage, Walks
from zcompile.profile.timeline import STEP

GAP = 100.0  # us between things that happen
CALLS = [  # from the outermost to the innermost range around an allocation, and what it is for
    ([], "activations"),
    (["aten::mm", "aten::empty"], "activations"),
    (["zcompile::gather_start", "aten::empty"], "unsharded"),
    (["zcompile::gather a.weight (bf16, 1.0 MiB)"], "unsharded"),
    (
        [
            "zcompile::gather a.weight and 2 more (bf16, 3.0 MiB)",
            "zcompile::gather a.weight (bf16, 1.0 MiB)",
            "aten::empty",
        ],
        "unsharded",
    ),
    (
        ["zcompile::gather_group_start", "zcompile::gather a.weight and 2 more (bf16, 3.0 MiB)", "aten::empty"],
        "transport",
    ),
    (["FSDP::all_gather (0)", "c10d::_allgather_base_"], "transport"),
    (["FSDP::pre_backward (1)", "FSDP::all_gather (0)", "fsdp::all_gather_copy_in"], "unsharded"),
    (["FSDP::all_gather (0)", "FSDP::post_backward_reduce (0)"], "gradients"),
]


class RandomTrace:
    """A trace of random allocations, and what it was made from."""

    def __init__(self, generator: random.Random, device: int | None):
        self.generator, self.device, self.events = generator, device, []
        self.truth: list[list] = []  # [begins, ends, nbytes, kind, address] of each allocation
        self.alive: list[list] = []  # those of the trace that nobody has freed
        self.times = count(1)
        # There before the trace, and known to the allocator of a GPU alone.
        self.unknown_bytes = 512 * generator.randrange(9)
        self.total = self.unknown_bytes if device is not None else 0
        self.free_addresses = list(range(1 << 20, 60 << 20, 1 << 20))
        generator.shuffle(self.free_addresses)
        for kind in ("shards", "optimizer", "gradients"):
            nbytes = 512 * generator.randrange(1, 9)
            self.truth.append([-math.inf, math.inf, nbytes, kind, self.free_addresses.pop()])
            self.total += nbytes if device is not None else 0
        for _ in range(150):
            time, thread = next(self.times) * GAP, generator.choice((1, 2))
            if self.alive and generator.random() < 0.45:
                self.free(time, thread)
            else:
                self.allocate(time, thread)
        self.end = next(self.times) * GAP
        self.step = (self.end / 2, self.end)
        self.walk()

    def free(self, time, thread):
        block = self.alive.pop(self.generator.randrange(len(self.alive)))
        block[1] = time
        self.free_addresses.append(block[4])
        self.report(time, block[4], -block[2], thread)

    def allocate(self, time, thread):
        generator = self.generator
        names, kind = generator.choice(CALLS)
        for depth, name in enumerate(names, start=1):
            self.events.append(ranged(name, time - GAP / 2 / depth, time + GAP / 2 / depth, thread))
        nbytes = 512 * generator.randrange(1, 2000)
        address = self.free_addresses.pop(generator.randrange(len(self.free_addresses)))
        block = [time, math.inf, nbytes, kind, address]
        self.alive.append(block)
        self.truth.append(block)
        self.report(time, address, nbytes, thread)
        if generator.random() < 0.1:
            self.report_other_device(time, address, 1 << 40, thread)
        if self.device is not None and generator.random() < 0.2:
            self.alias(time + GAP / 4, thread, self.free_addresses.pop())

    def report(self, time, address, nbytes, thread):
        self.total += nbytes
        self.events.append(memory_report(time, address, nbytes, self.total, thread, self.device))

    def report_other_device(self, time, address, nbytes, thread):
        other = 0 if self.device is None else self.device + 1
        self.events.append(memory_report(time, address, nbytes, nbytes, thread, other))

    def alias(self, time, thread, address):
        """Map an unsharded parameter in the transport's memory, which the allocator does not know.

        A tenth of them are there before the trace.
        """
        nbytes, ends = 512 * self.generator.randrange(1, 2000), next(self.times) * GAP
        begins = -math.inf if self.generator.random() < 0.1 else time
        if begins == time:
            gather = "zcompile::gather b.weight (bf16, 1.0 MiB)"
            self.events.append(ranged(gather, time - GAP / 16, time + GAP / 16, thread))
            self.events.append(memory_report(time, address, nbytes, 0, thread, self.device, reserved=0))
        self.events.append(memory_report(ends, address, -nbytes, 0, thread, self.device, reserved=0))
        self.truth += [[begins, ends, nbytes, "unsharded", address], [begins, ends, -nbytes, "transport", address]]

    def walk(self):
        """Walk over owned memory at the end: what was there before, and some of what was made, is known by its address.

        An address says more than the ranges around the allocation.
        """
        generator = self.generator
        known = self.truth[:3] + [block for block in self.alive if generator.random() < 0.3]
        for block in known[3:]:
            block[3] = generator.choice(("gradients", "shards"))
        owned = [OwnedStorage(block[4], block[2], block[3]) for block in known]
        self.walks = Walks(None, on_gpu=False)
        self.walks.found = [owned]
        if self.device is not None:
            # A GPU's allocator gives out more than is asked for, and did not give out the transport's memory.
            self.walks.before = {block[4]: block[2] for block in known[:3]}
            asked = [replace(tensor, nbytes=tensor.nbytes - 500) for tensor in owned]
            self.walks.found = [asked + [OwnedStorage(1 << 40, 1 << 30, "gradients")]]
        self.events += [ranged(WALK, self.end - GAP / 4, self.end - GAP / 8), ranged(STEP, *self.step)]

    def held(self, time) -> dict[str, int]:
        """Bytes of each kind at `time`."""
        nbytes_of = dict.fromkeys(KINDS, 0)
        for begins, ends, nbytes, kind, _ in self.truth:
            nbytes_of[kind] += nbytes if begins <= time < ends else 0
        nbytes_of["activations"] += self.unknown_bytes if self.device is not None else 0
        return nbytes_of


@pytest.mark.parametrize("device", [None, 3], ids=["cpu", "cuda"])
def test_memory_by_kind_against_what_the_trace_was_made_from(device):
    generator = random.Random(0)
    for _ in range(20):
        made = RandomTrace(generator, device)
        generator.shuffle(made.events)
        trace = {"traceEvents": made.events}
        blocks = allocations_of(trace, device)
        for block in blocks if device is None else ():
            block.lost = False  # what is not freed here lives on
        memory = memory_of_step(trace, made.walks, blocks, device, transport_bytes=7000, peak_bytes=None)
        begin, end = made.step
        for i, ms in enumerate(memory.ms):
            expected = made.held(begin + 1e3 * ms + GAP / 10)
            expected["transport"] += 7000
            assert {kind: memory.kinds[kind][i] for kind in KINDS} == expected
        times = [float(time) for time in range(int(begin), int(end)) if time % GAP in (0.0, GAP / 2)]
        assert sum(memory.at_peak.values()) == max(sum(made.held(time).values()) for time in times) + 7000


def test_frees_that_nobody_saw():
    """Another thread frees memory. Some of it is given out again. Of a gather's memory, nothing more is heard."""
    gather = "zcompile::gather_group_start"
    events = [
        ranged(STEP, 0, 1000),
        memory_report(110, 5000, 400, 400),
        memory_report(300, 5100, 50, 450),  # inside of it
        ranged(gather, 400, 500),
        memory_report(410, 9000, 30, 480),
        memory_report(600, 20000, 7, 487),
        memory_report(700, 5100, -50, 437),
        memory_report(800, 19999, 2, 439),  # begins before what it takes the place of
    ]
    trace = {"traceEvents": events}
    blocks = allocations_of(trace, None)
    memory = memory_of_step(trace, Walks(None, on_gpu=False), blocks, None, 0, None)
    assert [(block.begins, block.ends, block.lost) for block in blocks] == [
        (110, 300, True),
        (300, 700, False),
        (410, 500, True),
        (600, 800, True),
        (800, math.inf, True),
    ]
    assert memory.kinds["unsharded"] == [0, 0, 0, 30, 0, 0, 0, 0]
    assert memory.kinds["activations"] == [0, 400, 50, 50, 50, 57, 7, 2]
    assert sum(memory.at_peak.values()) == 400 and memory.allocator_bytes is None
