"""Compiled loops that move a large body between memory and a TCP socket (Linux only).

They wait for the socket themselves, so a thread that moves ten megabytes needs the GIL once, not for every piece: the
event loop, which serves small requests meanwhile, holds it most of the time.

Buffers are rows of (address, bytes), like the system's `iovec`; rows are advanced by what has been transferred.
"""

import socket
from typing import Any, Final

import numpy as np
from numba import types

from paramserver.kernels.jit import jit_entry_point, jit_internal

_rows = types.Array(types.int64, 2, "C")
_words = types.Array(types.int32, 1, "C")
_numbers = types.Array(types.int64, 1, "C")
_bytes = types.Array(types.uint8, 1, "C")

_ROWS_MAX: Final = 1000
"""Most rows per system call; Linux allows 1,024."""
_ROW_BYTES: Final = 16
_HEAD_BYTES: Final = 9
_DATA: Final = 0
_END: Final = 1
_PADDED: Final = 8
_READABLE: Final = 1
_WRITABLE: Final = 4
_SOCKET: Final = int(socket.SOL_SOCKET)
_LOW_WATER: Final = int(socket.SO_RCVLOWAT)

_of_libc: Any = types.ExternalFunction
_writev = _of_libc("writev", types.int64(types.int32, types.uintp, types.int32))
_readv = _of_libc("readv", types.int64(types.int32, types.uintp, types.int32))
_poll = _of_libc("poll", types.int32(types.uintp, types.uint64, types.int32))
_setsockopt = _of_libc("setsockopt", types.int32(types.int32, types.int32, types.int32, types.uintp, types.uint32))


@jit_internal
def _wait(fd: Any, events: Any, wait_ms: Any, words: Any) -> Any:
    """Wait until the socket is ready or has failed; False after `wait_ms`.  `words` has room for a `struct pollfd`."""
    words[0], words[1] = fd, events
    return _poll(words.ctypes.data, 1, wait_ms) > 0


@jit_internal
def _advance(rows: Any, at: Any, size: Any) -> Any:
    """Advance the rows, from row `at` on, by `size` bytes; return the row of the next byte."""
    while at < rows.shape[0] and size >= rows[at, 1]:
        size -= rows[at, 1]
        at += 1
    if size > 0:
        rows[at, 0] += size
        rows[at, 1] -= size
    return at


@jit_entry_point
def write_rows(fd: Any, rows: Any, wait_ms: Any, waits: Any, words: Any) -> Any:
    """Write the rows; return the bytes sent until done, an error, `wait_ms` without progress, or too many waits."""
    at, total, failed = 0, 0, False
    while at < rows.shape[0]:
        size = _writev(fd, rows.ctypes.data + _ROW_BYTES * at, min(rows.shape[0] - at, _ROWS_MAX))
        if size <= 0:
            if failed or waits == 0 or not _wait(fd, _WRITABLE, wait_ms, words):
                break
            waits -= 1
            failed = True  # if it is ready and still accepts nothing, it is broken
            continue
        failed = False
        total += size
        at = _advance(rows, at, size)
    return total


@jit_entry_point
def read_data_frames(
    fd: Any, rows: Any, scratch: Any, frame: Any, head: Any, low: Any, bytes_max: Any, wait_ms: Any, waits: Any,
    words: Any,
) -> Any:  # fmt: skip
    """Read the payload of one HTTP/2 stream's DATA frames into the rows; return the bytes read.

    `frame` is updated in place: [stream, bytes missing of the current frame, its flags, number of bytes of the next
    frame's header in `head`].  Ends when the rows are full or the stream ends, on errors and waits as `write_rows`
    does, and at a frame that is not a plain DATA frame of this stream; `head` then holds its whole header.  Each read
    waits for `low` bytes (fewer at the end of a frame).  `scratch` has room for one row more than `rows`.
    """
    left = 0
    for i in range(rows.shape[0]):
        left += rows[i, 1]
    at, total, failed, awaited = 0, 0, False, 0
    due, have = frame[1], frame[3]
    while left > 0:
        count = 0
        if due > 0:
            remaining, i = due, at
            while remaining > 0 and i < rows.shape[0] and count < _ROWS_MAX:
                scratch[count, 0], scratch[count, 1] = rows[i, 0], min(remaining, rows[i, 1])
                remaining -= scratch[count, 1]
                count += 1
                i += 1
        if due == 0 or (remaining == 0 and left > due):
            scratch[count, 0], scratch[count, 1] = head.ctypes.data + have, _HEAD_BYTES - have
            count += 1
        wanted = max(1, min(due, low))
        if wanted != awaited:
            words[0] = awaited = wanted
            _setsockopt(fd, _SOCKET, _LOW_WATER, words.ctypes.data, 4)
        size = _readv(fd, scratch.ctypes.data, count)
        if size <= 0:
            if size == 0 or failed or waits == 0 or not _wait(fd, _READABLE, wait_ms, words):
                break
            waits -= 1
            failed = True
            continue
        failed = False
        own = min(size, due)
        due -= own
        left -= own
        total += own
        at = _advance(rows, at, own)
        have += size - own
        if due == 0 and frame[2] & _END:
            break
        if have == _HEAD_BYTES:
            # Signed, like `due`: numba makes a float of what is signed or unsigned.
            length = np.int64(head[0] << 16 | head[1] << 8 | head[2])
            stream = np.int64((head[5] & 127) << 24 | head[6] << 16 | head[7] << 8 | head[8])
            if head[3] != _DATA or head[4] & _PADDED or stream != frame[0] or not 0 < length <= bytes_max:
                break
            due, frame[2], have = length, head[4], 0
    words[0] = 1
    _setsockopt(fd, _SOCKET, _LOW_WATER, words.ctypes.data, 4)
    frame[1], frame[3] = due, have
    return total


SIGNATURES = (
    (write_rows, (types.int64, _rows, types.int64, types.int64, _words)),
    (read_data_frames, (types.int64, _rows, _rows, _numbers, _bytes,
                        types.int64, types.int64, types.int64, types.int64, _words)),
)  # fmt: skip
