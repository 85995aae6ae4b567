"""The client's side of the board (`paramserver.wire.board`): tells whether leased values are still current."""

import mmap
import os
import sys
import time
import weakref
from typing import Any

import numpy as np

from paramserver.wire.board import FILE, LOCK, UNTIL, VALID_FROM, WORDS, slot_index

if sys.platform != "win32":
    import fcntl


class BoardView:
    """The board of one shard process.  If there is none, or the process is gone, it confirms nothing."""

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
        """Whether the shard would answer a pull, at this moment, with exactly the values of its lease `number`.

        The order of the reads matters: first the number, then whether the shard may serve and its process lives.
        """
        words = self._words
        if words is None or words[slot_index(number)] != number:
            return False
        return bool(words[VALID_FROM] <= time.monotonic_ns() < words[UNTIL]) and self.lives()

    def lives(self) -> bool:
        """Whether the shard process still holds the folder's lock; the kernel releases it when the process dies."""
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
