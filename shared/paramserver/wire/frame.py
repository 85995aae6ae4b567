"""The binary frames between a client and a shard, and between shards (docs/protocol.md describes every byte).

offset  bytes
0       2      magic "PS"
2       1      format version, 1
3       1      flags, 0
4       4      length H of the header, little-endian
8       H      header: one msgpack map; unknown keys are ignored, fields with their default value are left out
8+H            zeros up to a multiple of 64, so that the body can be viewed as aligned numbers
               body: elements, little-endian, end to end, in the order of the header's `parts`

Each kind of header is a subclass of `Header` that declares the types and bounds of its fields; msgspec decodes it and
refuses what does not fit before it allocates (docs/decisions/0020-structs.md).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from paramserver import limits
from paramserver.codecs.codec import Codec
from paramserver.core import ranges as range_arrays
from paramserver.core.fields import MODEL_NAME
from paramserver.core.ranges import RangeArray
from paramserver.errors import PsError, problem
from paramserver.types import ITEMSIZE, AnyArray, PushId
from paramserver.wire.bounded import Buffer

MEDIA_TYPE: Final = "application/vnd.paramserver.frame"
FRAME_HEADERS: Final[Mapping[str, str]] = {"accept": MEDIA_TYPE, "content-type": MEDIA_TYPE}
"""Headers of a request whose body is a frame, as its answer is to be."""
MAGIC: Final = b"PS"
FORMAT: Final = 1
PREFIX_BYTES: Final = 8
ALIGN: Final = 64
RANGE_BYTES: Final = 16
"""A range is two little-endian 64-bit numbers."""

Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Number: TypeAlias = Annotated[float, Meta(gt=-1e38, lt=1e38)]
ModelName: TypeAlias = Annotated[str, Meta(pattern=rf"\A(?:{MODEL_NAME.pattern})\Z")]
FILE_NAME: Final = re.compile(r"[A-Za-z0-9]{1,64}")
"""Names of the files that a shard lends."""
FileName: TypeAlias = Annotated[str, Meta(pattern=rf"\A(?:{FILE_NAME.pattern})\Z")]
_PAIRS: Final = list[tuple[Count, Count]]
PullPart: TypeAlias = tuple[Count, RangeArray | None]
"""(partition, ranges relative to it; None: the whole partition)."""
PullParts: TypeAlias = Annotated[Sequence[PullPart], Meta(max_length=limits.PARTITIONS_MAX)]
Leases: TypeAlias = Annotated[Sequence[Count], Meta(max_length=limits.FRAME_HEADER_BYTES_MAX)]
Lease: TypeAlias = tuple[Count, Annotated[Sequence[FileName], Meta(max_length=limits.PARTITIONS_MAX)]]
"""(number, for each part the file that begins with its elements)."""


class Header(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base class of the frame headers."""

    def check(self) -> None:
        """Check what the types do not express; raises RequestError."""


H = TypeVar("H", bound=Header)


def encode_header(header: Header | Mapping[str, Any]) -> bytes:
    """Return everything of a frame before its body: prefix, header, padding."""
    packed = _ENCODER.encode(header)
    head = _BEGINNING + len(packed).to_bytes(4, "little") + packed
    return head + bytes(-len(head) % ALIGN)


def chunks(prefix: bytes, body: Iterable[AnyArray]) -> Iterator[bytes]:
    """Yield a frame as an HTTP client sends it: its header, then copies of at most `limits.CHUNK_BYTES` of its body."""
    yield prefix
    for array in body:
        view = array.data.cast("B")
        for at in range(0, len(view), limits.CHUNK_BYTES):
            yield bytes(view[at : at + limits.CHUNK_BYTES])


def _plain(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number, and ranges to little-endian bytes."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise problem("malformed", f"a {type(value).__name__} cannot be sent in a frame", hint="use numbers and text")


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_plain)
_BEGINNING: Final = MAGIC + bytes((FORMAT, 0))


def header_end(prefix: Buffer) -> int:
    """Return the body's offset, given the prefix; raises RequestError (`malformed`, `too_large`, `not_built`)."""
    if len(prefix) < PREFIX_BYTES or bytes(prefix[:2]) != MAGIC:
        raise problem("malformed", "this is not a paramserver frame", hint=f"a frame starts with {MAGIC!r}")
    if prefix[2] != FORMAT:
        raise problem("not_built", f"frame format {prefix[2]} is not understood; this version reads format {FORMAT}")
    length = int.from_bytes(prefix[4:8], "little")
    if length > limits.FRAME_HEADER_BYTES_MAX:
        raise problem("too_large", f"the frame's header has {length} bytes; at most {limits.FRAME_HEADER_BYTES_MAX}")
    end = PREFIX_BYTES + length
    return end + -end % ALIGN


def decode_header(buf: Buffer, of: type[H]) -> tuple[H, int]:
    """Return (header, offset of the body) of a frame; `buf` must hold at least the whole header.

    Raises RequestError: `malformed`, `too_large`, `not_built`, `invalid_range`, or what the header's `check` raises.
    """
    offset = header_end(buf)
    end = PREFIX_BYTES + int.from_bytes(buf[4:8], "little")
    if len(buf) < end:
        raise problem("malformed", "the frame is truncated")
    try:
        header = _decoder(of).decode(memoryview(buf)[PREFIX_BYTES:end])
    except msgspec.ValidationError as e:
        raise problem("malformed", f"frame header: {e}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise problem("malformed", f"the frame's header cannot be read: {e}") from None
    header.check()
    return header, offset


def _read_ranges(_kind: type, raw: object) -> RangeArray:
    """Return the ranges of a header, which may also be a list of pairs: sorted, disjoint, and at least one."""
    if isinstance(raw, bytes) and len(raw) % RANGE_BYTES == 0:
        ranges = range_arrays.of_bytes(raw)
    elif isinstance(raw, list) and len(raw) > limits.RANGES_PER_REQUEST_MAX:
        raise _too_many(len(raw))
    else:
        try:
            pairs = msgspec.convert(raw, _PAIRS)  # first: NumPy makes arrays of anything, of any size
        except msgspec.ValidationError:
            raise ValueError(f"ranges are pairs of integers, or {RANGE_BYTES} bytes each") from None
        ranges = range_arrays.of_pairs(pairs)
    if not len(ranges) or range_arrays.first_wrong(ranges) is not None:
        shown = f"{ranges[:3].tolist()!r:.60}"
        raise problem("invalid_range", f"ranges are sorted, disjoint [start, stop) pairs, not {shown}")
    return ranges


@cache
def _decoder(of: type[H]) -> msgspec.msgpack.Decoder[H]:
    return msgspec.msgpack.Decoder(of, dec_hook=_read_ranges)


def _check_parts(parts: Iterable[tuple[int, RangeArray | None]]) -> None:
    """Check that each partition comes once, with no more ranges in all than are allowed."""
    seen: set[int] = set()
    total = 0
    for partition, ranges in parts:
        if partition in seen:
            raise problem("malformed", f"partition {partition} appears twice in one frame")
        seen.add(partition)
        total += 0 if ranges is None else len(ranges)
    if total > limits.RANGES_PER_REQUEST_MAX:
        raise _too_many(total)


def _too_many(count: int) -> PsError:
    detail = f"the frame names {count} ranges; at most {limits.RANGES_PER_REQUEST_MAX} are allowed"
    return problem("too_large", detail)


def _check_dtype(dtype: str) -> None:
    if dtype not in ITEMSIZE:
        raise problem("invalid_dtype", f"dtype {dtype!r:.40} is not one of {', '.join(ITEMSIZE)}")


class PushPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One partition of a push frame."""

    partition: Count
    base: tuple[Count, Count] | None
    """(version, incarnation) the gradient was computed from."""
    ranges: RangeArray | None
    """Relative to the partition; None: the whole partition."""


class PullSpec(Header, frozen=True):
    """What a pull asks for."""

    parts: PullParts
    min_version: Count = 0
    wait_s: Number = 0.0
    """Longest wait for `min_version` and `min_clock`; the shard caps it at `limits.WAIT_S_MAX`."""
    dtype: str = "float32"
    mapped: bool = msgspec.field(default=False, name="map")
    """The client can map the shard's memory and accepts a lease in place of a body."""
    min_clock: Count = 0
    """sync: commits that each partition must have applied at least."""

    def check(self) -> None:
        """Raises RequestError (`malformed`, `invalid_dtype`, `too_large`)."""
        _check_parts(self.parts)
        _check_dtype(self.dtype)


class PullFrame(PullSpec, frozen=True, kw_only=True):
    """A pull of whole partitions or ranges of them; it has no body."""

    model: ModelName
    generation: Count | None = None
    map_epoch: Count | None = None
    timeline: Count | None = None
    forwarded: bool = False
    release: Leases = ()
    """Shared-memory leases that the client no longer holds."""


class PushFrame(Header, frozen=True):
    """A push of whole partitions or ranges of them; the body holds the elements of `parts` in order."""

    model: ModelName
    parts: Annotated[Sequence[PushPart], Meta(max_length=limits.PARTITIONS_MAX)]
    generation: Count | None = None
    map_epoch: Count | None = None
    """A frame that names one is never forwarded: a wrong owner answers 421."""
    timeline: Count | None = None
    worker: Annotated[str, Meta(min_length=1, max_length=limits.WORKER_NAME_BYTES_MAX)] | None = None
    """Part of the push id, as are `epoch` and `seq`."""
    epoch: Count | None = None
    seq: Count | None = None
    key: Annotated[str, Meta(min_length=1, max_length=limits.IDEMPOTENCY_KEY_BYTES_MAX)] | None = None
    """`Idempotency-Key` of a plain client, passed on by the shard that received it."""
    clock: Count | None = None
    dtype: str = "float32"
    weight: Number = 1.0
    norm: float | None = None
    """2-norm of the whole gradient, for clipping; it may be larger than a float32."""
    ack: Annotated[str, Meta(min_length=1, max_length=16)] | None = None
    forwarded: bool = False
    pull: PullSpec | None = None
    """pushpull: after the push, answer with these values too."""
    encoding: Annotated[str, Meta(min_length=1, max_length=32)] | None = msgspec.field(default=None, name="codec")
    """How the parts are encoded; None: as elements of `dtype`."""
    sizes: Annotated[Sequence[tuple[Count, Count]], Meta(max_length=limits.PARTITIONS_MAX)] = ()
    """Encoded parts: for each, its bytes in the body, and its bytes once the second stage is undone."""
    slot: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    """The body is in this slot of the shard's shared memory; none follows the header."""
    slot_mapped: bool = False
    """The client may read in the slot after the reply, even if it is not its own any more."""
    release: Leases = ()
    """Shared-memory leases that the client no longer holds."""
    mapped: bool = msgspec.field(default=False, name="map")
    """The client will read the values that this push results in and accepts a lease of them with the answer."""
    ends: (
        tuple[
            Annotated[int, Meta(ge=1, le=limits.PARTITIONS_MAX)], Annotated[float, Meta(ge=0.0, le=limits.WAIT_S_MAX)]
        ]
        | None
    ) = None
    """sync: (shards, seconds) of a push that ends its worker's iteration.

    The push goes to that many shards.  Each reports the clock to the scheduler and answers once it is committed, after
    that many seconds at the latest.
    """

    @property
    def push_id(self) -> PushId | None:
        """The id by which repeated deliveries are the same push; None if the frame has none."""
        if self.worker is None or self.epoch is None or self.seq is None:
            return None
        return PushId(self.worker, self.epoch, self.seq)

    @property
    def codec(self) -> Codec | None:
        """The codec of the parts; None: elements of `dtype`.  Raises RequestError (`unknown_codec`)."""
        return None if self.encoding is None else Codec.of_frame(self.encoding)

    def check(self) -> None:
        """Check what the types do not express.

        Raises RequestError (`malformed`, `invalid_field`, `empty_push`, `invalid_dtype`, `unknown_codec`,
        `invalid_encoding`, `too_large`).
        """
        if not (self.worker is None) == (self.epoch is None) == (self.seq is None):
            raise problem("invalid_field", "worker, epoch and seq come together or not at all")
        _check_parts([(p.partition, p.ranges) for p in self.parts])
        if not self.parts:
            raise problem("empty_push", "the push names no partition")
        _check_dtype(self.dtype)
        if self.pull is not None:
            self.pull.check()
        codec = self.codec
        # The shard checks whether the sizes fit their partitions.
        if codec is not None and len(self.sizes) != len(self.parts):
            raise problem("invalid_encoding", f"the frame has {len(self.parts)} parts and {len(self.sizes)} sizes")
        if codec is not None and codec.per_partition and any(p.ranges is not None for p in self.parts):
            raise problem("invalid_encoding", f"{codec.text} takes whole partitions, without ranges")


class PushReply(Header, frozen=True):
    """The answer to a push frame; it has no body."""

    state: Annotated[str, Meta(min_length=1, max_length=16)]
    duplicate: bool
    version: Count
    durable_version: Count
    incarnation: Count
    timeline: Count
    parts: Annotated[Sequence[tuple[Count, Count, Count, Count]], Meta(max_length=limits.PARTITIONS_MAX)]
    """(partition, version, incarnation, durable version)."""
    late: bool = False
    lease: Lease | None = None
    """A lease of the values of `parts`, if the push asked for one and they have not changed since."""
    released: bool = False
    """Whether the clock that the push ended is committed, so that its worker may go on.

    If so, `version` and `parts` are those after the commit; otherwise the worker asks the scheduler.
    """


class PullReply(Header, frozen=True):
    """The answer to a pull or pushpull frame; the body holds the elements of `parts` in order."""

    model: ModelName
    generation: Count
    timeline: Count
    version: Count
    incarnation: Count
    dtype: str
    parts: Annotated[Sequence[tuple[Count, Count, Count]], Meta(max_length=limits.PARTITIONS_MAX)]
    """(partition, version, incarnation)."""
    push: PushReply | None = None
    lease: Lease | None = None
    """A lease of the values, in place of a body."""

    def check(self) -> None:
        """Raises RequestError (`invalid_dtype`)."""
        _check_dtype(self.dtype)
