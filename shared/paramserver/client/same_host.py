"""What a client holds of the shared memory of shards on its own machine: slots for gradients, leases of values.

A shard's `unix://` address names the folder of its files (docs/protocol.md).  Everything here falls back by itself: a
slot or a window that cannot be had only means that bytes travel.
"""

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from paramserver.client.board import BoardView
from paramserver.client.direct import SCHEME, path_of
from paramserver.client.forks import in_child
from paramserver.client.windows import POSSIBLE, Windows, writable
from paramserver.limits import SHARED_LEASE_S
from paramserver.types import F32, AnyArray

log = logging.getLogger("paramserver")

SLOT_BYTES_MIN: Final = 64 << 10
"""A smaller gradient costs less to send than to look for a slot."""
_SLOTS_KEPT: Final = 4
"""Idle slots kept for each shard."""
_FRESH_S: Final = SHARED_LEASE_S * 0.6
"""A slot idle for longer may be taken back at any moment."""


def is_same_host(address: str | None) -> bool:
    """Whether that way leads to a shard whose memory can be mapped."""
    return address is not None and address.startswith(SCHEME) and POSSIBLE


def _folder(address: str) -> str:
    return path_of(address).rpartition("/")[0]


def _path(address: str, file: str) -> str:
    return f"{_folder(address)}/{file}"


@dataclass(slots=True)
class Slot:
    """Memory of a shard that this client writes a gradient into."""

    address: str
    file: str
    memory: AnyArray
    """1-D uint8, writable."""
    used_at: float
    lies: bool = False
    """Its pages are those of the arrays that gradients are computed in (see `gradient_arrays`)."""

    @property
    def path(self) -> str:
        """The file that it is."""
        return _path(self.address, self.file)


@dataclass(slots=True)
class _Shard:
    slots: list[Slot] = field(default_factory=list)
    over: deque[int] = field(default_factory=deque)
    board: BoardView | None = None


class Leased(Struct, frozen=True):
    """Values that one shard lent in place of sending them."""

    address: str
    number: int
    pieces: tuple[tuple[int, str, int], ...]
    """(partition, file, bytes) in the order of the answer."""


class SameHost:
    """Slots and leases of one client; safe between threads.  A forked child has none of its parent's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told = False
        self._begin()
        in_child(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._shards: dict[str, _Shard] = {}
        self._windows = Windows()
        self._dropped: deque[Slot] = deque()

    def released(self, address: str | None) -> tuple[int, ...]:
        """Leases of that shard that are over, to be told with the next request; each is returned once."""
        shard = self._shards.get(address or "")
        out: list[int] = []
        with suppress(IndexError):  # another thread may have taken the last one
            while shard is not None:
                out.append(shard.over.popleft())
        return tuple(out)

    def lenders(self) -> list[str]:
        """The shards that are to be told of leases."""
        return [address for address, shard in list(self._shards.items()) if shard.over]

    def slot(self, address: str, size_bytes: int) -> Slot | None:
        """An idle slot of at least that size."""
        with self._lock:
            self._pick_up()
            idle = self._shard(address).slots
            idle[:] = [s for s in idle if self.fresh(s)]
            found = next((s for s in idle if s.memory.size >= size_bytes), None)
            if found is not None:
                idle.remove(found)
            return found

    def lent(self, address: str, file: str, size_bytes: int) -> Slot | None:
        """The slot that the shard has lent; None if it cannot be mapped here."""
        try:
            memory = writable(_path(address, file), size_bytes)
        except (OSError, ValueError) as error:
            self.tell(error)
            return None
        return Slot(address, file, memory, self._clock())

    def fresh(self, slot: Slot) -> bool:
        """Whether that slot, idle, is surely this client's still."""
        return self._clock() - slot.used_at < _FRESH_S

    def touch(self, slot: Slot) -> None:
        """That slot has been used now."""
        slot.used_at = self._clock()

    def keep(self, slot: Slot) -> None:
        """That slot is this client's again."""
        self.touch(slot)
        self.idle(slot)

    def idle(self, slot: Slot) -> None:
        """That slot, this client's since it was last used, is to be used by others."""
        with self._lock:
            self._put(slot)

    def dropped(self, slot: Slot) -> None:
        """The same, told in the middle of whatever a thread does, this object's own methods among it."""
        self._dropped.append(slot)

    def _pick_up(self) -> None:
        with suppress(IndexError):
            while True:
                self._put(self._dropped.popleft())

    def _put(self, slot: Slot) -> None:
        slot.lies = False
        idle = self._shard(slot.address).slots
        idle.append(slot)
        del idle[:-_SLOTS_KEPT]

    def returned(self) -> list[Slot]:
        """All idle slots, which this client has no more use for."""
        with self._lock:
            self._pick_up()
            slots = [s for shard in self._shards.values() for s in shard.slots]
            for shard in self._shards.values():
                shard.slots = []
        return slots

    def hold(self, leased: Sequence[Leased]) -> "Held":
        """What these leases cover, all partitions side by side."""
        for lease in leased:
            self._shard(lease.address)
        pieces = sorted(
            (partition, _path(lease.address, file), size) for lease in leased for partition, file, size in lease.pieces
        )
        return Held(self, self._windows, leased, [(path, size) for _, path, size in pieces])

    def done(self, leased: Sequence[Leased]) -> None:
        """Those leases are over; told by the collector too, in the middle of whatever a thread does."""
        for lease in leased:
            self._shards.setdefault(lease.address, _Shard()).over.append(lease.number)

    def confirmed(self, leased: Sequence[Leased]) -> bool:
        """Whether a pull, at this moment, would be answered with just what these leases cover."""
        return all(self._board(lease.address).confirms(lease.number) for lease in leased)

    def _board(self, address: str) -> BoardView:
        shard = self._shard(address)
        if shard.board is None:
            shard.board = BoardView(_folder(address))
        return shard.board

    def _shard(self, address: str) -> _Shard:
        found = self._shards.get(address)
        if found is None:
            self._bury()
            found = self._shards.setdefault(address, _Shard())
        return found

    def _bury(self) -> None:
        """Let go of what shards that have ended had lent: one that starts anew has another address."""
        for address, shard in list(self._shards.items()):
            if not (shard.board or BoardView(_folder(address))).lives():
                self._shards.pop(address, None)
                self._windows.forget(_folder(address))

    def tell(self, error: Exception) -> None:
        """Say once why memory is not shared."""
        if not self._told:
            self._told = True
            log.info("shared_memory.unused reason=%s: values travel over HTTP", error)


class Held:
    """Values that shards have lent, all partitions of a pull side by side.

    The leases last as long as this object or any array of it, in the process that was lent them; what cannot be mapped
    is over when it is dropped.
    """

    def __init__(
        self, same_host: SameHost, windows: Windows, leased: Sequence[Leased], pieces: Sequence[tuple[str, int]]
    ) -> None:
        self.leased: Final = tuple(leased)
        self._same_host = same_host
        self._windows = windows
        self._pieces = pieces
        self._pid = os.getpid()

    def values(self) -> F32 | None:
        """All elements, 1-D, read-only, as a new array; None where they cannot be mapped."""
        try:
            values = self._windows.of(self._pieces).values()
        except (OSError, ValueError) as error:
            self._same_host.tell(error)
            return None
        weakref.finalize(values, _let_go, self).atexit = False
        return values

    def __del__(self) -> None:
        if self._pid == os.getpid():
            self._same_host.done(self.leased)


def _let_go(held: Held) -> None:
    """What an array looked at; with the last one it is over."""
