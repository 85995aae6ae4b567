"""Arrays to compute gradients in, whose memory becomes the slots that shards of this machine have lent.

The first push copies them into slots, like any gradient.  Then the slots' files are mapped where the arrays lie: what
is computed there from now on lies where the shards read it, and the next push moves nothing.  A slot that cannot be
used any more (its shard has kept it, or taken it back, or partitions have moved) gives way to private memory with the
same contents, and the push after it begins anew.  Elsewhere, and wherever slots cannot be had, these are plain arrays.
"""

import logging
import mmap
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from paramserver.client.arrays import NamedArrays
from paramserver.client.forks import in_child
from paramserver.client.same_host import SameHost, Slot
from paramserver.client.windows import PAGE_BYTES, POSSIBLE, Room, Run, private
from paramserver.core.layout import Layout
from paramserver.core.selection import Part, select

log = logging.getLogger("paramserver")

_ITEM: Final = 4
"""Bytes of an element."""


class GradientArrays(NamedArrays):
    """Writable float32 arrays under parameter names, each a view of `flat`; zeros at first.

    They belong to the process that asked for them (in a forked child they are zeros again), and are left alone while
    a push of them is under way.
    """

    __slots__ = ("place",)

    def __init__(self, layout: Layout, same_host: SameHost) -> None:
        memory = private(layout.size * _ITEM)
        self.place: Final = Place(memory, same_host)
        super().__init__(select(layout), np.frombuffer(memory, np.float32))

    def __repr__(self) -> str:
        return f"<GradientArrays of {len(self)} parameters, {self.flat.size} elements>"


@dataclass(slots=True)
class _Mapped:
    """A slot that lies in the arrays' place."""

    slot: Slot
    runs: tuple[Run, ...]
    parts: tuple[tuple[int, int], ...]
    """(first, last) elements of what it holds, in its order; none once it is to give way."""
    pushing: bool = False
    ours: bool = True
    """It is this client's, not the shard's."""


class Place:
    """Where gradients are computed, and which of its pages are slots; safe between threads.

    It lasts as long as the memory, which any view of the arrays keeps: a slot that is lent to another push while
    somebody can write to it here would change what is pushed.
    """

    def __init__(self, memory: mmap.mmap, same_host: SameHost) -> None:
        self._room = Room(memory)
        self._size = len(memory)
        self._same_host = same_host
        self._lock = threading.RLock()
        self._mapped: dict[str, _Mapped] = {}
        _PLACES.add(weakref.ref(self, _PLACES.discard))
        in_child(self._forget)
        weakref.finalize(memory, self._end).atexit = False

    def slot(self, address: str, parts: Sequence[Part]) -> Slot | None:
        """The slot of that shard in which just these parts lie already; the push that is made now has it."""
        with self._lock:
            found = self._mapped.get(address)
            if found is None or found.pushing:
                return None
            if found.parts != _spans(parts) or not self._same_host.fresh(found.slot):
                self._give_up(address)
                return None
            found.pushing = True
            return found.slot

    def settled(self, slot: Slot, parts: Sequence[Part], *, ours: bool) -> None:
        """A push in that slot is over; `ours`: the slot is this client's again.  Raises nothing for want of memory."""
        with self._lock:
            if ours:
                self._same_host.touch(slot)
            found = self._mapped.get(slot.address)
            if found is not None and found.slot is slot:
                found.pushing, found.ours = False, ours
                if not ours:
                    self._give_up(slot.address)
            elif ours:
                self._take(slot, parts)

    def _take(self, slot: Slot, parts: Sequence[Part]) -> None:
        """Put the slot, which holds these very parts, where they lie; it is idle if that cannot be.

        Of pushes that are made at once the first one's slots lie there, and the others' are as those of any gradient.
        """
        runs = _runs(parts, self._size)
        if runs is None or slot.address in self._mapped or not self._make_way(runs):
            self._same_host.idle(slot)
            return
        self._mapped[slot.address] = _Mapped(slot, runs, _spans(parts))
        try:
            self._room.show(slot.path, runs)
            slot.lies = True
        except OSError as error:
            self._same_host.tell(error)
            self._give_up(slot.address)  # some of it may lie there

    def _make_way(self, runs: Sequence[Run]) -> bool:
        others = [address for address, other in self._mapped.items() if _overlap(other.runs, runs)]
        if any(self._mapped[address].pushing for address in others):
            return False
        return all([self._give_up(address) for address in others])

    def _give_up(self, address: str) -> bool:
        """That slot is no longer the arrays' memory, and idle if no push has it; they keep their contents.

        Where there is no memory for that (False) they stay in it, no push uses it, and the next one tries this again.
        If the shard may be reading it, they cannot be written to until then.
        """
        found = self._mapped[address]
        found.slot.lies, found.parts = False, ()
        if not found.ours:
            found.slot.memory = np.empty(0, np.uint8)  # mapped a second time; what is needed now is no more than that
        try:
            self._room.keep(found.runs)
        except OSError as error:
            self._same_host.tell(error)
            if not found.ours:
                self._room.guard(found.runs)
                log.error("gradients.read_only reason=%s: a write to them now would end this process", error)
            return False
        del self._mapped[address]
        if found.ours and not found.pushing:
            self._same_host.idle(found.slot)
        return True

    def _end(self) -> None:
        """No array is left.  Takes no lock: this may come in the middle of whatever a thread does."""
        for found in self._mapped.values():
            if found.ours and not found.pushing:
                self._same_host.dropped(found.slot)

    def give_back(self, same_host: SameHost) -> None:
        """Slots of that client are its to use otherwise, if no push has them."""
        memory = self._room.held()
        if same_host is not self._same_host or memory is None:
            return
        with self._lock:
            for address in list(self._mapped):
                self._give_up(address)

    def _forget(self) -> None:
        """In a forked child: the slots are the parent's, which may be writing to them."""
        self._lock = threading.RLock()
        memory = self._room.held()
        for found in self._mapped.values() if memory is not None else ():
            try:
                self._room.clear(found.runs)
            except OSError:
                self._room.guard(found.runs)
        self._mapped.clear()


def _spans(parts: Sequence[Part]) -> tuple[tuple[int, int], ...]:
    return tuple([(p.start, p.stop) for p in parts])


def _runs(parts: Sequence[Part], size_bytes: int) -> tuple[Run, ...] | None:
    """(where in the arrays, where in a slot, bytes) of parts that lie in it end to end; None unless they fill pages."""
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
    """What lies in slots of that client is private memory again, and the slots serve otherwise."""
    for place in [place for found in tuple(_PLACES) if (place := found()) is not None]:
        place.give_back(same_host)


_PLACES: Final[set["weakref.ref[Place]"]] = set()
"""Of this process; unlike a WeakSet it can be listed while another thread adds to it."""
