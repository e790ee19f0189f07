"""This process as the operating system has it: its memory, threads and files."""

import contextlib
import gc
import resource
from collections.abc import Iterator
from pathlib import Path


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Collect garbage, then turn the collector off: a value is freed when its last reference goes, or never."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def full_disk(nbytes: int = 0) -> Iterator[None]:
    """No file may grow beyond `nbytes` here and in processes that this one starts: an OSError, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
