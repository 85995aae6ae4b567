"""Child processes that cannot outlive their owner.

Each child leads its own process group.  When the owner dies, even by SIGKILL, two mechanisms kill its children: the
kernel's parent-death signal (Linux), and a guard process that holds the other end of a pipe from the owner and kills
every group still registered when that pipe closes (on every system, and including a child's own children).
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

Kind = Literal["redis", "scheduler", "shard", "worker"]


@dataclass(frozen=True)
class ChildSpec:
    """A child process to start."""

    name: str
    """Name of the child and of its log, `logs/NAME.log`."""
    kind: Kind
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the owner's environment."""


class Guard:
    """A process that kills the registered process groups once its owner is gone."""

    def __init__(self) -> None:
        read_end, self._write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._write_end)
                self._watch(read_end)
            finally:
                os._exit(0)
        os.close(read_end)

    @staticmethod
    def _watch(read_end: int) -> None:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.closerange(3, read_end)
        os.closerange(read_end + 1, 1024)
        groups: set[int] = set()
        with os.fdopen(read_end) as lines:
            for line in lines:
                sign, group = line[0], int(line[1:])
                groups.add(group) if sign == "+" else groups.discard(group)
        for group in groups:
            with suppress(OSError):
                os.killpg(group, signal.SIGKILL)

    def add(self, group: int) -> None:
        """Register a process group."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Unregister a process group; its number may be reused from now on."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        with suppress(OSError):  # somebody has killed the guard: the cluster runs on without
            os.write(self._write_end, line.encode())

    def close(self) -> None:
        """Stop the guard; the groups still registered are killed."""
        os.close(self._write_end)
        os.waitpid(self.pid, 0)


def start(spec: ChildSpec, log: Path, guard: Guard) -> subprocess.Popen[bytes]:
    """Start a child whose output is appended to `log`, with none of the owner's streams.

    Call it from the owner's main thread: the parent-death signal is sent when the thread that forked ends.
    """
    owner = os.getpid()

    def in_child() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != owner:
                os._exit(1)

    with log.open("ab") as out:
        child = subprocess.Popen(
            list(spec.argv),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **spec.env},
            start_new_session=True,
            preexec_fn=in_child,
        )
    guard.add(child.pid)
    return child


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to a child and its own children; does nothing if they are gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
