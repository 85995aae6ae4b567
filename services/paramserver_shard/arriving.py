"""One push by frame while it arrives: each part is checked as soon as it is whole, or when it is applied.

Where a push is applied at once, its elements are looked at then: one way through the memory in place of two.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol, cast

from msgspec.structs import replace

from paramserver import kernels
from paramserver.codecs import Codec, check_content, check_whole
from paramserver.codecs.stage import packed_bytes_max, unpack
from paramserver.core.layout import Range
from paramserver.core.shard_io import PushPart
from paramserver.errors import problem
from paramserver.limits import BODY_BYTES_MAX
from paramserver.types import ITEMSIZE, AnyArray, Coding, DType
from paramserver.wire.frame import PushFrame
from paramserver.wire.tensor import NUMPY_DTYPE, crc_after, slice_crc
from paramserver_shard.computing import shares
from paramserver_shard.directory import KnownModel
from paramserver_shard.receiving import apart

INLINE_BYTES_MAX: Final = 512 << 10
"""What is larger is checked in a thread, besides the event loop's reading; below, its hand-over costs as much."""
INLINE_UNPACK_BYTES_MAX: Final = 64 << 10
"""The same where a second stage is undone, which takes about a millisecond for each MiB."""
BLOCK_BYTES: Final = 2 << 20
"""What is checked at a time: most parts whole, for between two looks the interpreter's lock is asked for, which costs
more than it does to look at what is in the third-level cache."""


class Threads(Protocol):
    """Runs work in compute threads, from now on."""

    threads: int
    """How many there are."""

    def submit(self, work: Callable[[], list[PushPart]]) -> asyncio.Future[list[PushPart]]:
        """The result to come."""


class Arriving:
    """The parts of one push, made from its body or its slot."""

    def __init__(self, known: KnownModel, frame: PushFrame, here: bool, sizes: Sequence[int], threads: Threads) -> None:
        self.known: Final = known
        self.frame: Final = frame
        self.here: Final = here
        """Whether this shard owns all its partitions."""
        self.sizes: Final = sizes
        """Bytes of each part as it travels."""
        self.size: Final = sum(sizes)
        self.push_id: Final = frame.push_id
        self._codec: Final = frame.codec
        applied_here = here or frame.forwarded or frame.map_epoch is not None  # by the time its body is here
        self._with_crc = applied_here and (frame.seq is not None or frame.key is not None)
        self._staged = self._codec is not None and self._codec.stage is not None
        self._later = here and not self._staged and known.spec.consistency.immediate
        """Whether whole partitions are looked at when they are applied."""
        self._coding: Coding = cast(DType, frame.dtype) if self._codec is None else self._codec.coding
        self._threads = threads
        self._apart = frame.slot is None and apart(sizes)
        self._made: list[list[PushPart] | asyncio.Future[list[PushPart]]] = []

    def check(self, pieces: Sequence[tuple[int, AnyArray]]) -> None:
        """These parts, each with its index, are here, as uint8; called until all are, in order.

        Raises RequestError where they are small and bad.
        """
        for share in shares(pieces, self._threads.threads):
            self._check(share)

    def take(self, body: AnyArray) -> None:
        """All parts are here, end to end."""
        pieces: list[tuple[int, AnyArray]] = []
        at = 0
        for index, size in enumerate(self.sizes):
            pieces.append((index, body[at : at + size]))
            at += size
        self.check(pieces)

    def _check(self, pieces: Sequence[tuple[int, AnyArray]]) -> None:
        if self._later and all([self._is_later(index) for index, _ in pieces]):
            self._made.append([self._unseen(index, data) for index, data in pieces])
            return
        work = partial(self._parts_of, pieces)
        if sum(data.size for _, data in pieces) <= (INLINE_UNPACK_BYTES_MAX if self._staged else INLINE_BYTES_MAX):
            self._made.append(work())
            return
        future = self._threads.submit(work)
        future.add_done_callback(_seen)  # a push that breaks off is never asked for its parts
        self._made.append(future)

    def _is_later(self, index: int) -> bool:
        codec = self._codec
        return self.frame.parts[index].ranges is None and (codec is None or not codec.whole)

    def _unseen(self, index: int, data: AnyArray) -> PushPart:
        part = self.frame.parts[index]
        data = data.view(NUMPY_DTYPE[self._coding])
        return PushPart(part.partition, data, self._coding, None, True, None, part.base, self._apart)

    async def parts(self) -> tuple[PushPart, ...]:
        """The parts, each tested for finite values and, if need be, with its checksum; or `crc` None.

        A second stage is undone; int8 and topk stay as they are, for the kernels to decode.
        Raises RequestError (`invalid_encoding`).
        """
        return tuple([p for made in self._made for p in (await made if isinstance(made, asyncio.Future) else made)])

    def _parts_of(self, pieces: Sequence[tuple[int, AnyArray]]) -> list[PushPart]:
        return [self._part(index, data) for index, data in pieces]

    def _part(self, index: int, data: AnyArray) -> PushPart:
        frame, codec, part, coding = self.frame, self._codec, self.frame.parts[index], self._coding
        size = self.known.layout.partition_size(part.partition)
        count = size if part.ranges is None else sum(stop - start for start, stop in part.ranges)
        if codec is not None and codec.stage is not None:
            data = unpack(codec.stage, data, frame.sizes[index][1])
        if codec is not None and codec.whole:
            check_content(coding, data, size)
        else:
            data = data.view(NUMPY_DTYPE[coding])
        ranges = None if part.ranges is None or count == size else tuple(part.ranges)
        finite, crc = checked(data, coding, ranges or ((0, size),) if self._with_crc else None)
        return PushPart(part.partition, data, coding, crc, finite, ranges, part.base, self._apart)


def look(part: PushPart) -> PushPart:
    """A part of a whole partition that nobody has looked at, with its checksum and whether it is finite."""
    finite, crc = checked(part.data, part.dtype, ((0, part.data.size),))
    return replace(part, finite=finite, crc=crc)


def checked(data: AnyArray, coding: Coding, ranges: Sequence[Range] | None) -> tuple[bool, int]:
    """Whether all elements are finite, and with `ranges` the `slice_crc` (else 0), in one pass through the cache."""
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


def _seen(future: asyncio.Future[list[PushPart]]) -> None:
    if not future.cancelled():
        future.exception()


def check_sizes(codec: Codec, sizes: Sequence[tuple[int, int]], elements: Sequence[int]) -> None:
    """Raises RequestError where an encoded part cannot be of its partition, or all together are too large."""
    for (stored, raw), count in zip(sizes, elements, strict=True):
        check_whole(codec, raw, count)
        if not 0 < stored <= (packed_bytes_max(raw) if codec.stage else raw) or (not codec.stage and stored != raw):
            raise problem("invalid_encoding", f"a part of {raw} bytes in {codec.text} cannot travel as {stored}")
    total = sum(raw for _, raw in sizes)
    if total > BODY_BYTES_MAX:
        raise problem("too_large", f"the body unpacks to {total} bytes; at most {BODY_BYTES_MAX} are taken")
