"""The shard's side of the board (`paramserver.wire.board`): what it would say to a pull now, for clients to read."""

import mmap
import os
from typing import Final

import numpy as np

from paramserver.wire.board import FILE, SAID, UNTIL, WORDS, place
from paramserver_shard.shared_folder import SharedFolder

_NS: Final = 1e9


class Board:
    """The words that clients of this machine look at.  Used by the event loop's thread alone."""

    def __init__(self, folder: SharedFolder) -> None:
        """Raises OSError where the folder has no room for a page."""
        file = os.open(folder.path / FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, 8 * WORDS)
            self._words = np.frombuffer(mmap.mmap(file, 8 * WORDS, flags=mmap.MAP_SHARED), "<i8")
        finally:
            os.close(file)

    def serve(self, said_s: float, until_s: float) -> None:
        """The shard may serve until then, by the machine's monotonic clock; a time that is past: not now."""
        self._words[UNTIL] = 0  # never the new end with the old beginning
        self._words[SAID] = int(said_s * _NS)
        self._words[UNTIL] = max(0, int(until_s * _NS))

    def present(self, number: int) -> None:
        """A pull would be answered with what that lease covers."""
        self._words[place(number)] = number

    def past(self, number: int) -> None:
        """It would not any more."""
        if self._words[place(number)] == number:
            self._words[place(number)] = 0
