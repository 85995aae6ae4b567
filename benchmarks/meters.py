"""What a run is measured with: processor time and memory of processes, load of the machine, medians and percentiles.

Everything is read from /proc, so runs are measured on Linux; elsewhere these figures are 0 and only the times count.
"""

import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def cpu_s(pids: Iterable[int]) -> float:
    """Processor seconds, user and system, that these processes have used so far; those that are gone count nothing."""
    ticks = 0
    for pid in pids:
        try:
            fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_S


def busy_s() -> float:
    """Processor seconds that the whole machine has spent not being idle."""
    try:
        with (PROC / "stat").open() as f:
            ticks = [int(x) for x in f.readline().split()[1:9]]
    except OSError:
        return 0.0
    idle, waiting = ticks[3], ticks[4]
    return (sum(ticks) - idle - waiting) / TICKS_PER_S


def memory_bytes(pids: Iterable[int], field: str) -> int:
    """Sum over the processes of a field of /proc/PID/status: `VmRSS` now, `VmHWM` at its highest."""
    total = 0
    for pid in pids:
        try:
            status = (PROC / str(pid) / "status").read_text()
        except OSError:
            continue
        total += next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith(field + ":")), 0)
    return total


def forget_peaks(pids: Iterable[int]) -> None:
    """Let `VmHWM` of these processes start again from what they hold now."""
    for pid in pids:
        try:
            (PROC / str(pid) / "clear_refs").write_text("5")
        except OSError:
            continue


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of them do not exceed; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-len(ordered) * percent // 100) - 1))]


def median(values: Sequence[float]) -> float:
    """The median; 0 of none."""
    return statistics.median(values) if values else 0.0


@dataclass(frozen=True)
class Reading:
    """The meters at one moment."""

    server_s: float
    worker_s: float
    own_s: float
    """Of the process that reads them."""
    busy_s: float

    @classmethod
    def now(cls, servers: Iterable[int], workers: Iterable[int]) -> "Reading":
        """Read all of them."""
        return cls(cpu_s(servers), cpu_s(workers), cpu_s([os.getpid()]), busy_s())

    def others_s(self, earlier: "Reading") -> float:
        """Processor seconds since then of processes that have no part in the run."""
        ours = (self.server_s + self.worker_s + self.own_s) - (earlier.server_s + earlier.worker_s + earlier.own_s)
        return max(0.0, self.busy_s - earlier.busy_s - ours)
