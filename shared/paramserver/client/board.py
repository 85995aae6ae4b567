"""The client's side of the board (`paramserver.wire.board`): whether what it holds is what a pull would bring."""

import mmap
import os
import sys
import time
import weakref
from typing import Any

import numpy as np

from paramserver.wire.board import FILE, LOCK, SAID, UNTIL, WORDS, place

if sys.platform != "win32":
    import fcntl


class BoardView:
    """The board of one shard process, which may have none, or be gone; then it confirms nothing."""

    def __init__(self, folder: str) -> None:
        self._words: Any = None
        self._lock = -1
        try:
            self._lock = os.open(f"{folder}/{LOCK}", os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._lock)
            file = os.open(f"{folder}/{FILE}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._words = np.frombuffer(mmap.mmap(file, 8 * WORDS, mmap.MAP_SHARED, mmap.PROT_READ), "<i8")
            finally:
                os.close(file)
        except (OSError, ValueError):
            pass

    def confirms(self, number: int) -> bool:
        """Whether the shard, at this moment, would answer a pull with just the values of that lease of its own.

        The order counts: the number is there first, and the shard may serve and its process lives after that.
        """
        words = self._words
        if words is None or words[place(number)] != number:
            return False
        return bool(words[SAID] <= time.monotonic_ns() < words[UNTIL]) and self.lives()

    def lives(self) -> bool:
        """Whether the process that made the folder holds its lock, which the kernel takes from a dead one."""
        if self._lock < 0:
            return False
        try:
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        return False
