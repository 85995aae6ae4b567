"""The client's side of memory shared with shards on its own machine: slots for gradients, leases of values.

A shard's `unix://` address names the folder of its files (docs/protocol.md).  All of this is optional: if a slot or a
mapping is not available, the bytes travel over HTTP.
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
from paramserver.client.mapped_buffers import POSSIBLE, Mappings, writable
from paramserver.errors import PsError
from paramserver.limits import SHARED_LEASE_S
from paramserver.net.direct import SCHEME, path_of, too_many_files
from paramserver.net.forks import call_in_forked_child
from paramserver.types import F32, AnyArray
from paramserver.wire.frame import FILE_NAME

log = logging.getLogger("paramserver")

SLOT_BYTES_MIN: Final = 64 << 10
"""Smallest gradient that is worth a slot; less is cheaper to send."""
_FRESH_S: Final = SHARED_LEASE_S * 0.6
"""A slot that has been idle for longer is not used: the shard may take it back at any moment."""


def is_same_host(address: str | None) -> bool:
    """Whether this is the address of a shard whose memory can be mapped."""
    return address is not None and address.startswith(SCHEME) and POSSIBLE


def _folder(address: str) -> str:
    return path_of(address).rpartition("/")[0]


def _path(address: str, file: str) -> str:
    return f"{_folder(address)}/{file}"


@dataclass(slots=True)
class Slot:
    """A shard's memory, lent to this client to write gradients into."""

    address: str
    file: str
    memory: AnyArray
    """1-D uint8, writable."""
    used_at: float
    mapped: bool = False
    """Whether its pages are mapped into the arrays that gradients are computed in (see `gradient_arrays`)."""

    @property
    def path(self) -> str:
        """Path of its file."""
        return _path(self.address, self.file)


@dataclass(slots=True)
class _Shard:
    slots: list[Slot] = field(default_factory=list)
    """The idle ones: as many as pushes overlapped, until `unmap_expired` finds them unused."""
    ended: deque[int] = field(default_factory=deque)
    board: BoardView | None = None


class Leased(Struct, frozen=True):
    """A lease: values that a shard lent instead of sending them."""

    address: str
    number: int
    pieces: tuple[tuple[int, str, int], ...]
    """(partition, file, bytes) in the order of the answer."""


class SameHost:
    """Slots and leases of one client.  Safe between threads; a forked child has none of its parent's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged = False
        self._begin()
        call_in_forked_child(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._shards: dict[str, _Shard] = {}
        self._mappings = Mappings()
        self._dropped: deque[Slot] = deque()

    def take_ended(self, address: str | None) -> tuple[int, ...]:
        """Take the numbers of the shard's ended leases, to report them with the next request."""
        shard = self._shards.get(address or "")
        if shard is None or not shard.ended:
            return ()
        out: list[int] = []
        with suppress(IndexError):  # another thread may have taken the last one
            while True:
                out.append(shard.ended.popleft())
        return tuple(out)

    def lenders(self) -> list[str]:
        """Addresses of the shards with ended leases that are not yet reported."""
        return [address for address, shard in list(self._shards.items()) if shard.ended]

    def slot(self, address: str, size_bytes: int) -> Slot | None:
        """Take an idle slot of at least that size, of several the one used last, so that others expire; None: none."""
        with self._lock:
            self._unmap_expired()
            idle = self._shard(address).slots
            found = next((s for s in reversed(idle) if s.memory.size >= size_bytes), None)
            if found is not None:
                idle.remove(found)
            return found

    def map_slot(self, address: str, file: str, size_bytes: int) -> Slot | None:
        """Map a slot that the shard has lent; None if it cannot be mapped here."""
        try:
            if not FILE_NAME.fullmatch(file):  # it could lead out of the shard's folder
                raise ValueError(f"a slot cannot be named {file!r:.100}")
            memory = writable(_path(address, file), size_bytes)
        except (OSError, ValueError) as error:
            self.log_unused(error)
            return None
        return Slot(address, file, memory, self._clock())

    def fresh(self, slot: Slot) -> bool:
        """Whether an idle slot certainly still belongs to this client."""
        return self._clock() - slot.used_at < _FRESH_S

    def touch(self, slot: Slot) -> None:
        """Record that the slot was used just now."""
        slot.used_at = self._clock()

    def keep(self, slot: Slot) -> None:
        """Make a slot idle that belongs to this client again as of now."""
        self.touch(slot)
        self.idle(slot)

    def idle(self, slot: Slot) -> None:
        """Make a slot idle, so that other pushes can use it; its time of last use stays."""
        with self._lock:
            self._put(slot)

    def idle_from_finalizer(self, slot: Slot) -> None:
        """Like `idle`, for finalizers: takes no lock, because they may run in the middle of this object's methods."""
        self._dropped.append(slot)

    def _collect_dropped(self) -> None:
        with suppress(IndexError):
            while True:
                self._put(self._dropped.popleft())

    def _put(self, slot: Slot) -> None:
        slot.mapped = False
        self._shard(slot.address).slots.append(slot)

    def unmap_expired(self) -> None:
        """Drop the idle slots that may have been taken back, and the mappings of values whose shard has deleted them.

        While they are mapped here, their memory is not free.
        """
        with self._lock:
            self._unmap_expired()
        self._mappings.drop_deleted()

    def unmap_values(self) -> None:
        """Drop all mappings of values; what arrays are in use stays mapped as long as these."""
        self._mappings.clear()

    def _unmap_expired(self) -> None:
        self._collect_dropped()
        for shard in list(self._shards.values()):
            shard.slots = [s for s in shard.slots if self.fresh(s)]

    def take_idle(self) -> list[Slot]:
        """Take all idle slots, to return them to their shards."""
        with self._lock:
            self._collect_dropped()
            slots = [s for shard in self._shards.values() for s in shard.slots]
            for shard in self._shards.values():
                shard.slots = []
        return slots

    def hold(self, leased: Sequence[Leased]) -> "LeasedValues":
        """Combine leases into one object whose values are in the order of the partitions."""
        with self._lock:
            self._unmap_expired()  # a client that only pulls does not ask for slots
        for lease in leased:
            self._shard(lease.address)
        pieces = sorted(
            (partition, _path(lease.address, file), size) for lease in leased for partition, file, size in lease.pieces
        )
        return LeasedValues(self, self._mappings, leased, [(path, size) for _, path, size in pieces])

    def end_leases(self, leased: Sequence[Leased]) -> None:
        """End these leases.  Takes no lock, because finalizers call it, too."""
        for lease in leased:
            self._shards.setdefault(lease.address, _Shard()).ended.append(lease.number)

    def confirmed(self, leased: Sequence[Leased]) -> bool:
        """Whether a pull, at this moment, would be answered with exactly the values of these leases."""
        return all(self._board(lease.address).confirms(lease.number) for lease in leased)

    def _board(self, address: str) -> BoardView:
        shard = self._shard(address)
        if shard.board is None:
            shard.board = BoardView(_folder(address))
        return shard.board

    def _shard(self, address: str) -> _Shard:
        found = self._shards.get(address)
        if found is None:
            self._forget_dead_shards()
            found = self._shards.setdefault(address, _Shard())
        return found

    def _forget_dead_shards(self) -> None:
        """Forget the shards whose process has ended; a restarted shard has another address."""
        for address, shard in list(self._shards.items()):
            if not (shard.board or BoardView(_folder(address))).lives():
                self._shards.pop(address, None)
                self._mappings.forget(_folder(address))

    def log_unused(self, error: Exception) -> None:
        """Log once why memory is not shared."""
        if not self._logged:
            self._logged = True
            log.info("shared_memory.unused reason=%s: values travel over HTTP", error)


class LeasedValues:
    """Leased values of all partitions of a pull, in order.

    The leases end when this object and all arrays from `values` are gone, in the process that took them.
    """

    def __init__(
        self, same_host: SameHost, mappings: Mappings, leased: Sequence[Leased], pieces: Sequence[tuple[str, int]]
    ) -> None:
        self.leased: Final = tuple(leased)
        self._same_host = same_host
        self._mappings = mappings
        self._pieces = pieces
        self._pid = os.getpid()
        self.lacked: PsError | None = None
        """The error of `values` if this process could open no more files, which may be over in a moment."""

    def values(self) -> F32 | None:
        """Return all elements as a new array, 1-D and read-only; None if they cannot be mapped."""
        try:
            values = self._mappings.of(self._pieces).values()
        except (OSError, ValueError) as error:
            self.lacked = too_many_files(error)
            if self.lacked is None:
                self._same_host.log_unused(error)
            return None
        weakref.finalize(values, _keep_alive, self).atexit = False
        return values

    def __del__(self) -> None:
        if self._pid == os.getpid():
            self._same_host.end_leases(self.leased)


def _keep_alive(leased_values: LeasedValues) -> None:
    """Do nothing: as the finalizer of an array, this only keeps `leased_values` alive for as long as the array."""
