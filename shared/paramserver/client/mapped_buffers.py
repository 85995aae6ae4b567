"""Maps the buffers of shards on this machine into one contiguous range of addresses.

A model's values are in one buffer per partition, each a file in the shard's shared folder.  `MappedBuffers` maps them
read-only, end to end, so that parameters that span partitions, even of several shards, are plain contiguous arrays and
nothing is copied.  A `RemappableMemory` is private memory whose pages can be replaced by those of slots, and become
private again, while arrays in it stay in use.  Python's own `mmap` cannot choose an address, hence `ctypes`.
"""

import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import numpy as np

from paramserver.types import F32, AnyArray

PAGE_BYTES: Final = mmap.PAGESIZE
POSSIBLE: Final = sys.platform.startswith("linux")
KEPT_MAX: Final = 8
"""Kept for reuse: a shard cycles through a few buffers, so the same ones come again."""
_PROT_NONE: Final = 0
_READ_WRITE: Final = 0x1 | 0x2
_MAP_FIXED: Final = 0x10
_MAP_POPULATE: Final = 0x8000
_MOVES: Final = 0x1 | 0x2
"""MREMAP_MAYMOVE and MREMAP_FIXED."""
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_PRIVATE: Final = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
_REMAPPABLE: Final[dict[str, int]] = {"flags": _PRIVATE} if POSSIBLE else {}

Piece = tuple[str, int]
"""(path of a buffer's file, bytes of it to map)."""
Run = tuple[int, int, int]
"""(offset in the memory, offset in a file, bytes); both offsets are multiples of the page size."""


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    number = ctypes.c_int
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number]
    libc.mremap.restype = ctypes.c_void_p
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, number, ctypes.c_void_p]
    return libc


class MappedBuffers:
    """Buffers mapped end to end; unmapped when neither this object nor an array of it is left."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        """Map the pieces.

        Raises OSError if a file cannot be mapped, and ValueError if a piece other than the last ends within a page.
        """
        if any(size % PAGE_BYTES for _, size in pieces[:-1]):
            raise ValueError("only the last buffer may end within a page")
        size = sum(size for _, size in pieces)
        start = _mmap(None, size, _PROT_NONE, _PRIVATE, -1)
        memory = (ctypes.c_char * size).from_address(start)
        # Not at exit, because arrays may still be read then: by exit handlers and daemon threads.
        weakref.finalize(memory, _libc().munmap, start, size).atexit = False
        at = start
        flags = mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
        for path, piece_bytes in pieces:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if os.fstat(file).st_size < piece_bytes:
                    raise OSError(f"{path} is shorter than expected")
                _mmap(at, piece_bytes, mmap.PROT_READ, flags, file)
            finally:
                os.close(file)
            at += piece_bytes
        self._memory = memory

    def values(self) -> F32:
        """Return all elements, 1-D and read-only: writing to them would crash the process.

        Each call returns a new array.  All views of it keep it alive, so a finalizer on it runs after the last of them.
        """
        values = np.frombuffer(memoryview(self._memory), np.float32)
        values.flags.writeable = False
        return values


def _mmap(at: int | None, size: int, protection: int, flags: int, file: int, offset: int = 0) -> int:
    start = _libc().mmap(at, size, protection, flags, file, offset)
    if start == _MAP_FAILED:
        raise _failed("map", size)
    return int(start)


def _mremap(start: int, size: int, to: int) -> None:
    """Move pages to `to`, replacing the pages there atomically: other threads see the old or the new ones, no gap."""
    if _libc().mremap(start, size, size, _MOVES, to) == _MAP_FAILED:
        raise _failed("move", size)


def _failed(what: str, size: int) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"cannot {what} {size} bytes: {os.strerror(number)}")


def private(size_bytes: int) -> mmap.mmap:
    """Allocate private, zeroed memory for a `RemappableMemory`."""
    return mmap.mmap(-1, size_bytes, **_REMAPPABLE)


class RemappableMemory:
    """Private memory in which runs of pages can be mapped from a file; it lives as long as any array in it."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = weakref.ref(memory)
        self._start = int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])

    def memory(self) -> mmap.mmap | None:
        """Return the memory, which must be referenced during all operations here; None once it is freed."""
        return self._memory()

    def map_file(self, path: str, runs: Sequence[Run]) -> None:
        """Map these runs from the file.  Raises OSError; some of them may be mapped then."""
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_size < max(_whole_pages(at + size) for _, at, size in runs):
                raise OSError(f"{path} is shorter than expected")
            for start, at, size in runs:
                self._map(start, size, mmap.MAP_SHARED | _MAP_POPULATE, file, at)
        finally:
            os.close(file)

    def make_private(self, runs: Sequence[Run]) -> None:
        """Make these runs private again, with the same contents, which concurrent readers see throughout.

        Raises OSError; the run that failed and those after it are unchanged then.
        """
        for start, _, size in runs:
            # Copied to fresh pages first: mapped in place, they would be zeros for a moment, which a push may read.
            pages, at = _whole_pages(size), self._start + start
            fresh = _mmap(None, pages, _READ_WRITE, _PRIVATE, -1)
            try:
                ctypes.memmove(fresh, at, size)
                _mremap(fresh, pages, at)
            except OSError:
                _libc().munmap(fresh, pages)
                raise

    def clear(self, runs: Sequence[Run]) -> None:
        """Make these runs private again, and zero."""
        for start, _, size in runs:
            self._map(start, size, _PRIVATE, -1, 0)

    def make_read_only(self, runs: Sequence[Run]) -> None:
        """Make these runs read-only until they are private again: a write to them crashes the process."""
        for start, _, size in runs:
            if _libc().mprotect(self._start + start, _whole_pages(size), mmap.PROT_READ):
                raise _failed("protect", size)

    def _map(self, start: int, size: int, flags: int, file: int, offset: int) -> None:
        _mmap(self._start + start, _whole_pages(size), _READ_WRITE, flags | _MAP_FIXED, file, offset)


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


class Mappings:
    """A cache of the most recently used mappings.  Safe between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Piece, ...], MappedBuffers] = OrderedDict()

    def of(self, pieces: Sequence[Piece]) -> MappedBuffers:
        """Return these buffers, mapped.  Raises OSError and ValueError like `MappedBuffers`."""
        key = tuple(pieces)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        mapped = MappedBuffers(key)
        self.drop_deleted()
        with self._lock:
            self._kept[key] = mapped
            while len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
        return mapped

    def drop_deleted(self) -> None:
        """Drop the mappings of buffers that their shard has deleted: they come not again, and hold their memory."""
        self._drop(lambda path: not os.path.exists(path))

    def forget(self, folder: str) -> None:
        """Drop all mappings with buffers of that folder."""
        self._drop(lambda path: path.startswith(f"{folder}/"))

    def clear(self) -> None:
        """Drop all mappings."""
        self._drop(lambda _: True)

    def _drop(self, unwanted: Callable[[str], bool]) -> None:
        with self._lock:
            for key in [key for key in self._kept if any(unwanted(path) for path, _ in key)]:
                del self._kept[key]


def writable(path: str, size_bytes: int) -> AnyArray:
    """Map a lent slot for writing: 1-D uint8.  Raises OSError if it is gone."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(file, size_bytes, flags=mmap.MAP_SHARED | _MAP_POPULATE), np.uint8)
    finally:
        os.close(file)
