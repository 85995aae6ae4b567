"""Shared memory lent to clients on this machine: leases of versions that they read, slots that they write.

A *lease* covers the buffers of one pull.  It ends when the client releases it.  After `SHARED_LEASE_S` it expires: its
memory is never reused, so a slow reader keeps its bytes, and the files are removed once no state has them.
A *slot* is memory that a client fills and then names in a push instead of sending a body.  From that request to its
reply the slot belongs to the shard.  After the reply it belongs to the client again, unless the push is still needed
(staged, buffered): then the shard keeps it and the client asks for another.  A slot that is idle for `SHARED_LEASE_S`
is removed; one that its client returns is reused for other clients, under another name.
Both are bounded: a pull beyond the bound gets its values over HTTP, a slot beyond it is refused.

A lease of current values is marked on the board until other values replace them (`wire.board`): while its holder sees
the mark, it need not pull again.
"""

import asyncio
import itertools
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from paramserver.core.partition_state import PartitionState
from paramserver.errors import problem
from paramserver.limits import LEASED_BYTES_MAX, LEASES_MAX, SHARED_LEASE_S, SLOT_BYTES_MAX
from paramserver.types import F32, AnyArray
from paramserver.wire.board import LEASE_WORDS
from paramserver_shard.board import Board
from paramserver_shard.buffers import INLINE_BYTES_MAX, SMALL_BYTES, BufferPool

_SECRET_BITS: Final = 49
"""With the place of its word, a lease's number has at most 62 bits."""


@dataclass(slots=True)
class _Lease:
    arrays: tuple[F32, ...]
    ends_at: float


@dataclass(slots=True)
class _Slot:
    memory: AnyArray
    used_at: float
    busy: bool = False


class Lending:
    """The leases and slots of one shard.  Used only by the event loop's thread."""

    def __init__(self, versions: BufferPool, slots: BufferPool, board: Board, clock: Callable[[], float]) -> None:
        self._versions = versions
        self._slots = slots
        self._board = board
        self._clock = clock
        self._numbers = itertools.count(1)
        self._leases: dict[int, _Lease] = {}  # oldest first
        self._covering: dict[int, set[int]] = {}
        """`id` of each leased array -> the numbers of the leases that cover it."""
        self._lent_slots: dict[str, _Slot] = {}
        self.leased_bytes = 0
        """Bytes of all leased arrays; one that several leases cover counts once."""
        self.slot_bytes = 0

    def lease(self, arrays: Sequence[F32], *, current: bool = False) -> tuple[int, tuple[str, ...]] | None:
        """Lease arrays: return (number, file of each), or None if one is in private memory or a bound is reached.

        `current`: a pull would be answered with exactly these arrays now, until `clear_superseded` is called with them.
        """
        files = tuple(f for a in arrays if (f := self._versions.file_of(a)) is not None)
        size = sum([a.nbytes for a in arrays if id(a) not in self._covering])
        if len(files) < len(arrays) or not self.has_room(size):
            return None
        # Whoever knows the number can end the lease, so it cannot be guessed; successive ones have words of their own.
        number = secrets.randbits(_SECRET_BITS) * LEASE_WORDS + next(self._numbers) % LEASE_WORDS
        self._leases[number] = _Lease(tuple(arrays), self._clock() + SHARED_LEASE_S)
        self.leased_bytes += size
        for a in arrays:
            self._covering.setdefault(id(a), set()).add(number)
        if current:
            self._board.mark_current(number)
        return number, files

    def has_room(self, size_bytes: int) -> bool:
        """Return whether the bounds allow one more lease, of so many bytes that no other one covers."""
        return self.leased_bytes + size_bytes <= LEASED_BYTES_MAX and len(self._leases) < LEASES_MAX

    def clear_superseded(self, states: Iterable[PartitionState]) -> None:
        """Clear the marks of leases that cover these states: pulls are no longer answered with them."""
        for state in states:
            for number in self._covering.get(id(state.values), ()):
                self._board.clear(number)

    def release(self, numbers: Iterable[int]) -> None:
        """End these leases.  Unknown numbers are ignored: they have already expired."""
        for number in numbers:
            lease = self._leases.pop(number, None)
            if lease is None:
                continue
            self._board.clear(number)
            for a in lease.arrays:
                covering = self._covering[id(a)]
                covering.remove(number)
                if not covering:  # another array may get its id once it is freed
                    del self._covering[id(a)]
                    self.leased_bytes -= a.nbytes

    async def allocate_slot(self, size_bytes: int) -> str:
        """Lend a slot of at least that size and return its file.  Raises Unavailable (`queue_full`) beyond a bound."""
        size_bytes = max(size_bytes, SMALL_BYTES)
        if self.slot_bytes + size_bytes > SLOT_BYTES_MAX:
            raise problem("queue_full", f"{self.slot_bytes} bytes of slots are lent", hint="send a body instead")
        self.slot_bytes += size_bytes  # at once, as others may ask meanwhile
        try:
            inline = size_bytes <= INLINE_BYTES_MAX or self._slots.keeps([size_bytes], shared=True)
            take = self._slots.take_shared
            memory = take(size_bytes) if inline else await asyncio.to_thread(take, size_bytes)
            file = None if memory is None else self._slots.file_of(memory)
            if memory is None or file is None:
                raise problem("queue_full", "shared memory is full", hint="send a body instead")
        except BaseException:
            self.slot_bytes -= size_bytes
            raise
        self._lent_slots[file] = _Slot(memory, self._clock())
        return file

    def begin_push(self, file: str, size_bytes: int) -> AnyArray:
        """Return the memory of a slot that holds `size_bytes`, which belongs to the shard from now on.

        Raises ConflictError (`slot_gone`) if it was removed or is in use, RequestError (`malformed`) if it is smaller.
        """
        slot = self._lent_slots.get(file)
        if slot is None or slot.busy:
            raise problem("slot_gone", "the slot has expired or is in use", hint="ask for another one")
        if size_bytes > slot.memory.nbytes:
            raise problem("malformed", f"the push has {size_bytes} bytes, its slot {slot.memory.nbytes}")
        slot.busy = True
        return slot.memory

    def finish_push(self, file: str, *, reusable: bool, mapped: bool = False) -> None:
        """End a push's use of its slot; `reusable`: the push needs it no longer, and the client may write to it again.

        Otherwise its memory is reused once the core releases it; the client learns that from the reply and does not
        write to the slot any more.  If the client has it `mapped` into arrays, it is never reused: the arrays are in it
        until all shards have replied.
        """
        slot = self._lent_slots.get(file)
        if slot is None:
            return
        if reusable:
            slot.busy, slot.used_at = False, self._clock()
            return
        if mapped:
            self._slots.retire(slot.memory)
        self._drop(file)

    def free_slot(self, file: str) -> None:
        """Reuse the memory of a slot that its client no longer writes to.  Unknown ones have expired."""
        slot = self._lent_slots.get(file)
        if slot is not None and not slot.busy:
            self._drop(file)

    def expire(self) -> None:
        """End leases and idle slots that have been held for too long."""
        now = self._clock()
        for number, lease in list(self._leases.items()):
            if lease.ends_at > now:
                break
            for a in lease.arrays:
                self._versions.retire(a)
            self.release([number])
        for file, slot in list(self._lent_slots.items()):
            if not slot.busy and slot.used_at + SHARED_LEASE_S <= now:
                # Its client may be writing to it right now, so the memory must not be reused.
                self._slots.retire(slot.memory)
                self._drop(file)

    async def expire_periodically(self) -> None:
        """Call `expire` every second, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            self.expire()

    def _drop(self, file: str) -> None:
        slot = self._lent_slots.pop(file)
        self.slot_bytes -= slot.memory.nbytes
