"""Shared-memory files that clients on this machine map: one folder per shard process, removed when it ends.

A folder is `ROOT/paramserver-UID/NAME-RANDOM`, ROOT a tmpfs (`/dev/shm`, or a volume that containers share). It holds
a locked file `lock`, the board, the socket that the shard serves requests on, and one file for each buffer. The kernel
releases the lock when the process ends, however it ends; the next shard that starts under the same root removes all
folders without a locked `lock`. A reader that has mapped a file keeps its bytes after the file is removed.
"""

import fcntl
import itertools
import logging
import mmap
import os
import re
import resource
import secrets
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from paramserver.wire.board import LOCK
from paramserver_node.own_folder import make_own
from paramserver_shard.board import Board

log = logging.getLogger("paramserver.shard")

_SOCKET: Final = "requests"
_HALF_MADE_S: Final = 60.0
"""Folders being created or removed have no lock file for a moment; one older than this is a leftover."""
_SOCKET_PATH_MAX: Final = 107
_FILES_SHARE: Final = 0.5
"""Share of the files that this process may open; a mapping keeps its file open, and connections need files, too."""
_FREE_SHARE: Final = 0.8
"""Share of the file system's free space that this shard may use; the rest is left to others."""


class SharedFolder:
    """The files of one shard process."""

    def __init__(self, path: Path, lock: int, board: Board, bytes_max: int) -> None:
        self.path: Final = path
        self.board: Final = board
        self.bytes_max: Final = bytes_max
        self._lock = lock
        self._full_logged = False
        self._numbers = itertools.count(1)
        self._sizes: dict[str, int] = {}
        """Bytes of each buffer file."""

    @classmethod
    def open(cls, root: str, name: str, bytes_max: int) -> "SharedFolder | None":
        """Create a folder under `root`; None if `root` is empty, or on failure, which is logged."""
        if not root:
            return None
        try:
            if not sys.platform.startswith("linux"):
                raise OSError("only Linux lets two processes map one buffer without a copy")
            return cls._open(Path(root).absolute() / f"paramserver-{os.getuid()}", name, bytes_max)
        except OSError as error:
            log.warning("no shared memory for clients on this machine, they use HTTP: %s", error)
            return None

    @classmethod
    def _open(cls, parent: Path, name: str, bytes_max: int) -> "SharedFolder":
        make_own(parent)
        sweep(parent)
        path = parent / f"{re.sub(r'[^A-Za-z0-9_-]', '_', name[:40])}-{secrets.token_hex(6)}"
        if len(os.fsencode(path / _SOCKET)) > _SOCKET_PATH_MAX:
            raise OSError(f"{path} is too long for the path of a socket")
        half_made = parent / f".{path.name}"
        half_made.mkdir(mode=0o700)
        lock = os.open(half_made / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            half_made.rename(path)
            free = os.statvfs(path)
            board = Board(path)
        except OSError:
            os.close(lock)  # unlocked, the folder is removed by the next sweep
            raise
        return cls(path, lock, board, min(bytes_max, int(free.f_bavail * free.f_frsize * _FREE_SHARE)))

    @property
    def socket(self) -> Path:
        """Path of the socket that clients on this machine send requests to."""
        return self.path / _SOCKET

    @property
    def bytes(self) -> int:
        """Bytes of all buffer files; a sum, because threads that add to and subtract from one number lose updates."""
        return sum(self._sizes.values())

    def allocate(self, size_bytes: int) -> tuple[str, mmap.mmap] | None:
        """Create a file of that size and map it, with all pages allocated; None if there is no room, which is logged.

        Several threads may do so at once.
        """
        try:
            return self._allocate(size_bytes)
        except OSError as error:
            if not self._full_logged:
                self._full_logged = True
                log.warning("clients on this machine use HTTP for what does not fit into shared memory: %s", error)
            return None

    def _allocate(self, size_bytes: int) -> tuple[str, mmap.mmap]:
        if self.bytes + size_bytes > self.bytes_max:
            raise OSError(f"{self.bytes} of {self.bytes_max} bytes of shared memory are in use")
        open_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if open_max != resource.RLIM_INFINITY and len(self._sizes) >= int(open_max * _FILES_SHARE):
            raise OSError(f"it consists of {len(self._sizes)} files already, and {open_max} may be open")
        name = self._new_name()
        file = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._sizes[name] = size_bytes  # before the pages are there, as others may allocate meanwhile
        try:
            # Allocate the pages now: a later first write to one, with the file system full, would kill the process.
            os.posix_fallocate(file, 0, size_bytes)
            memory = mmap.mmap(file, size_bytes, flags=mmap.MAP_SHARED)
        except OSError:
            self.remove(name)
            raise
        finally:
            os.close(file)
        return name, memory

    def rename(self, name: str) -> str:
        """Give a file a name that was never used before, and return it."""
        new = self._new_name()
        (self.path / name).rename(self.path / new)
        self._sizes[new] = self._sizes.pop(name)
        return new

    def _new_name(self) -> str:
        # Whoever knows the name of a slot can push it or return it, so it cannot be guessed.
        return f"b{next(self._numbers)}x{secrets.token_hex(8)}"

    def remove(self, name: str) -> None:
        """Delete a file; processes that have it mapped keep its bytes."""
        self._sizes.pop(name, None)
        (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder."""
        with suppress(OSError):
            _remove(self.path)
        os.close(self._lock)


def sweep(parent: Path) -> None:
    """Remove the folders of processes that have ended."""
    for path in list(parent.iterdir()):
        try:
            if path.name.startswith("."):
                if time.time() - path.stat().st_mtime > _HALF_MADE_S:
                    shutil.rmtree(path, ignore_errors=True)
            elif not _alive(path):
                _remove(path)
        except OSError:
            continue  # another starting shard has removed it, or it is none of ours


def _remove(path: Path) -> None:
    """Rename the folder to a dot name, then delete it, so that `sweep` recognizes a half-removed one."""
    shutil.rmtree(path.rename(path.with_name(f".{path.name}")), ignore_errors=True)


def _alive(path: Path) -> bool:
    try:
        file = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return time.time() - path.stat().st_mtime <= _HALF_MADE_S
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
