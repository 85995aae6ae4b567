"""Processor and memory usage of this process."""

from collections.abc import Callable

import psutil


class Usage:
    """Measures processor time between two calls of `look`, and current memory."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._process = psutil.Process()
        self._since = clock()
        self._spent_s = self._cpu_s()

    def look(self) -> dict[str, float]:
        """Return {"cpu_cores": average number of busy cores since the last call, "rss_bytes": resident memory}."""
        now, spent_s = self._clock(), self._cpu_s()
        passed_s = now - self._since
        cores = (spent_s - self._spent_s) / passed_s if passed_s > 0 else 0.0
        self._since, self._spent_s = now, spent_s
        return {"cpu_cores": round(cores, 3), "rss_bytes": self._process.memory_info().rss}

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)
