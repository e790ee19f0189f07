"""Events of a made-up trace, as torch's profiler writes them."""

from typing import Any


def ranged(
    name: str, begin: float, end: float, thread: int = 1, category: str = "user_annotation", **args: Any
) -> dict[str, Any]:
    """What takes time, from `begin` to `end` in microseconds."""
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": end - begin, "tid": thread, "args": args}


def memory_report(
    time: float,
    address: int,
    nbytes: int,
    total: int,
    thread: int = 1,
    device: int | None = None,
    reserved: int = 1 << 50,
) -> dict[str, Any]:
    """What an allocator tells of memory: `nbytes` taken, or given back if negative. A `device` of None is the CPU."""
    kind, index = (0, -1) if device is None else (1, device)
    args = {
        "Addr": address,
        "Bytes": nbytes,
        "Total Allocated": total,
        "Total Reserved": reserved,
        "Device Type": kind,
        "Device Id": index,
    }
    return {"ph": "i", "name": "[memory]", "cat": "cpu_instant_event", "ts": time, "tid": thread, "args": args}
