"""Reads the memory size of a host or container, which stays the same when a job starts again."""

import contextlib
import os
from pathlib import Path


def host_memory_bytes() -> int:
    """Return the bytes of memory that all processes of this machine, or of this container, may use together."""
    physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical_bytes, *cgroup_limits()])


def cgroup_limits(root: Path = Path("/")) -> list[int]:
    """Return the memory limits, bytes, of this process's control groups (version 1 or 2) and of their parents.

    Without a limit, version 1 has a number near 2 ** 63. `root` holds the folders `proc` and `sys`; tests have others.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            folder, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        own = folder / path.lstrip("/")
        # In a container, its own group may be `folder` itself, while `path` is the host's path of the group.
        for group in (own, *own.parents):
            with contextlib.suppress(OSError, ValueError):  # no such group, or no number: "max"
                limits.append(int((group / file).read_text()))
            if group == folder:
                break
    return limits
