"""The shard's side of the board (`paramserver.wire.board`), where local clients see which leases are current."""

import mmap
import os
from pathlib import Path
from typing import Final

import numpy as np

from paramserver.wire.board import FILE, UNTIL, VALID_FROM, WORDS, slot_index

_NS: Final = 1e9


class Board:
    """Writer of the board.  Used only by the event loop's thread."""

    def __init__(self, folder: Path) -> None:
        """Create the board's file.  Raises OSError if the folder has no room for it."""
        file = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, 8 * WORDS)
            self._words = np.frombuffer(mmap.mmap(file, 8 * WORDS, flags=mmap.MAP_SHARED), "<i8")
        finally:
            os.close(file)

    def set_serving_window(self, confirmed_s: float, until_s: float) -> None:
        """Publish until when the shard may serve, by the machine's monotonic clock; a past time: it may not."""
        self._words[UNTIL] = 0  # first, so that no reader sees the new end with the old start
        self._words[VALID_FROM] = int(confirmed_s * _NS)
        self._words[UNTIL] = max(0, int(until_s * _NS))

    def mark_current(self, number: int) -> None:
        """Mark a lease as current: a pull would be answered with exactly the values it covers."""
        self._words[slot_index(number)] = number

    def clear(self, number: int) -> None:
        """Clear the mark of a lease, unless a later lease uses its word."""
        if self._words[slot_index(number)] == number:
            self._words[slot_index(number)] = 0
