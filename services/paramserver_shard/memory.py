"""Memory limit and memory use of this process."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

from paramserver_node.setting_checks import size_bytes
from paramserver_node.usage import ResidentMemory
from paramserver_shard.buffers import BufferPool

log = logging.getLogger("paramserver.shard")

_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_CGROUP: Final = Path("/proc/self/cgroup")


def limit_of(setting: str, cgroups: Path = _CGROUPS, own_cgroup: Path = _OWN_CGROUP) -> int:
    """Return the memory limit in bytes: the lowest of the setting, if there is one, cgroups and physical memory.

    Models are admitted by it, so a setting that is too high is not believed: the system would kill the process.
    """
    there = min([int(psutil.virtual_memory().total), *_allowed(cgroups, own_cgroup)])
    if setting and size_bytes(setting) > there:
        log.warning("memory_limit is %s, but the container or machine has %d MiB, which counts", setting, there >> 20)
    return min(there, size_bytes(setting)) if setting else there


def _allowed(cgroups: Path, own_cgroup: Path) -> list[int]:
    """Return the limits of this process's cgroup and its ancestors, v1 or v2; 'max' means none and is skipped."""
    names = ["memory.max", "memory/memory.limit_in_bytes"]  # inside a container, its own cgroup is the root
    try:
        for line in own_cgroup.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            kind, file = ("", "memory.max") if not controllers else ("memory", "memory.limit_in_bytes")
            if not controllers or "memory" in controllers.split(","):
                parts = [p for p in path.split("/") if p not in ("", "..")]
                names += ["/".join([kind, *parts[:n], file]).lstrip("/") for n in range(1, len(parts) + 1)]
    except (OSError, ValueError):
        pass  # not Linux, or no cgroups
    limits = []
    for name in names:
        try:
            limits.append(int((cgroups / name).read_text()))
        except (OSError, ValueError):
            continue
    return limits


class Memory:
    """Memory limit and use, as reported in heartbeats."""

    def __init__(self, limit_bytes: int, pools: Sequence[BufferPool] = ()) -> None:
        self.limit_bytes = limit_bytes
        self._pools = pools
        self._resident = ResidentMemory()

    def document(self) -> dict[str, int]:
        """Return the limit and the resident memory for a heartbeat, without what idle pools have kept."""
        for pool in self._pools:
            pool.let_go_if_idle(time.monotonic())
        return {"limit_bytes": self.limit_bytes, "used_bytes": self._resident.bytes()}
