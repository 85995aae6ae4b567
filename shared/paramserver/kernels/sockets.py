"""Moves a large body between memory and a TCP socket in one call that releases the GIL (Linux only).

    send(fd, pieces) -> int              bytes sent
    receive(fd, places, ...) -> Received what arrived of one HTTP/2 stream
    warm_up()                            compile both, or load them from the cache on disk

Sockets are nonblocking; the calls wait for them, but return when the peer pauses, and leave the rest to the caller.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paramserver.kernels import prebuilt
from paramserver.limits import RECEIVE_LOW_WATER_BYTES

PAUSE_MS: Final = 50
"""A call ends after this time without progress."""
WAITS_MAX: Final = 128
"""Most waits in one call, however short they are."""

_lock = Lock()
_loops: Any = None


def warm_up() -> Any:
    """Compile or load the loops, unless that is done, and return them."""
    global _loops
    with _lock:
        if _loops is None:
            loops: Any = prebuilt.load()
            if loops is None:
                from paramserver.kernels import socket_loops

                loops = socket_loops
                prebuilt.compile_all(loops)
            _loops = loops
        return _loops


@dataclass(frozen=True, slots=True)
class Received:
    """What arrived of one HTTP/2 stream, and the position after it: inside a DATA frame, or between frames."""

    size: int
    """Bytes of payload."""
    due: int
    """Bytes still missing of the last frame."""
    flags: int
    """Flags of the last frame."""
    head: bytes
    """The part of the next frame's header that was read; complete if that is not a plain DATA frame of this stream."""


def send(fd: int, pieces: Sequence[memoryview]) -> int:
    """Write the pieces in order; return the bytes sent until done, or until the peer paused or hung up."""
    return int(warm_up().write_rows(fd, _rows(pieces), PAUSE_MS, WAITS_MAX, np.zeros(2, np.int32)))


def receive(
    fd: int, places: Sequence[memoryview], stream: int, due: int, flags: int, payload_bytes_max: int
) -> Received:
    """Read a stream's payload into the places in order, beginning with the `due` missing bytes of a frame with `flags`.

    Ends when the places are full, when the stream ends, when the peer pauses or hangs up, and at a frame that is not
    DATA of this stream, has padding, is empty, or is longer than `payload_bytes_max`.
    """
    rows = _rows(places)
    state = np.array([stream, due, flags, 0], np.int64)
    head, scratch = np.zeros(9, np.uint8), np.zeros((len(rows) + 1, 2), np.int64)
    size = warm_up().read_data_frames(
        fd,
        rows,
        scratch,
        state,
        head,
        RECEIVE_LOW_WATER_BYTES,
        payload_bytes_max,
        PAUSE_MS,
        WAITS_MAX,
        np.zeros(2, np.int32),
    )
    return Received(int(size), int(state[1]), int(state[2]), head[: state[3]].tobytes())


def _rows(pieces: Sequence[memoryview]) -> npt.NDArray[np.int64]:
    rows = [(np.frombuffer(p, np.uint8).__array_interface__["data"][0], len(p)) for p in pieces if len(p)]
    return np.array(rows, np.int64).reshape(-1, 2)
