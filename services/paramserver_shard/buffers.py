"""A pool of page-aligned, pre-faulted memory for receive buffers and partition versions.

A buffer is one NumPy array over pooled memory.  It has no `release`: when the array and every view of it are gone, that
is when the last partition version, reader or snapshot lets go, the memory returns to the pool by itself.  So nothing
that somebody may still read is ever handed out again.
"""

import mmap
import weakref
from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

from paramserver.limits import MIB, POOL_KEPT_BYTES_MAX
from paramserver.types import F32

PAGE_BYTES: Final = 4096
SMALL_BYTES: Final = 64 * 1024
"""Below this the allocator is as good as a pool."""

U8 = npt.NDArray[np.uint8]


def _size_class(size_bytes: int) -> int:
    """The size actually taken: one of eight steps between two powers of two, so that near sizes share memory."""
    step = max(PAGE_BYTES, 1 << max(0, (size_bytes - 1).bit_length() - 4))
    return -(-size_bytes // step) * step


class BufferPool:
    """Hands out arrays and takes their memory back when nobody holds them any more.

    Safe between threads as far as CPython's deque and dict operations are atomic: the callback that returns memory may
    run in any thread.
    """

    def __init__(self, kept_bytes_max: int = POOL_KEPT_BYTES_MAX) -> None:
        self._free: dict[int, deque[mmap.mmap]] = {}
        self._leases: dict[int, weakref.ref[U8]] = {}
        self._kept_bytes_max = kept_bytes_max
        self.kept_bytes = 0
        """Free memory held for reuse."""
        self.lent_bytes = 0
        """Memory that somebody holds."""

    def take_bytes(self, size_bytes: int) -> U8:
        """An uninitialised uint8 array of `size_bytes`."""
        if size_bytes < SMALL_BYTES:
            return np.empty(size_bytes, np.uint8)
        size = _size_class(size_bytes)
        free = self._free.setdefault(size, deque())
        try:
            memory = free.pop()
            self.kept_bytes -= size
        except IndexError:
            memory = mmap.mmap(-1, size)
            if size >= 2 * MIB and hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            np.frombuffer(memory, np.uint8)[::PAGE_BYTES] = 0  # fault the pages in now, not under a kernel
        # Views collapse their base down to this array and no further (its own base is no ndarray), so it lives as long
        # as any view of it.
        lease = np.frombuffer(memory, np.uint8)
        self._leases[id(memory)] = weakref.ref(lease, lambda _: self._returned(memory, size))
        self.lent_bytes += size
        return lease[:size_bytes]

    def take(self, count: int) -> F32:
        """An uninitialised float32 array of `count` elements."""
        return self.take_bytes(count * 4).view(np.float32)

    def _returned(self, memory: mmap.mmap, size: int) -> None:
        self._leases.pop(id(memory), None)
        self.lent_bytes -= size
        if self.kept_bytes + size <= self._kept_bytes_max:
            self.kept_bytes += size
            self._free[size].append(memory)
