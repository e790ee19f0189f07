"""The memory of a process, sampled: what there is to measure on a CPU."""

import threading
from typing import Any

INTERVAL_S = 0.005


class ResidentMemory:
    """Resident memory of this process, beyond what there was when this was made; the most while it is entered."""

    def __init__(self) -> None:
        import psutil

        self.process = psutil.Process()
        self.before = 0
        self.before = self.grown_bytes()

    def grown_bytes(self) -> int:
        return self.process.memory_info().rss - self.before

    def __enter__(self) -> "ResidentMemory":
        self.peak_bytes, self.done = self.grown_bytes(), threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()
        return self

    def _sample(self) -> None:
        while not self.done.wait(INTERVAL_S):
            self.peak_bytes = max(self.peak_bytes, self.grown_bytes())

    def __exit__(self, *_: Any) -> None:
        self.done.set()
        self.thread.join()
        self.peak_bytes = max(self.peak_bytes, self.grown_bytes())
