"""Reads the total memory of a host or container."""

import contextlib
import os
from pathlib import Path


def host_memory_bytes() -> int:
    """Return the bytes of memory that all processes of this machine or container may use in total."""
    physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical_bytes, *cgroup_limits()])


def cgroup_limits(root: Path = Path("/")) -> list[int]:
    """Return the memory limits, in bytes, of this process's Linux control groups (v1 or v2) and of their parents.

    In v1, a group without a limit has a value near 2 ** 63. Tests pass a `root` of their own, with `proc` and `sys`.
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
        # In a container, the container's group may be `folder` itself, while `path` is the path on the host.
        for group in (own, *own.parents):
            with contextlib.suppress(OSError, ValueError):  # no such group, or no number: "max"
                limits.append(int((group / file).read_text()))
            if group == folder:
                break
    return limits
