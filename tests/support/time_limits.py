"""Time limits that scale with the machine: its speed is measured once, when the session starts."""

import os
import time

VARIABLE = "ZCOMPILE_TEST_SLOWNESS"  # by which workers, ranks and programs of a session know it
LOOP_SECONDS = 0.2  # of `_loop` on one of two quiet cores of the machine on which the limits were chosen


def _loop() -> float:
    """Seconds of wall time that a fixed loop takes."""
    begin = time.perf_counter()
    total = 0
    for i in range(4_000_000):
        total += i & 7
    return time.perf_counter() - begin


def measure() -> None:
    """Measure the machine, unless a process of this session has."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = str(min(max(_loop() / LOOP_SECONDS, 1.0), 4.0))


def scaled(seconds: float) -> float:
    """A limit of `seconds` on a quiet machine, for this machine."""
    return seconds * float(os.environ.get(VARIABLE, "1"))
