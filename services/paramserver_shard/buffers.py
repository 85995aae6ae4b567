"""A pool of page-aligned, pre-faulted memory for receive buffers and partition versions.

A buffer is one NumPy array over pooled memory.  It has no `release`: when the array and every view of it are gone, that
is when the last partition version, reader or snapshot lets go, the memory returns to the pool by itself.  So nothing
that somebody may still read is ever handed out again.

With a shared folder, buffers can be files that clients of this machine map; where the folder is full they are private.
"""

import logging
import mmap
import weakref
from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

from paramserver.limits import MIB, POOL_KEPT_BYTES_MAX
from paramserver.types import F32, AnyArray
from paramserver_shard.shared_folder import SharedFolder

log = logging.getLogger("paramserver.shard")

PAGE_BYTES: Final = 4096
SMALL_BYTES: Final = 64 * 1024
"""Below this the allocator is as good as a pool."""

U8 = npt.NDArray[np.uint8]


class _Memory:
    """The memory of one buffer, and the file it is, if others can map it."""

    __slots__ = ("__weakref__", "address", "array", "file", "next", "retired", "size")

    def __init__(self, array: U8, file: str | None) -> None:
        self.array: Final = array
        self.address: Final = _address(array)
        """Where it begins."""
        self.file: Final = file
        self.size: Final = array.size
        self.retired = False
        """Never to be handed out again: somebody may have it mapped."""
        self.next: weakref.ref[_Memory] | None = None
        """What followed it last time, and will again if it is free: a partition goes to and fro between two buffers."""


class BufferPool:
    """Hands out arrays and takes their memory back when nobody holds them any more.

    Safe between threads as far as CPython's deque and dict operations are atomic: the callback that returns memory may
    run in any thread.
    """

    def __init__(self, kept_bytes_max: int = POOL_KEPT_BYTES_MAX, folder: SharedFolder | None = None) -> None:
        self._free: dict[tuple[int, bool], deque[_Memory]] = {}
        self._lent: dict[int, tuple[weakref.ref[U8], _Memory]] = {}
        self._kept_bytes_max = kept_bytes_max
        self._folder = folder
        self._full_told = False
        self._sizes: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()
        """A buffer of each size that there is."""
        self.kept_bytes = 0
        """Free memory held for reuse."""
        self.lent_bytes = 0
        """Memory that somebody holds."""

    def take_bytes(self, size_bytes: int, *, shared: bool = False, after: AnyArray | None = None) -> U8:
        """An uninitialised uint8 array of `size_bytes`; `shared`: in a file of the folder, if there is room.

        With `after`, a buffer of the same kind that it will take the place of, the same one as last time if it is free:
        clients who have mapped a model's buffers side by side then find the same ones in the same order.
        """
        if size_bytes < SMALL_BYTES:
            return np.empty(size_bytes, np.uint8)
        size, shared = self._size(size_bytes), shared and self._folder is not None
        free = self._free.setdefault((size, shared), deque())
        held = None if after is None else self._lent.get(_address(after))
        before = None if held is None else held[1]
        memory = self._free_one(free, before)
        if memory is not None:
            self.kept_bytes -= size
        else:
            memory = self._make(size, shared)
        self._sizes[size] = memory
        if before is not None:
            before.next, memory.next = weakref.ref(memory), weakref.ref(before)
        # Views collapse their base down to this array and no further (its own base is no ndarray), so it lives as long
        # as any view of it.
        lease = np.frombuffer(memory.array.data, np.uint8)
        self._lent[memory.address] = (weakref.ref(lease, lambda _: self._returned(memory)), memory)
        self.lent_bytes += size
        return lease[:size_bytes]

    def take(self, count: int, *, shared: bool = False, after: AnyArray | None = None) -> F32:
        """An uninitialised float32 array of `count` elements; `shared` and `after` as in `take_bytes`."""
        return self.take_bytes(count * 4, shared=shared, after=after).view(np.float32)

    def again(self, array: AnyArray, count: int) -> F32 | None:
        """The memory of `array`, which nobody needs any more, as a float32 array of `count` elements.

        None where it would not fit, or leave much of the memory unused.  The partitions of a model are not all of one
        size, but of nearly one.
        """
        held = self._lent.get(_address(array))
        lease = None if held is None else held[0]()
        if lease is None:
            fits = array.dtype == np.float32 and array.size == count
            return array if fits else None
        if not lease.size // 8 * 7 <= count * 4 <= lease.size:
            return None
        return lease[: count * 4].view(np.float32)

    def file_of(self, array: AnyArray) -> str | None:
        """The file in the shared folder that begins with this array's first element; None if there is none."""
        held = self._lent.get(_address(array))
        return None if held is None or held[1].retired else held[1].file

    def retire(self, file: str) -> None:
        """Remove that file: its memory is used by those who have it now and never handed out again."""
        for _, memory in list(self._lent.values()):
            if memory.file == file and not memory.retired:
                memory.retired = True
                assert self._folder is not None
                self._folder.remove(file)

    def _size(self, size_bytes: int) -> int:
        """How large a buffer for so many bytes is: one of 128 steps between two powers of two.

        Partitions of a model differ by a page.  Where a step lies between them all take the size above: then the memory
        of any of them can take what becomes of another.
        """
        step = max(PAGE_BYTES, 1 << max(0, (size_bytes - 1).bit_length() - 8))
        size = -(-size_bytes // step) * step
        return size + step if size + step in self._sizes else size

    @staticmethod
    def _free_one(free: "deque[_Memory]", before: _Memory | None) -> _Memory | None:
        """A free buffer: what followed `before` last time, else the one free for longest, which belonged to a partition
        as early; without `before` the one in the cache.  None if there is none.
        """
        wanted = None if before is None or before.next is None else before.next()
        try:
            if wanted is not None:
                free.remove(wanted)
                return wanted
        except ValueError:
            pass  # somebody has it
        try:
            return free.pop() if before is None else free.popleft()
        except IndexError:
            return None

    def _make(self, size: int, shared: bool) -> _Memory:
        if shared:
            assert self._folder is not None
            try:
                file, memory = self._folder.allocate(size)
                return _Memory(np.frombuffer(memory, np.uint8), file)
            except OSError as error:
                if not self._full_told:
                    self._full_told = True
                    log.warning("clients on this machine use HTTP for what does not fit into shared memory: %s", error)
        memory = mmap.mmap(-1, size)
        if size >= 2 * MIB and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(memory, np.uint8)
        array[::PAGE_BYTES] = 0  # fault the pages in now, not under a kernel
        return _Memory(array, None)

    def _returned(self, memory: _Memory) -> None:
        self._lent.pop(memory.address, None)
        self.lent_bytes -= memory.size
        if memory.retired:
            return
        asked_for = self._size(memory.size) == memory.size
        if asked_for and self.kept_bytes + memory.size <= self._kept_bytes_max:
            self.kept_bytes += memory.size
            self._free.setdefault((memory.size, memory.file is not None), deque()).append(memory)
        elif memory.file is not None and self._folder is not None:
            self._folder.remove(memory.file)


def _address(array: AnyArray) -> int:
    return int(array.__array_interface__["data"][0])
