"""A large body between memory and a TCP socket in one call, which holds the interpreter's lock at its ends alone.

    send(fd, pieces) -> int              bytes that went
    receive(fd, places, ...) -> Received what came of one HTTP/2 stream
    warm_up()                            compiles both, or loads them from the cache on disk

For Linux.  The socket does not block; it is waited for here, but not for a peer that pauses: what is left is the
caller's again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paramserver.kernels import prebuilt
from paramserver.limits import WAITED_BYTES

PAUSE_MS: Final = 50
"""A peer that neither takes nor sends anything for so long is not waited for."""
WAITS_MAX: Final = 128
"""How often it is waited for, however little it pauses."""

_lock = Lock()
_found: Any = None


def warm_up() -> Any:
    """Compiles the loops, or loads them; any later call only gives them."""
    global _found
    with _lock:
        if _found is None:
            loops: Any = prebuilt.load()
            if loops is None:
                from paramserver.kernels import socket_loops

                loops = socket_loops
                for function, signature in loops.SIGNATURES:
                    function.compile(signature)
                    function.disable_compile()
            _found = loops
        return _found


@dataclass(frozen=True, slots=True)
class Received:
    """What came of one HTTP/2 stream, and where it is then: in the midst of a DATA frame, or between two."""

    size: int
    """Bytes of payload."""
    due: int
    """What is still to come of the last frame."""
    flags: int
    """Its flags."""
    head: bytes
    """What has been read of the next frame's head; all of it where that is no DATA frame of this stream."""


def send(fd: int, pieces: Sequence[memoryview]) -> int:
    """Writes the pieces, one after the other; how many bytes went before the peer paused, or hung up."""
    return int(warm_up().put(fd, _rows(pieces), PAUSE_MS, WAITS_MAX, np.zeros(2, np.int32)))


def receive(
    fd: int, places: Sequence[memoryview], stream: int, due: int, flags: int, payload_bytes_max: int
) -> Received:
    """Reads a stream's payload to the places, one after the other, `due` bytes of a frame with these flags at first.

    Ends when the places are full, the stream's last frame is over, the peer pauses or hangs up, or at a frame that is
    not this stream's DATA, has padding, is empty, or is longer than allowed.
    """
    rows = _rows(places)
    state = np.array([stream, due, flags, 0], np.int64)
    head, scratch = np.zeros(9, np.uint8), np.zeros((len(rows) + 1, 2), np.int64)
    size = warm_up().take(
        fd, rows, scratch, state, head, WAITED_BYTES, payload_bytes_max, PAUSE_MS, WAITS_MAX, np.zeros(2, np.int32)
    )
    return Received(int(size), int(state[1]), int(state[2]), head[: state[3]].tobytes())


def _rows(pieces: Sequence[memoryview]) -> npt.NDArray[np.int64]:
    rows = [(np.frombuffer(p, np.uint8).__array_interface__["data"][0], len(p)) for p in pieces if len(p)]
    return np.array(rows, np.int64).reshape(-1, 2)
