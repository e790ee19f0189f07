"""Groups of parameters whose states a step copies to the device and back; see [Note: streamed steps] in offload.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zcompile.training.host_link import HostLink, Queue

GROUP_BYTES = 64 << 20  # of all states of a group: 1.3 ms at 50 GB/s, far longer than a copy takes to start
# Sets of buffers. Three groups are in work at once; with more sets, copies go on while a group's kernel waits for a GPU
# that runs backward. One H200, 2.0 B in backward: 3 sets 711 ms a step, 8 sets 655, 16 sets 660.
SLOTS = 8
GRAIN = 4096  # elements; large parameters are cut into pieces at multiples of it
ALIGNMENT = 128  # elements; pieces begin at multiples of it in a buffer


@dataclass(frozen=True)
class Piece:
    """Elements [begin, end) of the shard of parameter `item`. In the group's buffers, they begin at `offset`."""

    item: int
    begin: int
    end: int
    offset: int
    numel: int  # of the whole shard

    @property
    def is_last(self) -> bool:
        return self.end == self.numel

    @property
    def is_whole(self) -> bool:
        return self.end - self.begin == self.numel

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the piece's elements of `tensor`: a view, or `tensor` itself if these are all."""
        # No view of a whole gradient: p2p's step writes no cached shard into the memory of a gradient that has a view,
        # so the next refresh must cast that shard (`release_to_step` in csrc/p2p/cached_grads.h).
        return tensor if self.is_whole else tensor.reshape(-1)[self.begin : self.end]

    def in_buffer(self, buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return buffer[self.offset : self.offset + self.end - self.begin].view(like.shape)


def plan_groups(numels: Sequence[int], capacity: int) -> list[list[Piece]]:
    """Divide shards of `numels` elements into groups of at most `capacity` elements, padding included.

    `capacity` is a multiple of `GRAIN`. Only a shard of more than `capacity` elements is cut. A shard without elements
    also gets a piece, because each rank must call the transport for all parameters.
    """
    groups: list[list[Piece]] = [[]]
    used = 0
    for item, numel in enumerate(numels):
        begin = 0
        while begin < numel or not numel:
            room = capacity - used
            taken = min(numel - begin, room // GRAIN * GRAIN) if numel > capacity else numel
            if taken > room or (numel and not taken):
                groups.append([])
                used = 0
                continue
            groups[-1].append(Piece(item, begin, begin + taken, used, numel))
            used += _aligned(taken, ALIGNMENT)
            begin += taken
            if not numel:
                break
    return groups


def _aligned(numel: int, alignment: int) -> int:
    return -(-numel // alignment) * alignment


class Slot:
    """Device buffers for one group at a time. `free`: an event after which the buffers may be overwritten.

    At first, `free` comes after the allocation, because in deterministic mode the compute stream fills new memory.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device, link: HostLink):
        self.buffer = torch.empty(rows, capacity, dtype=torch.float32, device=device)
        self.free = link.mark(Queue.COMPUTE)


class Stream:
    """A pipeline, no CUDA stream: copies states of parameters to the device in groups, steps them, copies them back.

    `rows`: the most state tensors of a parameter: two moments, and the main parameter if it lies in host memory.
    `numels`: elements of each parameter's shard.
    """

    def __init__(self, link: HostLink, rows: int, numels: Sequence[int], device: torch.device):
        total = sum(_aligned(numel, ALIGNMENT) for numel in numels)
        self.link = link
        self.capacity = _aligned(max(1, min(total, GROUP_BYTES // 4 // rows)), GRAIN)
        self.turn = 0  # number of groups so far
        self.copied_out: Any = None  # an event after which all groups so far are in host memory
        count = min(SLOTS, -(-total // self.capacity))
        self.slots = [Slot(rows, self.capacity, device, link) for _ in range(max(1, count))]

    def run(
        self,
        pieces: Sequence[Piece],
        hosts: Sequence[Sequence[torch.Tensor]],
        step: Callable[[list[list[torch.Tensor]]], None],
    ) -> None:
        """Copy `hosts`, the host tensors of each piece, to the device; call `step` with the copies; copy these back."""
        link, slot = self.link, self.slots[self.turn % len(self.slots)]
        self.turn += 1
        rows = slot.buffer.unbind()
        buffers = [
            [piece.in_buffer(row, host) for row, host in zip(rows, each, strict=False)]
            for piece, each in zip(pieces, hosts, strict=True)
        ]
        pairs = [pair for each in zip(hosts, buffers, strict=True) for pair in zip(*each, strict=True)]
        link.wait(Queue.TO_DEVICE, slot.free)
        link.run(Queue.TO_DEVICE, lambda: _copy([(buffer, host) for host, buffer in pairs]))
        link.wait(Queue.COMPUTE, link.mark(Queue.TO_DEVICE))
        link.run(Queue.COMPUTE, lambda: step(buffers))
        link.wait(Queue.TO_HOST, link.mark(Queue.COMPUTE))
        link.run(Queue.TO_HOST, lambda: _copy(pairs))
        slot.free = self.copied_out = link.mark(Queue.TO_HOST)

    def close(self) -> None:
        """Free the device buffers. Their memory is not reused before all streams of `self.link` are done with it."""
        for slot in self.slots:
            self.link.release(slot.buffer)
        self.slots = []


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for to, source in pairs:
        to.copy_(source, non_blocking=True)
