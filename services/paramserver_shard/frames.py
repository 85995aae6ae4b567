"""The binary way of `/push`, `/pull` and `/pushpull`: what the SDK sends straight to the owner of each partition.

A body is streamed into one pooled buffer at its final place, so each byte is copied once; gradients are views of that
buffer.  Values go out in chunks of at most 1 MiB, straight from the immutable version, so a pull never blocks a push.
A client on this machine names a slot of shared memory in place of a body, and takes a lease in place of values.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

from paramserver import kernels
from paramserver.codecs import Codec, check_content, check_whole
from paramserver.codecs.stage import packed_bytes_max, unpack
from paramserver.core.layout import Range
from paramserver.core.shard_io import PullReceived, PushDone, PushPart, PushReceived
from paramserver.errors import PsError, problem
from paramserver.limits import BODY_BYTES_MAX, CHUNK_BYTES
from paramserver.types import F32, ITEMSIZE, AnyArray, Coding, DType
from paramserver.wire.frame import PullFrame, PullReply, PullSpec, PushFrame, PushReply, encode_header
from paramserver.wire.tensor import NUMPY_DTYPE, from_f32
from paramserver_shard.computing import INLINE_ELEMENTS_MAX
from paramserver_shard.directory import Directory, KnownModel
from paramserver_shard.exchange import Exchange, GotPart, WantedPart, cut, with_checksum
from paramserver_shard.lending import Lending
from paramserver_shard.models import Models
from paramserver_shard.names import after_push
from paramserver_shard.runtime import Runtime

INLINE_BYTES_MAX: Final = 4 * INLINE_ELEMENTS_MAX
INLINE_UNPACK_BYTES_MAX: Final = 64 * 1024
"""Undoing a second stage takes about a millisecond for each MiB: more than this a thread does."""


class FrameService:
    """Pushes and pulls of whole partitions, or ranges of them, that the client has addressed itself."""

    def __init__(
        self, directory: Directory, models: Models, runtime: Runtime, exchange: Exchange, lending: Lending | None = None
    ) -> None:
        self._directory = directory
        self._models = models
        self._runtime = runtime
        self._exchange = exchange
        self._lending = lending

    async def sized_push(self, header: Mapping[str, Any]) -> tuple[tuple[KnownModel, PushFrame], int]:
        """The push that a header announces and the bytes its body must have.  Raises PsError."""
        frame = PushFrame.from_header(header)
        known = await self._models.find(frame.model, frame.generation)
        size = self.gradient_bytes(known, frame)
        return (known, frame), size if frame.slot is None else 0

    def gradient_bytes(self, known: KnownModel, frame: PushFrame) -> int:
        """Bytes of a push's parts as they travel; raises RequestError where they are not of the model."""
        elements = [self._elements(known, p.partition, p.ranges) for p in frame.parts]
        if frame.codec is not None:
            return _encoded_bytes(frame.codec, frame.sizes, elements)
        return sum(elements) * ITEMSIZE[frame.dtype]

    def lend(self, size_bytes: int) -> str:
        """A slot of shared memory for a client of this machine; raises Unavailable where there is none."""
        if self._lending is None:
            raise problem("queue_full", "this shard lends no shared memory", hint="send a body instead")
        return self._lending.lend(size_bytes)

    async def push(self, known: KnownModel, frame: PushFrame, body: AnyArray) -> PushDone:
        """Applies a push whose body (uint8, of the announced length) has arrived whole, or lies in its slot."""
        if self._lending is not None:
            self._lending.release(frame.release)
        if frame.slot is None:
            return await self._push(known, frame, body)
        if self._lending is None:
            raise problem("slot_gone", "this shard lends no shared memory", hint="send a body instead")
        body = self._lending.submitted(frame.slot, self.gradient_bytes(known, frame))
        again = False
        try:
            done = await self._push(known, frame, body)
            again = done.state == "applied"
        except PsError as error:
            again = error.status < 500  # refused for good; otherwise it may still be on its way
            raise
        finally:
            self._lending.answered(frame.slot, again=again)
        return done

    async def _push(self, known: KnownModel, frame: PushFrame, body: AnyArray) -> PushDone:
        command = PushReceived(
            0,
            frame.model,
            (),
            known.key.generation,
            frame.timeline,
            frame.push_id,
            frame.key,
            frame.clock,
            frame.weight,
            frame.norm,
            frame.ack,
        )
        here = self._all_here(known, (p.partition for p in frame.parts))
        with_crc = here and (frame.push_id is not None or frame.key is not None)
        work = partial(_parts, known, frame, body, with_crc)
        staged = frame.codec is not None and frame.codec.stage is not None
        small = (
            sum(raw for _, raw in frame.sizes) <= INLINE_UNPACK_BYTES_MAX if staged else body.size <= INLINE_BYTES_MAX
        )
        parts = work() if small else await self._runtime.offload(work)
        if here or frame.forwarded or frame.map_epoch is not None:
            return await self._runtime.push(lambda request: replace(command, request=request, parts=parts))
        # Sent through some node by a client without a map: this shard splits it.
        bad = [p.partition for p in parts if not p.finite]
        if bad:
            raise problem("non_finite", f"the gradient holds NaN or infinity in partition {bad[0]}")
        return await self._exchange.push(known, replace(command, parts=parts))

    async def pull(self, frame: PullFrame) -> "FrameBody":
        """The values that a pull frame asks for.  Raises PsError."""
        known = await self._models.find(frame.model, frame.generation)
        if self._lending is not None:
            self._lending.release(frame.release)
        spec = PullSpec(frame.parts, frame.min_version, frame.wait_s, frame.dtype, frame.mapped)
        self._check_pull(known, spec)
        split = not frame.forwarded and frame.map_epoch is None
        return await self._pull(known, spec, frame.timeline, split=split)

    async def pushpull(self, known: KnownModel, frame: PushFrame, body: AnyArray) -> tuple[PushDone, "FrameBody"]:
        """A push, then the pull that it carries."""
        if frame.pull is None:
            raise problem("malformed", "frame header: a pushpull carries what to pull")
        self._check_pull(known, frame.pull)
        done = await self.push(known, frame, body)
        try:
            split = not frame.forwarded and frame.map_epoch is None
            answer = await self._pull(known, frame.pull, frame.timeline, split=split)
        except PsError as error:
            raise after_push(error, done) from error
        answer.push = push_reply(done)
        return done, answer

    async def _pull(self, known: KnownModel, spec: PullSpec, timeline: int | None, *, split: bool) -> "FrameBody":
        """`split`: partitions of other shards are fetched; otherwise they are refused with 421."""
        indices = tuple(p for p, _ in spec.parts)
        if not split or self._all_here(known, indices):
            done = await self._runtime.pull(
                lambda request: PullReceived(
                    request, known.key.name, indices, known.key.generation, timeline, spec.min_version, spec.wait_s
                )
            )
            parts = [
                GotPart(got.partition, got.version, got.incarnation, cut(got.state.values, ranges))
                for (_, ranges), got in zip(spec.parts, done.parts, strict=True)
            ]
            answer = FrameBody(known, spec.dtype, done.timeline, parts)
            if spec.mapped and self._lending is not None and all(ranges is None for _, ranges in spec.parts):
                answer.take_lease(self._lending)
            return answer
        wanted = [WantedPart(p, None if ranges is None else tuple(ranges)) for p, ranges in spec.parts]
        fetched = await self._exchange.pull(
            known, wanted, timeline=timeline, min_version=spec.min_version, wait_s=spec.wait_s
        )
        return FrameBody(known, spec.dtype, known.timeline, [fetched[p] for p in indices])

    def _check_pull(self, known: KnownModel, spec: PullSpec) -> None:
        for partition, ranges in spec.parts:
            self._elements(known, partition, ranges)
        if not spec.parts:
            raise problem("malformed", "frame header: the pull names no partition")

    def _elements(self, known: KnownModel, partition: int, ranges: Sequence[Range] | None) -> int:
        """Elements of a part; raises RequestError where it is not within the model."""
        if not 0 <= partition < known.spec.partitions:
            raise problem("invalid_range", f"model '{known.key.name}' has no partition {partition}")
        size = known.layout.partition_size(partition)
        if ranges is None:
            return size
        if ranges and ranges[-1][1] > size:  # sorted and disjoint: the frame's reader has seen to that
            raise problem("invalid_range", f"partition {partition} has {size} elements; {ranges[-1]} lies outside")
        return sum(stop - start for start, stop in ranges)

    def _all_here(self, known: KnownModel, partitions: Iterable[int]) -> bool:
        return all(known.owners[p][0] == self._directory.shard for p in partitions)


def _encoded_bytes(codec: Codec, sizes: Sequence[tuple[int, int]], elements: Sequence[int]) -> int:
    """Length of a body of encoded parts; raises RequestError where one cannot be of its partition."""
    for (stored, raw), count in zip(sizes, elements, strict=True):
        check_whole(codec, raw, count)
        if not 0 < stored <= (packed_bytes_max(raw) if codec.stage else raw) or (not codec.stage and stored != raw):
            raise problem("invalid_encoding", f"a part of {raw} bytes in {codec.text} cannot travel as {stored}")
    total = sum(raw for _, raw in sizes)
    if total > BODY_BYTES_MAX:
        raise problem("too_large", f"the body unpacks to {total} bytes; at most {BODY_BYTES_MAX} are taken")
    return sum(stored for stored, _ in sizes)


def _parts(known: KnownModel, frame: PushFrame, body: AnyArray, with_crc: bool) -> tuple[PushPart, ...]:
    """The parts as views of the body, each tested for finite values and, if need be, with its checksum.

    A second stage is undone here; int8 and topk stay as they are, for the kernels to decode.
    """
    out: list[PushPart] = []
    codec = frame.codec
    coding: Coding = cast(DType, frame.dtype) if codec is None else codec.coding
    at = 0
    for i, part in enumerate(frame.parts):
        size = known.layout.partition_size(part.partition)
        count = size if part.ranges is None else sum(stop - start for start, stop in part.ranges)
        stored, raw = (count * ITEMSIZE[coding],) * 2 if codec is None else frame.sizes[i]
        data = body[at : at + stored]
        at += stored
        if codec is not None and codec.stage is not None:
            data = unpack(codec.stage, data, raw)
        if codec is not None and codec.whole:
            check_content(coding, data, size)
        else:
            data = data.view(NUMPY_DTYPE[coding])
        ranges = None if part.ranges is None or count == size else tuple(part.ranges)
        made = PushPart(part.partition, data, coding, 0, kernels.all_finite(data, coding), ranges, part.base)
        out.append(with_checksum(made, size) if with_crc else made)
    return tuple(out)


def push_reply(done: PushDone) -> PushReply:
    """The frame that answers a push."""
    return PushReply(
        state=done.state,
        duplicate=done.duplicate,
        version=done.version,
        durable_version=done.durable_version,
        incarnation=done.incarnation,
        timeline=done.timeline,
        parts=tuple((p.partition, p.version, p.incarnation, p.durable_version) for p in done.parts),
        late=done.late,
    )


class FrameBody:
    """A pull's answer: its header, and its values in chunks."""

    def __init__(self, known: KnownModel, dtype: str, timeline: int, parts: Sequence[GotPart]) -> None:
        self.push: PushReply | None = None
        self._known = known
        self._dtype = dtype
        self._timeline = timeline
        self._parts = parts
        self._lease: tuple[int, tuple[str, ...]] | None = None

    def take_lease(self, lending: Lending) -> None:
        """Lend the values of whole partitions in place of sending them, where that can be."""
        if self._dtype == "float32":
            self._lease = lending.lease([piece for part in self._parts for piece in part.pieces])

    def header(self) -> bytes:
        """The frame up to its body."""
        reply = PullReply(
            model=self._known.key.name,
            generation=self._known.key.generation,
            timeline=self._timeline,
            version=min((p.version for p in self._parts), default=0),
            incarnation=max((p.incarnation for p in self._parts), default=0),
            dtype=self._dtype,
            parts=tuple((p.partition, p.version, p.incarnation) for p in self._parts),
            push=self.push,
            lease=self._lease,
        )
        return encode_header(reply.to_header())

    @property
    def body_bytes(self) -> int:
        """Length of the body."""
        return 0 if self._lease is not None else self.values_bytes

    @property
    def values_bytes(self) -> int:
        """Length of the values, sent or lent."""
        return ITEMSIZE[self._dtype] * sum(piece.size for part in self._parts for piece in part.pieces)

    def chunks(self, first: bytes) -> Iterator[bytes]:
        """`first` and the body, as pieces of at most 1 MiB; short ones are joined."""
        if self._lease is not None:
            yield first
            return
        waiting: list[bytes | memoryview] = [first]
        size = len(first)
        step = CHUNK_BYTES // ITEMSIZE[self._dtype]
        for part in self._parts:
            for piece in part.pieces:
                for at in range(0, piece.size, step):
                    data = _bytes(piece[at : at + step], self._dtype)
                    if size + len(data) > CHUNK_BYTES:
                        yield waiting[0] if len(waiting) == 1 and isinstance(waiting[0], bytes) else b"".join(waiting)
                        waiting, size = [], 0
                    waiting.append(data)
                    size += len(data)
        yield b"".join(waiting)


def _bytes(values: F32, dtype: str) -> memoryview:
    return from_f32(values, dtype).data.cast("B")
