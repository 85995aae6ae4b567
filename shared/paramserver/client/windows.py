"""Buffers of shards of this machine, mapped side by side into one range of addresses.

A model's values lie in one buffer for each partition, each a file of the shard's shared folder.  A `Window` maps them
read-only, one behind the other, so that parameters which span partitions, even of several shards, are plain contiguous
arrays and nothing is copied.  Python's own `mmap` cannot choose an address, hence `ctypes`.
"""

import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from paramserver.types import F32, AnyArray

PAGE_BYTES: Final = mmap.PAGESIZE
POSSIBLE: Final = sys.platform.startswith("linux")
KEPT_MAX: Final = 8
"""Windows kept for when the same buffers come again, which they do: a shard takes turns with a few."""
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_MAP_POPULATE: Final = 0x8000
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

Piece = tuple[str, int]
"""(path of a buffer's file, bytes of it that are mapped)."""


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    number = ctypes.c_int
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


class Window:
    """Some buffers mapped end to end; unmapped when no array of it is left."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        """Raises OSError if a file cannot be mapped, ValueError if a piece other than the last ends within a page."""
        if any(size % PAGE_BYTES for _, size in pieces[:-1]):
            raise ValueError("buffers that end within a page cannot lie side by side")
        size = sum(size for _, size in pieces)
        libc = _libc()
        start = _mapped(libc, None, size, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        memory = (ctypes.c_char * size).from_address(start)
        weakref.finalize(memory, libc.munmap, start, size)
        at = start
        flags = mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
        for path, piece_bytes in pieces:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if os.fstat(file).st_size < piece_bytes:
                    raise OSError(f"{path} is shorter than it was said to be")
                _mapped(libc, at, piece_bytes, mmap.PROT_READ, flags, file)
            finally:
                os.close(file)
            at += piece_bytes
        self._memory = memory

    def values(self) -> F32:
        """All elements, 1-D and read-only: writing to them would end the process.

        Each call gives an array of its own, which every view of it keeps alive: so its end is the end of them all.
        """
        values = np.frombuffer(memoryview(self._memory), np.float32)
        values.flags.writeable = False
        return values


def _mapped(libc: Any, at: int | None, size: int, protection: int, flags: int, file: int) -> int:
    start = libc.mmap(at, size, protection, flags, file, 0)
    if start == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {size} bytes: {os.strerror(number)}")
    return int(start)


class Windows:
    """The windows used lately; safe between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Piece, ...], Window] = OrderedDict()

    def of(self, pieces: Sequence[Piece]) -> Window:
        """The window over these buffers; raises what `Window` does."""
        key = tuple(pieces)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        window = Window(key)
        with self._lock:
            self._kept[key] = window
            while len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
        return window


def writable(path: str, size_bytes: int) -> AnyArray:
    """A lent slot, mapped to be written: 1-D uint8.  Raises OSError if it is gone."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(file, size_bytes, flags=mmap.MAP_SHARED | _MAP_POPULATE), np.uint8)
    finally:
        os.close(file)
