"""The binary frames between a client and a shard, and between shards (docs/protocol.md describes every byte).

offset  bytes
0       2      magic "PS"
2       1      format version, 1
3       1      flags, 0
4       4      length H of the header, little-endian
8       H      header: one msgpack map; unknown keys are ignored
8+H            zeros up to a multiple of 64, so that the body can be viewed as aligned numbers
               body: elements, little-endian, end to end, in the order of the header's `parts`
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Self

import msgpack

from paramserver import limits
from paramserver.codecs.codec import Codec
from paramserver.core.layout import Range
from paramserver.errors import problem
from paramserver.types import PushId, record
from paramserver.wire.bounded import Buffer, unpack_short
from paramserver.wire.header import Header, Lease, count

MEDIA_TYPE: Final = "application/vnd.paramserver.frame"
MAGIC: Final = b"PS"
FORMAT: Final = 1
PREFIX_BYTES: Final = 8
ALIGN: Final = 64
_CONTAINER_MAX: Final = limits.PARTITIONS_MAX
_DEPTH_MAX: Final = 6


def encode_header(header: Mapping[str, Any]) -> bytes:
    """Everything of a frame before its body: prefix, header, padding."""
    packed = msgpack.packb(dict(header))
    head: bytes = MAGIC + bytes((FORMAT, 0)) + len(packed).to_bytes(4, "little") + packed
    return head + bytes(-len(head) % ALIGN)


def header_end(prefix: Buffer) -> int:
    """Offset of the body, from a frame's first 8 bytes; raises RequestError (`malformed`, `too_large`, `not_built`)."""
    if len(prefix) < PREFIX_BYTES or bytes(prefix[:2]) != MAGIC:
        raise problem("malformed", "this is not a paramserver frame", hint=f"a frame starts with {MAGIC!r}")
    if prefix[2] != FORMAT:
        raise problem("not_built", f"frame format {prefix[2]} is not understood; this version reads format {FORMAT}")
    length = int.from_bytes(prefix[4:8], "little")
    if length > limits.FRAME_HEADER_BYTES_MAX:
        raise problem("too_large", f"the frame's header has {length} bytes; at most {limits.FRAME_HEADER_BYTES_MAX}")
    end = PREFIX_BYTES + length
    return end + -end % ALIGN


def decode_prefix(buf: Buffer) -> tuple[dict[str, Any], int]:
    """(header, offset of the body) of a frame that holds at least its whole header.

    Raises RequestError: `malformed`, `too_large` or `not_built`.
    """
    offset = header_end(buf)
    length = int.from_bytes(buf[4:8], "little")
    if len(buf) < PREFIX_BYTES + length:
        raise problem("malformed", "the frame is cut short")
    header = unpack_short(
        memoryview(buf)[PREFIX_BYTES : PREFIX_BYTES + length], container_max=_CONTAINER_MAX, depth_max=_DEPTH_MAX
    )
    if not isinstance(header, dict):
        raise problem("malformed", "the frame's header is not a map")
    return header, offset


def _ranges(value: Any) -> tuple[Range, ...] | None:
    """Ranges of one partition from its header entry: sorted, disjoint, not empty; None is the whole partition."""
    if value is None:
        return None
    out: list[Range] = []
    at = 0
    if isinstance(value, list) and 0 < len(value) <= limits.RANGES_PER_PUSH_MAX:
        for pair in value:
            if not (isinstance(pair, list) and len(pair) == 2 and all(map(count, pair)) and at <= pair[0] < pair[1]):
                break
            at = pair[1]
            out.append((pair[0], pair[1]))
        else:
            return tuple(out)
    raise problem("invalid_range", f"ranges must be sorted, disjoint [start, stop) pairs, not {value!r:.60}")


def _check_parts(parts: Iterable[tuple[int, Sequence[Range] | None]]) -> None:
    seen: set[int] = set()
    ranges = 0
    for partition, held in parts:
        if partition in seen:
            raise problem("malformed", f"partition {partition} comes twice in one frame")
        seen.add(partition)
        ranges += len(held or ())
    if ranges > limits.RANGES_PER_PUSH_MAX:
        raise problem("too_large", f"the frame names {ranges} ranges; at most {limits.RANGES_PER_PUSH_MAX} are allowed")


@record
class PushPart:
    """One partition of a push frame."""

    partition: int
    base: tuple[int, int] | None = None
    """(version, incarnation) the gradient was computed from."""
    ranges: Sequence[Range] | None = None
    """Relative to the partition; None: all of it."""


@record
class PullSpec:
    """What a pull asks for."""

    parts: Sequence[tuple[int, Sequence[Range] | None]]
    """(partition, ranges relative to it; None: all of it)."""
    min_version: int = 0
    wait_s: float = 0.0
    dtype: str = "float32"
    mapped: bool = False
    """The client can map the shard's memory: it takes a lease in place of a body."""

    def to_header(self) -> dict[str, Any]:
        return {
            "parts": [[p, None if r is None else [list(x) for x in r]] for p, r in self.parts],
            "min_version": self.min_version,
            "wait_s": self.wait_s,
            "dtype": self.dtype,
            **({"map": True} if self.mapped else {}),
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Self:
        h = Header(header)
        parts = []
        for p, ranges in h.rows("parts", 2):
            if not count(p):
                raise problem("malformed", f"frame header: {p!r:.20} is not a partition")
            parts.append((p, _ranges(ranges)))
        _check_parts(parts)
        wait_s = min(max(h.number("wait_s", 0.0), 0.0), limits.WAIT_S_MAX)
        return cls(tuple(parts), h.integer("min_version", 0), wait_s, h.dtype(), header.get("map") is True)


@record
class PushFrame:
    """A push of whole partitions or ranges of them; the body holds the elements of `parts` in order."""

    model: str
    parts: Sequence[PushPart]
    generation: int | None = None
    map_epoch: int | None = None
    """A frame that names one is never forwarded: a wrong owner answers 421."""
    timeline: int | None = None
    push_id: PushId | None = None
    key: str | None = None
    """`Idempotency-Key` of a plain client, handed on by the shard that received it."""
    clock: int | None = None
    dtype: str = "float32"
    weight: float = 1.0
    norm: float | None = None
    """2-norm of the whole gradient, for clipping."""
    ack: str | None = None
    forwarded: bool = False
    pull: PullSpec | None = None
    """Answer with these values too, after the push (pushpull)."""
    codec: Codec | None = None
    """How the parts are encoded; None: as elements of `dtype`."""
    sizes: Sequence[tuple[int, int]] = ()
    """Encoded: for each part its bytes in the body, and its bytes when the second stage is undone."""
    slot: str | None = None
    """The body is in this slot of the shard's shared memory, and none follows."""
    release: Sequence[int] = ()
    """Leases of shared memory that the client holds no longer."""
    mapped: bool = False
    """The client will read what this push makes: it takes a lease of it with the answer."""
    ends: tuple[int, float] | None = None
    """sync: the push ends its worker's iteration, on so many shards; each reports that to the scheduler and answers
    once the clock is committed, after so many seconds at the latest."""

    def to_header(self) -> dict[str, Any]:
        i = self.push_id
        encoded = {} if self.codec is None else {"codec": self.codec.text, "sizes": [list(s) for s in self.sizes]}
        return {
            "model": self.model,
            "generation": self.generation,
            "map_epoch": self.map_epoch,
            "timeline": self.timeline,
            "worker": i.worker if i else None,
            "epoch": i.epoch if i else None,
            "seq": i.seq if i else None,
            "key": self.key,
            "clock": self.clock,
            "parts": [
                [p.partition, list(p.base) if p.base else None, [list(r) for r in p.ranges] if p.ranges else None]
                for p in self.parts
            ],
            "dtype": self.dtype,
            "weight": self.weight,
            "norm": self.norm,
            "ack": self.ack,
            "forwarded": self.forwarded,
            "pull": self.pull.to_header() if self.pull else None,
            **encoded,
            **_shared(self.slot, self.release),
            **({"map": True} if self.mapped else {}),
            **({"ends": list(self.ends)} if self.ends else {}),
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Self:
        """Raises RequestError (`malformed`, `invalid_range`, `invalid_field`, `unknown_codec`, `invalid_encoding`)."""
        h = Header(header)
        ident = [h.text("worker", size_max=limits.WORKER_NAME_BYTES_MAX), h.integer("epoch"), h.integer("seq")]
        if ident.count(None) not in (0, len(ident)):
            raise problem("invalid_field", "worker, epoch and seq come together or not at all")
        parts = []
        for p, base, ranges in h.rows("parts", 3):
            if not count(p):
                raise problem("malformed", f"frame header: {p!r:.20} is not a partition")
            if base is not None and not (isinstance(base, list) and len(base) == 2 and all(map(count, base))):
                raise problem("malformed", "frame header: a base is [version, incarnation]")
            parts.append(PushPart(p, (base[0], base[1]) if base else None, _ranges(ranges)))
        _check_parts([(p.partition, p.ranges) for p in parts])
        if not parts:
            raise problem("empty_push", "the push names no partition")
        pull = h.inner("pull")
        codec, sizes = _encoding(h, parts)
        return cls(
            h.model(),
            tuple(parts),
            h.integer("generation"),
            h.integer("map_epoch"),
            h.integer("timeline"),
            None if ident[0] is None else PushId(*ident),
            h.text("key", size_max=limits.IDEMPOTENCY_KEY_BYTES_MAX),
            h.integer("clock"),
            h.dtype(),
            h.number("weight", 1.0),
            h.number("norm"),
            h.text("ack", size_max=16),
            h.header.get("forwarded") is True,
            None if pull is None else PullSpec.from_header(pull),
            codec,
            sizes,
            h.text("slot", size_max=64),
            h.leases(),
            h.header.get("map") is True,
            h.ends(),
        )


def _shared(slot: str | None, release: Sequence[int]) -> dict[str, Any]:
    """What a header says of shared memory; nothing where none is used."""
    out: dict[str, Any] = {} if slot is None else {"slot": slot}
    return out | {"release": list(release)} if release else out


def _lent(lease: Lease | None) -> dict[str, Any]:
    return {"lease": [lease[0], list(lease[1])]} if lease else {}


def _encoding(h: Header, parts: Sequence[PushPart]) -> tuple[Codec | None, tuple[tuple[int, int], ...]]:
    """The codec of a push and the sizes of its parts; whether they fit their partitions is for the shard to say."""
    text = h.text("codec", size_max=32)
    if text is None:
        return None, ()
    codec = Codec.of_frame(text)
    sizes = h.counts("sizes", 2)
    if len(sizes) != len(parts):
        raise problem("invalid_encoding", f"the frame has {len(parts)} parts and {len(sizes)} sizes")
    if codec.whole and any(p.ranges is not None for p in parts):
        raise problem("invalid_encoding", f"{codec.text} takes whole partitions, without ranges")
    return codec, sizes


@record
class PullFrame:
    """A pull of whole partitions or ranges of them; it has no body."""

    model: str
    parts: Sequence[tuple[int, Sequence[Range] | None]]
    """(partition, ranges relative to it; None: all of it)."""
    generation: int | None = None
    map_epoch: int | None = None
    timeline: int | None = None
    min_version: int = 0
    wait_s: float = 0.0
    dtype: str = "float32"
    forwarded: bool = False
    mapped: bool = False
    """The client can map the shard's memory: it takes a lease in place of a body."""
    release: Sequence[int] = ()
    """Leases of shared memory that the client holds no longer."""

    def to_header(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "generation": self.generation,
            "map_epoch": self.map_epoch,
            "timeline": self.timeline,
            "forwarded": self.forwarded,
            **PullSpec(self.parts, self.min_version, self.wait_s, self.dtype, self.mapped).to_header(),
            **_shared(None, self.release),
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Self:
        """Raises RequestError (`malformed`, `invalid_range`)."""
        h, pull = Header(header), PullSpec.from_header(header)
        return cls(
            h.model(),
            pull.parts,
            h.integer("generation"),
            h.integer("map_epoch"),
            h.integer("timeline"),
            pull.min_version,
            pull.wait_s,
            pull.dtype,
            h.header.get("forwarded") is True,
            pull.mapped,
            h.leases(),
        )


@record
class PushReply:
    """The answer to a push frame; it has no body."""

    state: str
    duplicate: bool
    version: int
    durable_version: int
    incarnation: int
    timeline: int
    parts: Sequence[tuple[int, int, int, int]] = ()
    """(partition, version, incarnation, durable version)."""
    late: bool = False
    lease: Lease | None = None
    """Of the values of `parts`, if the push asked for it and nothing has changed them since."""
    released: bool = False
    """The clock that the push ended is committed and its worker may go on; then `version` and `parts` are after that.
    Otherwise the worker asks the scheduler."""

    def to_header(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "duplicate": self.duplicate,
            "version": self.version,
            "durable_version": self.durable_version,
            "incarnation": self.incarnation,
            "timeline": self.timeline,
            "parts": [list(p) for p in self.parts],
            "late": self.late,
            **_lent(self.lease),
            **({"released": True} if self.released else {}),
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Self:
        """Raises RequestError (`malformed`)."""
        h = Header(header)
        return cls(
            h.text("state", needed=True, size_max=16),
            h.header.get("duplicate") is True,
            h.integer("version", needed=True),
            h.integer("durable_version", needed=True),
            h.integer("incarnation", needed=True),
            h.integer("timeline", needed=True),
            h.counts("parts", 4),
            h.header.get("late") is True,
            h.lease(),
            h.header.get("released") is True,
        )


@record
class PullReply:
    """The answer to a pull or pushpull frame; the body holds the elements of `parts` in order."""

    model: str
    generation: int
    timeline: int
    version: int
    incarnation: int
    dtype: str
    parts: Sequence[tuple[int, int, int]] = ()
    """(partition, version, incarnation)."""
    push: PushReply | None = None
    lease: Lease | None = None
    """In place of a body."""

    def to_header(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "generation": self.generation,
            "timeline": self.timeline,
            "version": self.version,
            "incarnation": self.incarnation,
            "dtype": self.dtype,
            "parts": [list(p) for p in self.parts],
            "push": self.push.to_header() if self.push else None,
            **_lent(self.lease),
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Self:
        """Raises RequestError (`malformed`)."""
        h = Header(header)
        push = h.inner("push")
        return cls(
            h.model(),
            h.integer("generation", needed=True),
            h.integer("timeline", needed=True),
            h.integer("version", needed=True),
            h.integer("incarnation", needed=True),
            h.dtype(),
            h.counts("parts", 3),
            None if push is None else PushReply.from_header(push),
            h.lease(),
        )
