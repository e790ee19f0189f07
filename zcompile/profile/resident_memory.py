"""Samples the resident memory of this process, to find its peak on CPUs."""

import threading
from typing import Any

INTERVAL_S = 0.005


class ResidentMemory:
    """Samples resident memory within a `with` block. `peak_bytes` is the maximum, minus the memory at construction."""

    def __init__(self) -> None:
        import psutil

        self.process = psutil.Process()
        self.before = self.process.memory_info().rss

    def __enter__(self) -> "ResidentMemory":
        self.peak_bytes, self.done = 0, threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()
        return self

    def _sample(self) -> None:
        is_done = False
        while not is_done:
            is_done = self.done.wait(INTERVAL_S)
            self.peak_bytes = max(self.peak_bytes, self.process.memory_info().rss - self.before)

    def __exit__(self, *_: Any) -> None:
        self.done.set()
        self.thread.join()
