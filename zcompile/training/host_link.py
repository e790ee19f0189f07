"""Copies between host and device memory that overlap with compute."""

import contextlib
import enum
from collections.abc import Callable, Iterator
from typing import Any

import torch


class Queue(enum.Enum):
    """A queue, such as a CUDA stream, runs its work in order, and concurrently with other queues."""

    TO_DEVICE = enum.auto()
    COMPUTE = enum.auto()  # the program's own work: on a GPU, the current stream
    TO_HOST = enum.auto()


class HostLink:
    """Queues for a model on the CPU. `run` returns after it has done the work, so waits do nothing."""

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Allocate uninitialised host memory, pinned for a GPU, of the shape and dtype of `like`."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, which lies in host memory; for a GPU, a pinned copy if it is not pinned."""
        return tensor

    def is_host(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def run(self, queue: Queue, work: Callable[[], None]) -> None:
        work()

    def mark(self, queue: Queue) -> Any:
        """Return a mark, such as a CUDA event, that is passed when all work enqueued on `queue` so far is done."""
        return queue

    def wait(self, queue: Queue, mark: Any) -> None:
        """Make work enqueued on `queue` from now on wait until `mark` is passed."""

    def synchronize(self, mark: Any) -> None:
        """Block the host until `mark` is passed."""

    def is_passed(self, mark: Any) -> bool:
        """Whether `mark` is passed."""
        return True

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Context manager in which `Queue.COMPUTE` is a second stream, which first waits for the program's work so far.

        The program's own stream does not wait for the second stream before `join`.
        """
        yield

    def join(self) -> None:
        """Make the program's work enqueued from now on wait for the work of all `aside` blocks so far."""

    def release(self, buffer: torch.Tensor) -> None:
        """Before the caller drops `buffer`: keep its memory from reuse until all queues are done with it."""


class CudaLink(HostLink):
    """Queues of a GPU. Copies in each direction have their own stream, so they overlap with compute and each other."""

    def __init__(self, device: torch.device):
        self.device = device
        self.streams = {queue: torch.cuda.Stream(device) for queue in (Queue.TO_DEVICE, Queue.TO_HOST)}
        self.second: torch.cuda.Stream | None = None  # of `aside`

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

    def is_passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        if self.second is None:
            # High priority: else the short kernels of an optimizer's step wait until backward's long kernels end.
            self.second = torch.cuda.Stream(self.device, priority=-1)
        self.second.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.second):
            yield

    def join(self) -> None:
        if self.second is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.second)

    def release(self, buffer: torch.Tensor) -> None:
        for stream in (*self.streams.values(), *([self.second] if self.second else [])):
            buffer.record_stream(stream)

    def _stream(self, queue: Queue) -> torch.cuda.Stream:
        return self.streams.get(queue) or torch.cuda.current_stream(self.device)


def host_link_of(device: torch.device) -> HostLink:
    return CudaLink(device) if device.type == "cuda" else HostLink()
