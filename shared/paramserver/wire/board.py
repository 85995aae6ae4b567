"""The board: a page of a shard's shared folder on which clients read whether what they hold is still the present.

It is a file `board` of `WORDS` little-endian 64-bit words, written by the shard alone, each in one store:

word 0            when the shard wrote word 1, in ns of the machine's monotonic clock
word 1            until when it may serve; 0: it serves nothing
word 2 onwards    in `place(n)` stands n as long as a pull would be answered with just the values that lease n covers

So a reader who finds its lease's number there, at a time between the first two words, while the shard's process lives
(the folder's `lock` is locked), knows what a pull would say at that moment, without one.
"""

from typing import Final

FILE: Final = "board"
LOCK: Final = "lock"
"""The file beside it that the shard's process holds locked."""
WORDS: Final = 8192
SAID: Final = 0
UNTIL: Final = 1
_FIRST: Final = 2


def place(number: int) -> int:
    """The word that tells of that lease; a later one may have it by then, which is as good as an end."""
    return _FIRST + number % (WORDS - _FIRST)
