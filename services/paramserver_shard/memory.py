"""How much memory this process may take, and takes."""

from pathlib import Path
from typing import Final

import psutil

from paramserver_node.plausible import size_bytes

_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_CGROUP: Final = Path("/proc/self/cgroup")


def limit_of(setting: str, cgroups: Path = _CGROUPS, own_cgroup: Path = _OWN_CGROUP) -> int:
    """The bytes that this process may take: the setting, else what its container allows, else the machine's memory."""
    if setting:
        return size_bytes(setting)
    return min([int(psutil.virtual_memory().total), *_allowed(cgroups, own_cgroup)])


def _allowed(cgroups: Path, own_cgroup: Path) -> list[int]:
    """The limits of its control group and of all around it, of either version; those that say 'max' limit nothing."""
    names = ["memory.max", "memory/memory.limit_in_bytes"]  # as a container sees its own
    try:
        for line in own_cgroup.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            kind, file = ("", "memory.max") if not controllers else ("memory", "memory.limit_in_bytes")
            if not controllers or "memory" in controllers.split(","):
                parts = [p for p in path.split("/") if p not in ("", "..")]
                names += ["/".join([kind, *parts[:n], file]).lstrip("/") for n in range(1, len(parts) + 1)]
    except (OSError, ValueError):
        pass  # no Linux, or no control groups
    limits = []
    for name in names:
        try:
            limits.append(int((cgroups / name).read_text()))
        except (OSError, ValueError):
            continue
    return limits


class Memory:
    """What a heartbeat tells of memory."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._process = psutil.Process()

    @property
    def used_bytes(self) -> int:
        """Resident memory."""
        return int(self._process.memory_info().rss)

    def document(self) -> dict[str, int]:
        """{"limit_bytes", "used_bytes"}"""
        return {"limit_bytes": self.limit_bytes, "used_bytes": self.used_bytes}
