"""Memory limit and memory use of this process."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from paramserver_node.setting_checks import size_bytes
from paramserver_node.usage import ResidentMemory
from paramserver_shard import control_groups
from paramserver_shard.buffers import BufferPool

log = logging.getLogger("paramserver.shard")


def limit_of(setting: str, groups: Path = control_groups.ROOT, own_groups: Path = control_groups.OWN) -> int:
    """Return the memory limit in bytes: the lowest of the setting, if there is one, cgroups and physical memory.

    Models are admitted by it, so a setting that is too high is not believed: the system would kill the process.
    """
    there = int(psutil.virtual_memory().total)
    for folder in control_groups.folders("memory", groups, own_groups):
        for file in ("memory.max", "memory.limit_in_bytes"):
            there = min([there, *control_groups.numbers(folder, file)])
    if setting and size_bytes(setting) > there:
        log.warning("memory_limit is %s, but the container or machine has %d MiB, which counts", setting, there >> 20)
    return min(there, size_bytes(setting)) if setting else there


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
