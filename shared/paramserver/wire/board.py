"""The board: a file in a shard's shared folder that tells clients whether the values they hold are still current.

The file `board` has `WORDS` little-endian 64-bit words, written by the shard alone, each in one store:

word 0            from when the shard may serve: its last confirmation, in ns of the machine's monotonic clock
word 1            until when it may serve, likewise; 0: it serves nothing
word 2 onwards    word `slot_index(n)` is n as long as a pull would return exactly the values that lease n covers

So a client that finds its lease's number there, at a time between the first two words, while the shard's process is
alive (the folder's `lock` is locked), knows what a pull would return at that moment without making one.
"""

from typing import Final

FILE: Final = "board"
LOCK: Final = "lock"
"""A file next to the board that the shard's process keeps locked."""
WORDS: Final = 8192
VALID_FROM: Final = 0
UNTIL: Final = 1
_FIRST: Final = 2
LEASE_WORDS: Final = WORDS - _FIRST


def slot_index(number: int) -> int:
    """Return the index of that lease's word; a later lease may take it over, which supersedes the earlier one."""
    return _FIRST + number % LEASE_WORDS
