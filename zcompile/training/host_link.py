"""Copies between the memory of the host and that of a device, beside its compute."""

import enum
from collections.abc import Callable
from typing import Any

import torch


class Queue(enum.Enum):
    """Work that runs in order. Queues run beside each other, as streams of a GPU do."""

    TO_DEVICE = enum.auto()
    COMPUTE = enum.auto()  # where the program computes: on a GPU, the current stream
    TO_HOST = enum.auto()


class HostLink:
    """The link of a CPU, whose own memory is both: work is done when `run` returns, so no wait has an effect."""

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Uninitialised host memory of the shape and dtype of `like`, which copies can use beside compute."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, which lies in the host's memory, in memory that copies can use beside compute."""
        return tensor

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in host memory."""
        return tensor.device.type == "cpu"

    def run(self, queue: Queue, work: Callable[[], None]) -> None:
        """Let `queue` do `work` after the work that it was given before."""
        work()

    def mark(self, queue: Queue) -> Any:
        """A mark that is passed when the work given to `queue` so far is done."""
        return queue

    def wait(self, queue: Queue, mark: Any) -> None:
        """Let `queue` go on only when `mark` is passed."""

    def synchronize(self, mark: Any) -> None:
        """Let the host go on only when `mark` is passed."""

    def release(self, buffer: torch.Tensor) -> None:
        """Let the memory of `buffer`, which the caller drops, be used again only when all queues are done with it."""


class CudaLink(HostLink):
    """The link of a GPU. Both directions have a stream, so that copies go both ways at once, beside compute."""

    def __init__(self, device: torch.device):
        self.device = device
        self.streams = {queue: torch.cuda.Stream(device) for queue in (Queue.TO_DEVICE, Queue.TO_HOST)}

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_pinned() else self.allocate(tensor).copy_(tensor)

    def run(self, queue: Queue, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream(queue)):
            work()

    def mark(self, queue: Queue) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream(queue))
        return event

    def wait(self, queue: Queue, mark: torch.cuda.Event) -> None:
        self._stream(queue).wait_event(mark)

    def synchronize(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def release(self, buffer: torch.Tensor) -> None:
        for stream in self.streams.values():
            buffer.record_stream(stream)

    def _stream(self, queue: Queue) -> torch.cuda.Stream:
        return self.streams.get(queue) or torch.cuda.current_stream(self.device)


def host_link_of(device: torch.device) -> HostLink:
    """The link between the host and `device`."""
    return CudaLink(device) if device.type == "cuda" else HostLink()
