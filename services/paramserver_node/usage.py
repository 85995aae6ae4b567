"""Processor and memory usage of this process."""

from collections.abc import Callable
from contextlib import suppress
from time import process_time

import psutil


class ResidentMemory:
    """The resident memory of this process, as last known while no file descriptor is free to read it."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._bytes = 0

    def bytes(self) -> int:
        """Return its size."""
        with suppress(OSError):
            self._bytes = int(self._process.memory_info().rss)
        return self._bytes


class Usage:
    """Measures processor time between two calls of `look`, and current memory."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._memory = ResidentMemory()
        self._since = clock()
        self._spent_s = process_time()

    def look(self) -> dict[str, float]:
        """Return {"cpu_cores": average number of busy cores since the last call, "rss_bytes": resident memory}."""
        now, spent_s = self._clock(), process_time()
        passed_s = now - self._since
        cores = (spent_s - self._spent_s) / passed_s if passed_s > 0 else 0.0
        self._since, self._spent_s = now, spent_s
        return {"cpu_cores": round(cores, 3), "rss_bytes": self._memory.bytes()}
