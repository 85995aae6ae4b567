"""A pool of page-aligned, pre-faulted memory for receive buffers and partition versions.

A buffer is one NumPy array over pooled memory.  There is no `release`: the memory returns to the pool when the array
and all its views are gone, that is when no partition version, reader or snapshot refers to it any more.  So memory that
may still be read is never reused.

With a shared folder, buffers can be files that clients on this machine map; once the folder is full, they are private.
"""

import mmap
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np

from paramserver.errors import problem
from paramserver.limits import MIB, POOL_KEPT_BYTES_MAX
from paramserver.types import F32, U8, AnyArray
from paramserver_shard.shared_folder import SharedFolder

PAGE_BYTES: Final = 4096
SMALL_BYTES: Final = 64 * 1024
"""Smaller buffers are not pooled: the allocator is as fast."""
INLINE_BYTES_MAX: Final = MIB
"""More new memory than this is made in a thread: a GiB takes a second, or many on a busy machine."""

IDLE_TURNS: Final = 8
"""Memory still free after the pool has handed out this many times the bytes it may keep counts as unused."""

IDLE_S: Final = 60.0
"""A pool that hands out nothing for so long keeps nothing; the next buffers cost the time to fault their pages in."""


@contextmanager
def unavailable_if_full(what: str) -> Iterator[None]:
    """Turn a lack of memory for `what` into Unavailable (`unavailable`), in code that changes nothing before."""
    try:
        yield
    except MemoryError as e:
        hint = "give its machine more memory, or the cluster more shards"
        raise problem("unavailable", f"the shard lacks memory for {what}", hint=hint) from e


class _Memory:
    """The memory of one buffer, and its file name if it is shared."""

    __slots__ = ("__weakref__", "address", "array", "file", "idle_since", "retired", "rotation", "size")

    def __init__(self, array: U8, file: str | None) -> None:
        self.array: Final = array
        self.address: Final = _address(array)
        """Address of the first byte."""
        self.file = file
        self.size: Final = array.size
        self.retired = False
        """Never to be reused: a client may read or write it for longer than it was lent to it."""
        self.idle_since = 0
        """`BufferPool._handed_bytes` when this memory was returned."""
        self.rotation: list[_Memory] = [self]
        """The buffers that one partition's values take turns in; all of them share this list."""


class BufferPool:
    """Hands out arrays and reclaims their memory once nothing refers to them.

    Safe between threads as far as CPython's list and dict operations are atomic: the callback that returns memory may
    run in any thread.  A rotation may change while it is iterated over, so it is never indexed.
    """

    def __init__(self, kept_bytes_max: int = POOL_KEPT_BYTES_MAX, folder: SharedFolder | None = None) -> None:
        self._free: dict[tuple[int, bool], dict[int, _Memory]] = {}
        self._lent: dict[int, tuple[weakref.ref[U8], _Memory]] = {}
        self._kept_bytes_max = kept_bytes_max
        self._folder = folder
        self._sizes: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()
        """One buffer of each size in existence."""
        self.kept_bytes = 0
        """Bytes of free memory kept for reuse."""
        self.lent_bytes = 0
        """Bytes of memory in use."""
        self._handed_bytes = 0
        """Bytes handed out since the start; the clock by which free memory ages."""
        self._last_sweep_at = 0
        """`_handed_bytes` at the last search for unused memory."""
        self._idle = (-1, 0.0)
        """`_handed_bytes` when `let_go_if_idle` last saw it change, and the time of that."""

    def take_bytes(self, size_bytes: int, *, shared: bool = False, after: AnyArray | None = None) -> U8:
        """Return an uninitialized uint8 array of `size_bytes`; `shared`: in a file of the folder, if there is room.

        `after` is the array it will replace: memory that the same partition has used before is preferred.  Raises
        MemoryError.
        """
        if size_bytes < SMALL_BYTES:
            return np.empty(size_bytes, np.uint8)
        rotation = [] if after is None else self._rotation_of(after)
        size = self._size(size_bytes)
        memory = self._shared_one(size, rotation) if shared else None
        memory = memory or self._free_one(size, False, rotation) or _private(size)
        return self._lend(memory, rotation)[:size_bytes]

    def take_shared(self, size_bytes: int) -> U8 | None:
        """Like `take_bytes` for memory in a file of the folder, of at least `SMALL_BYTES`; None if there is no room.

        The name of the file is new: who was told an earlier one cannot reach this array by it.
        """
        memory = self._shared_one(self._size(size_bytes), [])
        if memory is None or memory.file is None or self._folder is None:
            return None
        try:
            memory.file = self._folder.rename(memory.file)
        except OSError:  # somebody has removed it
            self._discard(memory)
            return None
        return self._lend(memory, [])[:size_bytes]

    def take(self, count: int, *, shared: bool = False, after: AnyArray | None = None) -> F32:
        """Return an uninitialized float32 array of `count` elements; `shared` and `after` as in `take_bytes`."""
        return self.take_bytes(count * 4, shared=shared, after=after).view(np.float32)

    def keeps(self, sizes: Sequence[int], *, shared: bool) -> bool:
        """Whether it keeps free memory for buffers of all these sizes, so that it has to make none for them."""
        kinds = (True, False) if shared else (False,)
        wanted = Counter[int]()
        for size, count in Counter(sizes).items():  # they are few: the partitions of a model differ by a page
            wanted[self._size(size)] += count
        return all([n <= sum([len(self._free.get((size, k), ())) for k in kinds]) for size, n in wanted.items()])

    def take_free(self, values: Sequence[F32]) -> list[F32 | None]:
        """Return uninitialized shared memory to replace each of these arrays; None where none is free.

        Buffers that were used together before are used together again if all of them are free: clients that have mapped
        a model's buffers side by side then find the same ones in the same order.  Small arrays get private memory.
        """
        rotations = [self._rotation_of(a) for a in values]
        row = next((row for row in zip(*rotations, strict=False) if all(map(self._is_free, row))), None)
        out: list[F32 | None] = []
        for i, (a, rotation) in enumerate(zip(values, rotations, strict=True)):
            if a.nbytes < SMALL_BYTES:
                out.append(self.take(a.size))
                continue
            wanted = rotation if row is None else [row[i]]
            memory = self._free_one(self._size(a.nbytes), self._folder is not None, wanted)
            out.append(None if memory is None else self._lend(memory, rotation)[: a.nbytes].view(np.float32))
        return out

    def reuse(self, array: AnyArray, count: int) -> F32 | None:
        """Return the memory of `array`, which is no longer needed, as a float32 array of `count` elements.

        None if they do not fit or would leave more than an eighth of it unused (the partitions of a model differ
        slightly in size), or if it may not be written, as that of an unpacked gradient, which is a `bytes` object.
        """
        held = self._lent.get(_address(array))
        lease = None if held is None else held[0]()
        if lease is None:
            fits = array.flags.writeable and array.dtype == np.float32 and array.size == count
            return array if fits else None
        if not lease.size // 8 * 7 <= count * 4 <= lease.size:
            return None
        return lease[: count * 4].view(np.float32)

    def file_of(self, array: AnyArray) -> str | None:
        """Return the file in the shared folder that begins with this array's first element, or None."""
        held = self._lent.get(_address(array))
        return None if held is None else held[1].file

    def retire(self, array: AnyArray) -> None:
        """Never reuse the memory of `array`; its file is removed with the array.  Those who have it mapped keep it."""
        held = self._lent.get(_address(array))
        if held is not None:
            held[1].retired = True

    def _size(self, size_bytes: int) -> int:
        """Round a size up to a buffer size: one of 128 steps between two powers of two, in whole pages.

        Partitions of a model differ by a page, so a step may lie between them.  If the next larger size exists already,
        it is used instead: then any buffer of the model fits any of its partitions.
        """
        step = max(PAGE_BYTES, 1 << max(0, (size_bytes - 1).bit_length() - 8))
        size = -(-size_bytes // step) * step
        return size + step if size + step in self._sizes else size

    def _rotation_of(self, values: AnyArray) -> "list[_Memory]":
        """Return the rotation of the buffer that holds `values`; an empty list if it is not pooled."""
        held = self._lent.get(_address(values)) if values.nbytes >= SMALL_BYTES else None
        return [] if held is None else held[1].rotation

    def _free_one(self, size: int, shared: bool, wanted: Sequence[_Memory]) -> _Memory | None:
        """Return the first of `wanted` that is free, else the free buffer returned last; None if there is none.

        The thread that pops a buffer from the dict of free ones owns it.
        """
        free = self._free.setdefault((size, shared), {})
        memory = next((m for m in tuple(wanted) if free.pop(m.address, None) is not None), None)
        try:
            memory = memory or free.popitem()[1]
        except KeyError:
            return None
        self.kept_bytes -= size
        return memory

    def _lend(self, memory: _Memory, rotation: "list[_Memory]") -> U8:
        """Add `memory` to `rotation` and return an array over all of it; it is in use while any view of that exists."""
        if memory.size not in self._sizes:
            self._sizes[memory.size] = memory
        if rotation and memory.rotation is not rotation:
            memory.rotation.remove(memory)
            memory.rotation = rotation
            rotation.append(memory)
        # NumPy sets the base of every view to this array and no further (its own base is not an ndarray), so it lives
        # as long as any of its views.
        lease = np.frombuffer(memory.array.data, np.uint8)
        self._lent[memory.address] = (weakref.ref(lease, lambda _: self._returned(memory)), memory)
        self.lent_bytes += memory.size
        self._handed_bytes += memory.size
        return lease

    def _is_free(self, memory: _Memory) -> bool:
        return memory.address in self._free.get((memory.size, memory.file is not None), ())

    def _shared_one(self, size: int, wanted: Sequence[_Memory]) -> _Memory | None:
        """Like `_free_one` for shared memory, but made if none is free; None if there is no room for it."""
        if self._folder is None:
            return None
        memory = self._free_one(size, True, wanted)
        if memory is None and (made := self._folder.allocate(size)) is not None:
            memory = _Memory(_faulted_in(made[1]), made[0])
        return memory

    def _returned(self, memory: _Memory) -> None:
        self._lent.pop(memory.address, None)
        self.lent_bytes -= memory.size
        asked_for = self._size(memory.size) == memory.size
        if memory.retired or not asked_for or not self._has_room(memory.size):
            self._discard(memory)
            return
        self.kept_bytes += memory.size
        memory.idle_since = self._handed_bytes
        self._free.setdefault((memory.size, memory.file is not None), {})[memory.address] = memory

    def _has_room(self, size: int) -> bool:
        """Whether `size` more bytes can be kept; if not, memory that has been free for long is given up first."""
        if self.kept_bytes + size <= self._kept_bytes_max:
            return True
        if self._handed_bytes - self._last_sweep_at < self._kept_bytes_max:
            return False  # a search is not free: at most one per `_kept_bytes_max` handed out
        self._last_sweep_at = self._handed_bytes
        self._give_up(self._handed_bytes - IDLE_TURNS * self._kept_bytes_max)
        return self.kept_bytes + size <= self._kept_bytes_max

    def let_go_if_idle(self, now_s: float) -> None:
        """Give up all free memory once none has been asked for in `IDLE_S`; `now_s` is monotonic.

        It counts as used, so that a new model would be refused because of what a deleted one has left.
        """
        if self._handed_bytes != self._idle[0]:
            self._idle = (self._handed_bytes, now_s)
        elif now_s - self._idle[1] >= IDLE_S:
            self._give_up(self._handed_bytes)

    def _give_up(self, old: int) -> None:
        """Discard the memory that was returned when `_handed_bytes` was `old` or less."""
        for free in tuple(self._free.values()):
            for memory in tuple(free.values()):
                if memory.idle_since <= old and free.pop(memory.address, None) is not None:
                    self.kept_bytes -= memory.size
                    self._discard(memory)

    def _discard(self, memory: _Memory) -> None:
        """Remove memory from the pool; the operating system reclaims it when its last user is gone."""
        memory.rotation.remove(memory)
        if memory.file is not None and self._folder is not None:
            self._folder.remove(memory.file)


def _private(size: int) -> _Memory:
    try:
        memory = mmap.mmap(-1, size)
    except OSError as e:  # ENOMEM; as it is, it would be taken for Redis being away
        raise MemoryError(f"there is no room for {size} bytes") from e
    if size >= 2 * MIB and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return _Memory(_faulted_in(memory), None)


def _faulted_in(memory: mmap.mmap) -> U8:
    """Return new memory as an array with its pages faulted in: now, not while a kernel runs.

    NumPy releases the interpreter's lock meanwhile; `mmap` with MAP_POPULATE does not.
    """
    array = np.frombuffer(memory, np.uint8)
    array[::PAGE_BYTES] = 0
    return array


def _address(array: AnyArray) -> int:
    return int(array.__array_interface__["data"][0])
