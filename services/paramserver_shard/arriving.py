"""A framed push while it arrives: each part is checked as soon as it is complete, or while it is applied.

Where pushes are applied at once, applying also checks the elements: one pass over the memory instead of two.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from msgspec.structs import replace

from paramserver import kernels
from paramserver.codecs.codec import Codec
from paramserver.codecs.parts import check_content, check_encoded_size
from paramserver.codecs.stage import packed_bytes_max, unpack
from paramserver.core.layout import Range
from paramserver.core.ranges import RangeArray, elements
from paramserver.core.shard.events import PushPart
from paramserver.errors import problem
from paramserver.limits import BODY_BYTES_MAX
from paramserver.types import ITEMSIZE, AnyArray, Coding, DType
from paramserver.wire.frame import PullFrame, PushFrame
from paramserver.wire.tensor import NUMPY_DTYPE, crc_after, slice_crc
from paramserver_shard.computing import shares
from paramserver_shard.directory import KnownModel
from paramserver_shard.receiving import has_own_buffers

if TYPE_CHECKING:
    from paramserver_shard.runtime import Runtime

INLINE_CHECK_BYTES_MAX: Final = 512 << 10
"""More bytes than this are checked in a thread while the event loop goes on reading; for fewer, handing over costs as
much as the check."""
INLINE_UNPACK_BYTES_MAX: Final = 64 << 10
"""The same bound where a compression stage is undone, which takes about 1 ms per MiB."""
BLOCK_BYTES: Final = 2 << 20
"""Bytes checked at a time, so that the CRC finds them in the third-level cache.  Most parts are a single block: smaller
ones would cost more, because the GIL is reacquired between the two passes over each block."""

SLOT_PER_HELD_MAX: Final = 2
"""A gradient that waits to be applied stays in its slot, unless that is more than this many times as large."""


class Arriving:
    """The parts of one push, built from its body or its shared-memory slot."""

    def __init__(
        self, known: KnownModel, frame: PushFrame, all_local: bool, sizes: Sequence[int], runtime: "Runtime"
    ) -> None:
        self.known: Final = known
        self.frame: Final = frame
        self.all_local: Final = all_local
        """Whether this shard owns all partitions of the push."""
        self.sizes: Final = sizes
        """Bytes of each part as transmitted."""
        self.size: Final = sum(sizes)
        self.push_id: Final = frame.push_id
        self._codec: Final = frame.codec
        self.may_forward: Final = may_forward(frame)
        """Whether parts are forwarded to other owners: those of now, or to whom they move until they are applied."""
        self._with_crc = frame.seq is not None or frame.key is not None
        self._staged = self._codec is not None and self._codec.stage is not None
        self.unpacked_bytes: Final = sum(raw for _, raw in frame.sizes) if self._staged else 0
        """Bytes that the parts take, besides `size`, once their compression stage is undone."""
        immediate = known.spec.consistency.immediate
        self._defer_check = all_local and not self.may_forward and not self._staged and immediate
        """Whether parts that are whole partitions are checked while they are applied."""
        self._coding: Coding = cast(DType, frame.dtype) if self._codec is None else self._codec.coding
        self._runtime = runtime
        self._own_buffers = frame.slot is None and has_own_buffers(sizes)
        self._held = not known.spec.consistency.immediate
        in_one_buffer = frame.slot is None and len(sizes) > 1 and not self._own_buffers
        self._copied = in_one_buffer and self._held
        """Whether parts are copied out of their body: one that is held for long would keep all of it in memory."""
        self._results: list[list[PushPart] | asyncio.Future[list[PushPart]]] = []

    def check(self, pieces: Sequence[tuple[int, AnyArray]]) -> None:
        """Check the parts that are now complete, as (index, uint8 data); called with all of them, in order.

        Raises RequestError for a bad part that is small enough to be checked here; `parts` raises it for the others.
        """
        for share in shares(pieces, self._runtime.threads):
            self._check(share)

    def take(self, slot: AnyArray) -> None:
        """Check all parts, which lie end to end at the start of `slot`."""
        self._copied = self._held and slot.size > SLOT_PER_HELD_MAX * self.size
        pieces: list[tuple[int, AnyArray]] = []
        at = 0
        for index, size in enumerate(self.sizes):
            pieces.append((index, slot[at : at + size]))
            at += size
        self.check(pieces)

    def _check(self, pieces: Sequence[tuple[int, AnyArray]]) -> None:
        if self._defer_check and all([self._can_defer(index) for index, _ in pieces]):
            self._results.append([self._unchecked_part(index, data) for index, data in pieces])
            return
        work = partial(self._parts_of, pieces)
        inline_max = INLINE_UNPACK_BYTES_MAX if self._staged else INLINE_CHECK_BYTES_MAX
        if sum(data.size for _, data in pieces) <= inline_max:
            self._results.append(work())
            return
        future = self._runtime.submit(work)
        future.add_done_callback(_retrieve_exception)  # nobody awaits `parts` of a push that is cut off
        self._results.append(future)

    def _can_defer(self, index: int) -> bool:
        codec = self._codec
        return self.frame.parts[index].ranges is None and (codec is None or not codec.per_partition)

    def _unchecked_part(self, index: int, data: AnyArray) -> PushPart:
        part = self.frame.parts[index]
        data = data.view(NUMPY_DTYPE[self._coding])
        return PushPart(part.partition, data, self._coding, None, True, None, part.base, self._own_buffers)

    async def parts(self) -> tuple[PushPart, ...]:
        """Hand over the parts, with `finite` and, with a push id or a key, `crc`; unchecked ones have `crc` None.

        Only once: a push may wait for its commit long after that, and then keeps none of them in memory.
        A compression stage is undone; int8 and topk stay encoded, for the kernels to decode.
        Raises RequestError (`invalid_encoding`).
        """
        results, self._results = self._results, []
        return tuple([p for r in results for p in (await r if isinstance(r, asyncio.Future) else r)])

    def _parts_of(self, pieces: Sequence[tuple[int, AnyArray]]) -> list[PushPart]:
        return [self._part(index, data) for index, data in pieces]

    def _part(self, index: int, data: AnyArray) -> PushPart:
        frame, codec, part, coding = self.frame, self._codec, self.frame.parts[index], self._coding
        size = self.known.layout.partition_size(part.partition)
        count = size if part.ranges is None else elements(part.ranges)
        if codec is not None and codec.stage is not None:
            data = unpack(codec.stage, data, frame.sizes[index][1])
        elif self._copied:
            data = data.copy()
        if codec is not None and codec.per_partition:
            check_content(coding, data, size)
        else:
            data = data.view(NUMPY_DTYPE[coding])
        ranges = None if count == size else part.ranges
        named = ((0, size),) if ranges is None else ranges
        finite, crc = checked(data, coding, named if self._with_crc else None)
        return PushPart(part.partition, data, coding, crc, finite, ranges, part.base, self._own_buffers)


def may_forward(frame: PushFrame | PullFrame) -> bool:
    """Whether parts of other shards are forwarded to them, as the client has no map; else they are refused with 421."""
    return not frame.forwarded and frame.map_epoch is None


def check_part(part: PushPart) -> PushPart:
    """Check a part that is a whole partition: return it with `finite` and `crc` set."""
    finite, crc = checked(part.data, part.dtype, ((0, part.data.size),))
    return replace(part, finite=finite, crc=crc)


def checked(data: AnyArray, coding: Coding, ranges: RangeArray | tuple[Range] | None) -> tuple[bool, int]:
    """Return whether all elements are finite, and the `slice_crc` (0 without `ranges`), reading memory only once."""
    if data.nbytes <= BLOCK_BYTES or coding not in ITEMSIZE:
        finite = kernels.all_finite(data, coding)
        return finite, 0 if ranges is None else slice_crc(coding, ranges, data)
    finite, crc = True, 0 if ranges is None else slice_crc(coding, ranges, b"")
    step = BLOCK_BYTES // ITEMSIZE[coding]
    for at in range(0, data.size, step):
        block = data[at : at + step]
        finite = kernels.all_finite(block, coding) and finite
        if ranges is not None:
            crc = crc_after(crc, block)
    return finite, crc


def _retrieve_exception(future: asyncio.Future[list[PushPart]]) -> None:
    if not future.cancelled():
        future.exception()


def check_sizes(codec: Codec, sizes: Sequence[tuple[int, int]], elements: Sequence[int]) -> None:
    """Check the sizes of encoded parts against their partitions' elements, and their sum against the body limit.

    Raises RequestError (`invalid_encoding`, `too_large`).
    """
    for (stored, raw), count in zip(sizes, elements, strict=True):
        check_encoded_size(codec, raw, count)
        if not 0 < stored <= (packed_bytes_max(raw) if codec.stage else raw) or (not codec.stage and stored != raw):
            raise problem("invalid_encoding", f"a part of {raw} bytes in {codec.text} cannot travel as {stored}")
    total = sum(raw for _, raw in sizes)
    if total > BODY_BYTES_MAX:
        raise problem("too_large", f"the body unpacks to {total} bytes; the limit is {BODY_BYTES_MAX}")
