"""How much memory a host or its container has, from sizes that stay the same when a job starts again."""

import contextlib
import os
from pathlib import Path


def host_memory_bytes() -> int:
    """Bytes of memory that the processes of this machine, or of this container, may have together."""
    physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical_bytes, *cgroup_limits()])


def cgroup_limits(root: Path = Path("/")) -> list[int]:
    """The limits in bytes of this process's control groups and of those that they are in, of either version.

    Without a limit, version 1 has a number near 2 ** 63. Tests have a `root` of their own, with `proc` and `sys`.
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
        # A container may see its own group as the folder itself, and not the path by which the host knows it.
        for group in (own, *own.parents):
            with contextlib.suppress(OSError, ValueError):  # no such group, or no number: "max"
                limits.append(int((group / file).read_text()))
            if group == folder:
                break
    return limits
