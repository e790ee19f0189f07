"""Faults of a machine."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def full_disk(nbytes: int = 0) -> Iterator[None]:
    """No file may grow beyond `nbytes` here, nor in processes that this one starts. That is an OSError, as if a disk
    were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
