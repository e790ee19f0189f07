"""Groups of tensors that a step takes from host memory through memory of the device; see [Note: streamed steps]."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zcompile.training.host_link import HostLink, Queue

GROUP_BYTES = 64 << 20  # of all states: 1.3 ms of a link at 50 GB/s, far more than the start of a copy takes
SLOTS = 3  # one is copied in, one is stepped, one is copied out
GRAIN = 4096  # elements: tensors are cut at multiples
ALIGNMENT = 128  # elements: pieces begin at multiples in a buffer


@dataclass(frozen=True)
class Piece:
    """Elements [begin, end) of a parameter, which lie at `offset` in the buffers of its group."""

    item: int
    begin: int
    end: int
    offset: int
    numel: int  # of the parameter

    @property
    def is_last(self) -> bool:
        return self.end == self.numel

    @property
    def is_whole(self) -> bool:
        return self.end - self.begin == self.numel

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece of `tensor`. A whole one is no view: transports ask how many tensors have a gradient's memory."""
        return tensor if self.is_whole else tensor.reshape(-1)[self.begin : self.end]

    def in_buffer(self, buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The piece's place in `buffer`, of the shape of `like`."""
        return buffer[self.offset : self.offset + self.end - self.begin].view(like.shape)


def plan_groups(numels: Sequence[int], capacity: int) -> list[list[Piece]]:
    """The pieces of each group, at most `capacity` elements with padding. There is at least one group.

    Parameters are cut only if they exceed `capacity`, a multiple of `GRAIN`. Those without elements are in a group,
    too: each rank calls the transport for all parameters.
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
    """Device memory of one group at a time, and a mark that is passed when it may be written.

    The mark follows the allocation: under `torch.use_deterministic_algorithms`, torch fills new memory in the queue
    that computes.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device, link: HostLink):
        self.buffer = torch.empty(rows, capacity, dtype=torch.float32, device=device)
        self.free = link.mark(Queue.COMPUTE)


class Stream:
    """Copies groups to the device, steps them there, and copies them back. Its memory is there until `close`.

    Args:
        rows: how many tensors of each parameter a group has at most.
        numels: elements of each parameter.
        device: on which a step computes.
    """

    def __init__(self, link: HostLink, rows: int, numels: Sequence[int], device: torch.device):
        total = sum(_aligned(numel, ALIGNMENT) for numel in numels)
        self.link = link
        self.capacity = _aligned(max(1, min(total, GROUP_BYTES // 4 // rows)), GRAIN)
        self.turn = 0  # counts groups
        self.copied_out: Any = None  # a mark: all groups until now are in host memory
        count = min(SLOTS, -(-total // self.capacity))
        self.slots = [Slot(rows, self.capacity, device, link) for _ in range(max(1, count))]

    def run(
        self,
        pieces: Sequence[Piece],
        hosts: Sequence[Sequence[torch.Tensor]],
        step: Callable[[list[list[torch.Tensor]]], None],
    ) -> None:
        """Call `step` with copies of `hosts`, the pieces' tensors in host memory, and copy them back after it."""
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
        """Give the memory up, which is used again when all queues are done with it."""
        for slot in self.slots:
            self.link.release(slot.buffer)
        self.slots = []


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair to the first."""
    for to, source in pairs:
        to.copy_(source, non_blocking=True)
