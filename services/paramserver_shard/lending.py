"""What clients of this machine hold of a shard's shared memory: leases of versions they read, slots they write.

A *lease* covers the buffers of one pull.  It ends when the client says so, at the latest `LEASE_S` after it was given:
then the files are removed and their memory is never handed out again, so a reader that was slower keeps its bytes.
A *slot* is memory that a client fills and then names in a push instead of sending a body.  From that request to its
reply the slot is the shard's.  After the reply it is the client's again, unless the push is still needed (staged,
buffered): then it stays the shard's and the client asks for another.  A slot that nobody uses for
`LEASE_S` is removed; one that its client gives back serves the next client.
All of it is bounded: a pull beyond the bound gets its values over HTTP, a slot beyond it is refused.

A lease of present values stands on the board until other values take their place (`wire.board`): as long as its holder
sees it there, it need not ask again.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paramserver.core.shard_io import PartitionState
from paramserver.errors import problem
from paramserver.limits import LEASED_BYTES_MAX, LEASES_MAX, SHARED_LEASE_S, SLOT_BYTES_MAX
from paramserver.types import F32, AnyArray
from paramserver_shard.board import Board
from paramserver_shard.buffers import SMALL_BYTES, BufferPool


@dataclass(slots=True)
class _Lease:
    arrays: tuple[F32, ...]
    size: int
    ends_at: float


@dataclass(slots=True)
class _Slot:
    memory: AnyArray
    used_at: float
    busy: bool = False


class Lending:
    """The leases and slots of one shard.  Used by the event loop's thread alone."""

    def __init__(self, versions: BufferPool, slots: BufferPool, board: Board, clock: Callable[[], float]) -> None:
        self._versions = versions
        self._slots = slots
        self._board = board
        self._clock = clock
        self._numbers = itertools.count(1)
        self._leases: dict[int, _Lease] = {}  # the oldest first
        self._present: dict[int, list[int]] = {}
        """By the identity of present values: the leases that cover them."""
        self._lent: dict[str, _Slot] = {}
        self.leased_bytes = 0
        self.slot_bytes = 0

    def lease(self, arrays: Sequence[F32], *, present: bool = False) -> tuple[int, tuple[str, ...]] | None:
        """(number, a file for each array); None if one of them is private memory or the bound is reached.

        `present`: a pull at this moment is answered with these very arrays, and `superseded` will tell when not.
        """
        self.expire()
        files = tuple(f for a in arrays if (f := self._versions.file_of(a)) is not None)
        size = sum(a.nbytes for a in arrays)
        if len(files) < len(arrays) or self.leased_bytes + size > LEASED_BYTES_MAX or len(self._leases) >= LEASES_MAX:
            return None
        number = next(self._numbers)
        self._leases[number] = _Lease(tuple(arrays), size, self._clock() + SHARED_LEASE_S)
        self.leased_bytes += size
        if present:
            for a in arrays:
                self._present.setdefault(id(a), []).append(number)
            self._board.present(number)
        return number, files

    def superseded(self, states: Iterable[PartitionState]) -> None:
        """No pull is answered with these any more."""
        for state in states:
            for number in self._present.pop(id(state.values), ()):
                self._board.past(number)

    def release(self, numbers: Iterable[int]) -> None:
        """Those leases are over; unknown ones have ended by themselves."""
        for number in numbers:
            lease = self._leases.pop(number, None)
            if lease is None:
                continue
            self.leased_bytes -= lease.size
            self._board.past(number)
            for a in lease.arrays:  # whose identity may be another's once they are gone
                others = self._present.get(id(a))
                if others is not None and number in others:
                    others.remove(number)
                    if not others:
                        del self._present[id(a)]

    def lend(self, size_bytes: int) -> str:
        """The file of a slot of at least that size; raises Unavailable (`queue_full`) beyond the bound."""
        self.expire()
        size_bytes = max(size_bytes, SMALL_BYTES)
        if self.slot_bytes + size_bytes > SLOT_BYTES_MAX:
            raise problem("queue_full", f"{self.slot_bytes} bytes of slots are lent", hint="send a body instead")
        memory = self._slots.take_bytes(size_bytes, shared=True)
        file = self._slots.file_of(memory)
        if file is None:
            raise problem("queue_full", "shared memory is full", hint="send a body instead")
        self._lent[file] = _Slot(memory, self._clock())
        self.slot_bytes += memory.nbytes
        return file

    def submitted(self, file: str, size_bytes: int) -> AnyArray:
        """The first `size_bytes` of a slot, which is the shard's from now on.

        Raises ConflictError (`slot_gone`) if it was removed or is in use, RequestError if it is smaller.
        """
        slot = self._lent.get(file)
        if slot is None or slot.busy:
            raise problem("slot_gone", "that slot is not lent to anybody", hint="ask for another one")
        if size_bytes > slot.memory.nbytes:
            raise problem("malformed", f"the push has {size_bytes} bytes, its slot {slot.memory.nbytes}")
        slot.busy = True
        return slot.memory[:size_bytes]

    def answered(self, file: str, *, again: bool) -> None:
        """The push in that slot is answered; `again`: nothing of it is needed any more, its client may go on.

        Otherwise its memory serves another slot once the core lets go of it; its client is told, and leaves it alone.
        """
        slot = self._lent.get(file)
        if slot is None:
            return
        if again:
            slot.busy, slot.used_at = False, self._clock()
        else:
            self._drop(file)

    def returned(self, file: str) -> None:
        """Its client will not write to that slot again: its memory serves another one.  Unknown ones have ended."""
        slot = self._lent.get(file)
        if slot is not None and not slot.busy:
            self._drop(file)

    def expire(self) -> None:
        """End what has been held for too long."""
        now = self._clock()
        for number, lease in list(self._leases.items()):
            if lease.ends_at > now:
                break
            for a in lease.arrays:
                self._versions.retire(a)
            self.release([number])
        for file, slot in list(self._lent.items()):
            if not slot.busy and slot.used_at + SHARED_LEASE_S <= now:
                # Its client may be writing to it at this moment: it must not become another's.
                self._slots.retire(slot.memory)
                self._drop(file)

    async def keep(self) -> None:
        """Ends what has been held for too long, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            self.expire()

    def _drop(self, file: str) -> None:
        slot = self._lent.pop(file)
        self.slot_bytes -= slot.memory.nbytes
