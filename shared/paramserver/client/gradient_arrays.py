"""Arrays to compute gradients in, whose memory becomes the slots that shards on this machine have lent.

The first push copies them into slots, like any gradient.  Then the slots' files are mapped over the arrays' pages: what
is computed there from now on is already where the shards read it, and the next push copies nothing.  A slot that can no
longer be used (its shard has kept it, or taken it back, or partitions have moved) is replaced by private memory with
the same contents, and the next push starts over.  On other machines, and without slots, these are plain arrays.
"""

import logging
import mmap
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import numpy as np

from paramserver.client.arrays import NamedArrays
from paramserver.client.mapped_buffers import PAGE_BYTES, POSSIBLE, RemappableMemory, Run, private
from paramserver.client.same_host import SameHost, Slot
from paramserver.core.layout import Layout
from paramserver.core.selection import Part, select
from paramserver.net.forks import call_in_forked_child

log = logging.getLogger("paramserver")

_ITEM: Final = 4
"""Bytes per element."""


class GradientArrays(NamedArrays):
    """Writable float32 arrays by parameter name, each a view of `flat`; initially zeros.

    They belong to the process that asked for them (in a forked child they are zeros again), and must not be changed
    while a push of them is in flight.
    """

    __slots__ = ("place",)

    def __init__(self, layout: Layout, same_host: SameHost) -> None:
        memory = private(layout.size * _ITEM)
        self.place: Final = ArrayMemory(memory, same_host)
        super().__init__(select(layout), np.frombuffer(memory, np.float32))

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self} belong to this process and cannot be pickled or copied: take dict(...) of them")

    def __repr__(self) -> str:
        return f"<GradientArrays of {len(self)} parameters, {self.flat.size} elements>"


@dataclass(slots=True)
class _Mapped:
    """A slot mapped over the arrays' pages."""

    slot: Slot
    runs: tuple[Run, ...]
    parts: tuple[tuple[int, int], ...]
    """Element ranges [start, stop) of the parts in the slot, in its order; empty once it is to be replaced."""
    pushing: bool = False
    ours: bool = True
    """Whether the slot is this client's, not the shard's."""


class ArrayMemory:
    """The memory that gradients are computed in, and which of its pages are slots; safe between threads.

    It lives as long as the memory, which any view of the arrays keeps alive: if a slot went to another push while it
    can still be written to here, those writes would change what is pushed.
    """

    def __init__(self, memory: mmap.mmap, same_host: SameHost) -> None:
        self._pages = RemappableMemory(memory)
        self._size = len(memory)
        self._same_host = same_host
        self._lock = threading.RLock()
        self._mapped: dict[str, _Mapped] = {}
        _MEMORIES.add(weakref.ref(self, _MEMORIES.discard))
        call_in_forked_child(self._forget)
        weakref.finalize(memory, self._end).atexit = False

    def slot(self, address: str, parts: Sequence[Part]) -> Slot | None:
        """Return the shard's slot if it holds exactly these parts already, reserved for the current push; else None."""
        with self._lock:
            found = self._mapped.get(address)
            if found is None or found.pushing:
                return None
            if found.parts != _spans(parts) or not self._same_host.fresh(found.slot):
                self._make_private(address)
                return None
            found.pushing = True
            return found.slot

    def push_ended(self, slot: Slot, parts: Sequence[Part], *, ours: bool) -> None:
        """End a push in that slot; `ours`: the slot is this client's again.  Never raises for lack of memory."""
        with self._lock:
            if ours:
                self._same_host.touch(slot)
            found = self._mapped.get(slot.address)
            if found is not None and found.slot is slot:
                found.pushing, found.ours = False, ours
                if not ours:
                    self._make_private(slot.address)
            elif ours:
                self._map_slot(slot, parts)

    def _map_slot(self, slot: Slot, parts: Sequence[Part]) -> None:
        """Map the slot, which holds exactly these parts, over the arrays; if that is impossible, it becomes idle.

        Of concurrent pushes only the first one's slots are mapped; the others' are used like those of any gradient.
        """
        runs = _runs(parts, self._size)
        if runs is None or slot.address in self._mapped or not self._clear_overlaps(runs):
            self._same_host.idle(slot)
            return
        self._mapped[slot.address] = _Mapped(slot, runs, _spans(parts))
        try:
            self._pages.map_file(slot.path, runs)
            slot.mapped = True
        except OSError as error:
            self._same_host.log_unused(error)
            self._make_private(slot.address)  # a part of it may be mapped

    def _clear_overlaps(self, runs: Sequence[Run]) -> bool:
        others = [address for address, other in self._mapped.items() if _overlap(other.runs, runs)]
        if any(self._mapped[address].pushing for address in others):
            return False
        return all([self._make_private(address) for address in others])

    def _make_private(self, address: str) -> bool:
        """Replace the slot by private memory with the same contents; the slot becomes idle if no push uses it.

        If there is no memory for that, return False: the arrays stay in the slot, no push uses it, and the next push
        tries again.  Until then the arrays are read-only if the shard may be reading the slot.
        """
        found = self._mapped[address]
        found.slot.mapped, found.parts = False, ()
        if not found.ours:
            found.slot.memory = np.empty(0, np.uint8)  # drops the other mapping: only that in the arrays is needed
        try:
            self._pages.make_private(found.runs)
        except OSError as error:
            self._same_host.log_unused(error)
            if not found.ours:
                self._pages.make_read_only(found.runs)
                log.error("gradients.read_only reason=%s: writing to the arrays now would crash this process", error)
            return False
        del self._mapped[address]
        if found.ours and not found.pushing:
            self._same_host.idle(found.slot)
        return True

    def _end(self) -> None:
        """Release the slots when no array is left.  Takes no lock: a finalizer may interrupt any code of any thread."""
        for found in self._mapped.values():
            if found.ours and not found.pushing:
                self._same_host.idle_from_finalizer(found.slot)

    def give_back(self, same_host: SameHost) -> None:
        """Replace the slots, if they are that client's, by private memory; those that no push uses become idle."""
        memory = self._pages.memory()
        if same_host is not self._same_host or memory is None:
            return
        with self._lock:
            for address in list(self._mapped):
                self._make_private(address)

    def _forget(self) -> None:
        """Replace the slots by zeros in a forked child: they are the parent's, which may be writing to them."""
        self._lock = threading.RLock()
        memory = self._pages.memory()
        for found in self._mapped.values() if memory is not None else ():
            try:
                self._pages.clear(found.runs)
            except OSError:
                self._pages.make_read_only(found.runs)
        self._mapped.clear()


def _spans(parts: Sequence[Part]) -> tuple[tuple[int, int], ...]:
    return tuple([(p.start, p.stop) for p in parts])


def _runs(parts: Sequence[Part], size_bytes: int) -> tuple[Run, ...] | None:
    """Return the runs (offset in the arrays, offset in a slot, bytes) of parts; None unless they fill whole pages."""
    if not POSSIBLE:
        return None
    out: list[Run] = []
    at = 0
    for part in parts:
        start, size = part.start * _ITEM, (part.stop - part.start) * _ITEM
        if start % PAGE_BYTES or at % PAGE_BYTES or (size % PAGE_BYTES and start + size != size_bytes):
            return None
        if out and out[-1][0] + out[-1][2] == start and out[-1][1] + out[-1][2] == at:
            out[-1] = (out[-1][0], out[-1][1], out[-1][2] + size)
        else:
            out.append((start, at, size))
        at += size
    return tuple(out)


def _overlap(these: Sequence[Run], those: Sequence[Run]) -> bool:
    return any(a < b + m and b < a + n for a, _, n in these for b, _, m in those)


def give_back(same_host: SameHost) -> None:
    """Move all gradient arrays of that client from slots to private memory, so that it can return the slots."""
    for memory in [memory for found in tuple(_MEMORIES) if (memory := found()) is not None]:
        memory.give_back(same_host)


_MEMORIES: Final[set["weakref.ref[ArrayMemory]"]] = set()
"""The memory of all gradient arrays of this process.

Unlike a WeakSet, this set can be copied while another thread adds to it.
"""
