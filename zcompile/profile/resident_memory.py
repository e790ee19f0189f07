"""The memory of a process, sampled: what there is to measure on a CPU."""

import threading
from typing import Any

from zcompile.profile.job import DeviceMemory


class ResidentMemory:
    """The most resident memory of this process while it is entered, beyond what there was when this was made."""

    def __init__(self, interval_s: float = 0.005):
        import psutil

        self.process = psutil.Process()
        self.interval_s = interval_s
        self.before = self.now()
        self.peak = 0

    def now(self) -> int:
        return self.process.memory_info().rss

    def grown(self) -> DeviceMemory:
        return DeviceMemory(self.peak - self.before, None, None, self.now() - self.before)

    def __enter__(self) -> "ResidentMemory":
        self.peak, self.done = self.now(), threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()
        return self

    def _sample(self) -> None:
        while not self.done.wait(self.interval_s):
            self.peak = max(self.peak, self.now())

    def __exit__(self, *_: Any) -> None:
        self.done.set()
        self.thread.join()
        self.peak = max(self.peak, self.now())
