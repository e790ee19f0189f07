"""What the operating system says of this process."""

from pathlib import Path


def status(field: str) -> int:
    """A number of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def rss_bytes() -> int:
    return 1024 * status("VmRSS")


def threads() -> int:
    return status("Threads")
