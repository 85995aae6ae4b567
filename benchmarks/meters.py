"""Meters of a run: CPU time and memory of processes, load of the machine, medians and percentiles.

Memory is read from /proc; on systems other than Linux it is 0.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PROC = Path("/proc")


def cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU seconds, user and system, that these processes have used; processes that have ended count 0."""
    total = 0.0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            used = psutil.Process(pid).cpu_times()
            total += used.user + used.system
    return total


def busy_s() -> float:
    """Return the CPU seconds that the whole machine has been busy."""
    used = psutil.cpu_times()
    return sum(getattr(used, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))


def memory_bytes(pids: Iterable[int], field: str) -> int:
    """Return the sum of a /proc/PID/status field over processes: `VmRSS` is the current size, `VmHWM` the peak."""
    total = 0
    for pid in pids:
        try:
            status = (PROC / str(pid) / "status").read_text()
        except OSError:
            continue
        total += next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith(field + ":")), 0)
    return total


def forget_peaks(pids: Iterable[int]) -> None:
    """Reset `VmHWM` of these processes to their current size."""
    for pid in pids:
        try:
            (PROC / str(pid) / "clear_refs").write_text("5")
        except OSError:
            continue


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest of the values that at least `percent` % of them do not exceed; 0 if there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-len(ordered) * percent // 100) - 1))]


def median(values: Sequence[float]) -> float:
    """Return the median; 0 if there are no values."""
    return statistics.median(values) if values else 0.0


def medians_s(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Return the median seconds of a call of each, measured in turns, after one untimed call."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(repeats):
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def median_s(run: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of a call, after one untimed call."""
    return medians_s([run], repeats)[0]


@dataclass(frozen=True)
class Reading:
    """CPU seconds used until one moment."""

    server_s: float
    worker_s: float
    own_s: float
    """Of the process that takes the reading."""
    busy_s: float

    @classmethod
    def now(cls, servers: Iterable[int], workers: Iterable[int]) -> "Reading":
        """Take a reading."""
        return cls(cpu_s(servers), cpu_s(workers), cpu_s([os.getpid()]), busy_s())

    def others_s(self, earlier: "Reading") -> float:
        """Return the CPU seconds since `earlier` of processes that are not part of the run."""
        ours = (self.server_s + self.worker_s + self.own_s) - (earlier.server_s + earlier.worker_s + earlier.own_s)
        return max(0.0, self.busy_s - earlier.busy_s - ours)
