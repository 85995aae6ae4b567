"""The HTTP/2 wire format (RFC 9113): frames, and header blocks (RFC 7541).

Our clients and servers send header blocks that leave the peer's dynamic table unchanged, so the same headers are always
the same bytes: a block decoded before is looked up, and a new one is quick to parse.  Blocks of other peers may use the
table; `hpack` decodes those.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, Generic, TypeVar, cast

import hpack

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9
"""Size of the frame header, which precedes each payload."""
WINDOW_MAX: Final = (1 << 31) - 1
WINDOW_BYTES: Final = 65_535
"""Initial flow-control window of a stream and of the connection."""
PAYLOAD_BYTES_MAX: Final = 16_384
"""Initial maximum payload of a frame, and the lowest that SETTINGS may set."""

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
WITH_PRIORITY: Final = 0x20

HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

NO_ERROR: Final = 0x0
PROTOCOL_ERROR: Final = 0x1
INTERNAL_ERROR: Final = 0x2
FLOW_CONTROL_ERROR: Final = 0x3
STREAM_CLOSED: Final = 0x5
FRAME_SIZE_ERROR: Final = 0x6
REFUSED_STREAM: Final = 0x7
CANCEL: Final = 0x8
COMPRESSION_ERROR: Final = 0x9
ENHANCE_YOUR_CALM: Final = 0xB

Header = tuple[bytes, bytes]
T = TypeVar("T")

_HEAD: Final = struct.Struct(">HBBBI")
_SETTING: Final = struct.Struct(">HI")
_WORD: Final = struct.Struct(">I")
_STATIC: Final[dict[tuple[object, int], dict[bytes, Any]]] = {}
"""Header blocks that need no table, and what was made of them, by the arguments of their decoders: shared by all
connections of the process, as there may be 16,384, idle for hours."""
_STATIC_MAX: Final = 2048
"""How many of each are cached: 10 MB at most."""
_KNOWN_MAX: Final = 8
"""Other blocks cached per connection: 40 KB at most."""
_KNOWN_BYTES_MAX: Final = 1024
"""Largest block that is cached, both encoded and decoded (at RFC 7541's count): 30 fields, of 150 bytes each here."""
_UNKNOWN: Final[Any] = object()
_STREAM_MASK: Final = (1 << 31) - 1
_TABLE_BYTES: Final = 4096
"""Initial size of the dynamic tables."""
_NO_TABLE: Final = b"\x20"
"""Beginning of a header block that sets the size of the dynamic table to 0 (RFC 7541, 6.3)."""

_INDEXED: Final[dict[Header, bytes]] = {
    (b":method", b"GET"): b"\x82", (b":method", b"POST"): b"\x83", (b":scheme", b"http"): b"\x86",
    (b":scheme", b"https"): b"\x87", (b":status", b"200"): b"\x88", (b":status", b"304"): b"\x8b",
}  # fmt: skip
"""Header fields encoded in one byte: their index in the static table."""
_NAMED: Final = {b":authority": b"\x01", b":method": b"\x02", b":path": b"\x04", b":status": b"\x08"}
"""Names encoded in one byte, by their index in the static table, before a literal value."""
_HEADER_OF: Final = {code[0]: header for header, code in _INDEXED.items()}
_NAME_OF: Final = {code[0]: name for name, code in _NAMED.items()}


class Http2Error(Exception):
    """Raised when a peer violates the protocol; the connection cannot go on."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code: Final = code
        """Error code for GOAWAY."""


def head(size: int, kind: int, flags: int, stream: int) -> bytes:
    """Return the frame header for a payload of `size` bytes."""
    return _HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a whole frame."""
    return head(len(payload), kind, flags, stream) + payload


def settings(values: dict[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(key, value) for key, value in values.items()))


def parse_settings(payload: memoryview) -> dict[int, int]:
    """Return the values in the payload of a SETTINGS frame; raises Http2Error."""
    if len(payload) % _SETTING.size:
        raise Http2Error(FRAME_SIZE_ERROR, "SETTINGS length is not a multiple of 6")
    values = dict(_SETTING.iter_unpack(payload))
    if values.get(INITIAL_WINDOW_SIZE, 0) > WINDOW_MAX:
        raise Http2Error(FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE is too large")
    if not PAYLOAD_BYTES_MAX <= values.get(MAX_FRAME_SIZE, PAYLOAD_BYTES_MAX) < 1 << 24:
        raise Http2Error(PROTOCOL_ERROR, "invalid SETTINGS_MAX_FRAME_SIZE")
    if values.get(ENABLE_PUSH, 0) > 1:
        raise Http2Error(PROTOCOL_ERROR, "invalid SETTINGS_ENABLE_PUSH")
    return values


def block_prefix(values: dict[int, int], before: bytes) -> bytes:
    """Return what precedes each header block for a peer with these settings; `before`: what did until they came.

    A peer that makes the dynamic table smaller must be told that its new size is kept to (RFC 9113, 4.3.1).
    """
    return _NO_TABLE if values.get(HEADER_TABLE_SIZE, _TABLE_BYTES) < _TABLE_BYTES else before


def u32_frame(stream: int, kind: int, value: int) -> bytes:
    """Return a frame whose payload is one 32-bit number: WINDOW_UPDATE or RST_STREAM."""
    return frame(kind, 0, stream, _WORD.pack(value))


def parse_u32(payload: memoryview) -> int:
    """Return the number in the payload of such a frame; raises Http2Error."""
    if len(payload) != _WORD.size:
        raise Http2Error(FRAME_SIZE_ERROR, "the payload must be 4 bytes long")
    (value,) = _WORD.unpack(payload)
    return int(value)


def parse_u31(payload: memoryview) -> int:
    """Like `parse_u32`, without the reserved top bit, which a receiver must ignore (RFC 9113, 6.8 and 6.9)."""
    return parse_u32(payload) & WINDOW_MAX


def goaway(last_stream: int, code: int) -> bytes:
    """Return a GOAWAY frame: streams up to `last_stream` are still answered."""
    return frame(GOAWAY, 0, 0, _WORD.pack(last_stream) + _WORD.pack(code))


def header_fragment(flags: int, payload: memoryview) -> bytes:
    """Return the header block fragment of a HEADERS frame, without padding and priority; raises Http2Error."""
    begin, end = 0, len(payload)
    if flags & PADDED:
        begin, end = 1, end - payload[0] if end else -1
    if flags & WITH_PRIORITY:
        begin += 5
    if begin > end:
        raise Http2Error(PROTOCOL_ERROR, "padding exceeds the frame")
    return bytes(payload[begin:end])


class Scanner:
    """Splits the byte stream of one peer into frames, however it is chunked."""

    def __init__(self, payload_bytes_max: int, other_bytes_max: int) -> None:
        """Bound the payload of a DATA frame, and of any other frame."""
        self._data_bytes_max, self._other_bytes_max = payload_bytes_max, other_bytes_max
        self._rest = b""
        """Bytes of a frame that cannot be interpreted yet."""
        self.unfinished = 0
        """The number of the frame that cannot be interpreted yet, which is another for each such frame; or 0."""
        self._count = 0
        self.due = 0
        """Bytes of the current DATA frame's payload that are still to come."""
        self.due_stream = 0
        """The stream of that frame."""
        self.frames = 0
        """Frames, and pieces of DATA, that the last `scan` found."""
        self._flags = self._padding = 0

    def ends(self, stream: int) -> bool:
        """Whether the bytes due are the last of that stream."""
        return self.due > 0 and self.due_stream == stream and bool(self._flags & END_STREAM)

    def consumed(self, size: int) -> int:
        """Note that `size` of the bytes due were read without this scanner; return the flags of that piece."""
        self.due -= size
        return 0 if self.due else self._flags

    def position(self, stream: int) -> tuple[int, int] | None:
        """Return (bytes due, flags) within a DATA frame of that stream, (0, 0) between frames, else None.

        None: within another stream's DATA frame, within padding, or after a part of another frame.
        """
        if self._rest or self._padding or (self.due and self.due_stream != stream):
            return None
        return (self.due, self._flags) if self.due else (0, 0)

    def resume_after(self, stream: int, due: int, flags: int, rest: bytes) -> None:
        """Go on after DATA of that stream was read without this scanner.

        `due` and `flags` are those of the last frame read; `rest` is the beginning of the next one.
        """
        self.due_stream, self.due, self._flags, self._rest = stream, due, flags & END_STREAM, rest
        self._note_rest()

    def scan(self, data: memoryview) -> Iterator[tuple[int, int, int, memoryview, int]]:
        """Yield (type, flags, stream, payload, bytes that count against the windows) of each frame; raises Http2Error.

        The payload of a DATA frame is yielded in the pieces in which it arrives, without padding; the last piece has
        END_STREAM if the frame has.  A payload is valid until the next one is yielded.
        """
        is_new = not self._rest
        if self._rest:
            data, self._rest = memoryview(self._rest + data), b""
        at, end, self.frames = 0, len(data), 0
        while at < end:
            self.frames += 1
            if self.due:
                n = min(self.due, end - at)
                self.due -= n
                yield DATA, 0 if self.due else self._flags, self.due_stream, data[at : at + n], n
                at += n
                continue
            if self._padding:
                n = min(self._padding, end - at)
                self._padding -= n
                at += n
                continue
            if end - at < HEAD_BYTES:
                break
            high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
            size, stream = high << 8 | low, stream & _STREAM_MASK
            if size > (self._data_bytes_max if kind == DATA else self._other_bytes_max):
                raise Http2Error(FRAME_SIZE_ERROR, "the frame is too long")
            if kind != DATA:
                if end - at < HEAD_BYTES + size:
                    break
                at += HEAD_BYTES + size
                yield kind, flags, stream, data[at - size : at], 0
                continue
            padding = 0
            if flags & PADDED:
                if size == 0:
                    raise Http2Error(FRAME_SIZE_ERROR, "padding exceeds the frame")
                if end - at == HEAD_BYTES:
                    break  # the length of the padding has not arrived yet
                padding = data[at + HEAD_BYTES] + 1
                if padding > size:
                    raise Http2Error(PROTOCOL_ERROR, "padding exceeds the frame")
            at += HEAD_BYTES + (padding > 0)
            self.due_stream, self._flags = stream, flags & END_STREAM
            self.due, self._padding = size - padding, max(0, padding - 1)
            if padding or not self.due:
                yield DATA, 0 if self.due else self._flags, stream, data[at:at], padding
        self._rest = bytes(data[at:])
        if is_new or at:
            self._note_rest()

    def _note_rest(self) -> None:
        self._count += 1
        self.unfinished = self._count if self._rest else 0


def encoded(headers: Iterable[Header]) -> bytes:
    """Return a header block that needs no dynamic table.  Names must be lower case, pseudo-headers first."""
    return b"".join([_field(name, value) for name, value in headers])


@lru_cache(maxsize=1024)
def _field(name: bytes, value: bytes) -> bytes:
    indexed = _INDEXED.get((name, value))
    if indexed is not None:
        return indexed
    return (_NAMED.get(name) or b"\x00" + _text(name)) + _text(value)


def _text(data: bytes) -> bytes:
    """Encode a string without Huffman coding: its length in 7 bits, or 127 and the rest in groups of 7 bits."""
    if len(data) < 127:
        return bytes((len(data),)) + data
    left, length = len(data) - 127, bytearray(b"\x7f")
    while left >= 128:
        length.append(left & 127 | 128)
        left >>= 7
    length.append(left)
    return bytes(length) + data


def decode_static(block: bytes, bytes_max: int) -> list[Header] | None:
    """Decode a block of the kind that `encoded` writes; None for others, and for long strings or blocks."""
    out: list[Header] = []
    at = size = 0
    try:
        while at < len(block):
            first, at = block[at], at + 1
            header = _HEADER_OF.get(first)
            if header is None:
                name = _NAME_OF.get(first)
                if name is None:
                    if first:
                        return None
                    name, at = _short(block, at)
                value, at = _short(block, at)
                header = (name, value)
            size += len(header[0]) + len(header[1]) + 32
            out.append(header)
    except (IndexError, ValueError):
        return None
    return out if size <= bytes_max else None


def _short(block: bytes, at: int) -> tuple[bytes, int]:
    """Return the string at that offset, and its end.

    Raises ValueError or IndexError unless it is shorter than 127 bytes, not Huffman-coded and complete.
    """
    size = block[at]
    end = at + 1 + size
    if size >= 127 or end > len(block):
        raise ValueError
    return block[at + 1 : end], end


class HeaderDecoder(Generic[T]):
    """Decodes the header blocks of one peer, in the order in which they arrive."""

    def __init__(self, bytes_max: int, read: Callable[[Sequence[Header]], T]) -> None:
        """`bytes_max` bounds the decoded headers of a block; `read` converts them to what `decode` returns."""
        self._read, self._bytes_max = read, bytes_max
        self._hpack = hpack.Decoder(max_header_list_size=bytes_max)
        self._static: dict[bytes, T] = _STATIC.setdefault((read, bytes_max), {})
        """Results by block, of those that need no table."""
        self._known: dict[bytes, T] = {}
        """Results by block, valid while the dynamic table does not change."""

    def decode(self, block: bytes) -> T:
        """Return what `read` makes of the headers, an object that may be shared; raises Http2Error."""
        known = self._static.get(block, _UNKNOWN)
        if known is _UNKNOWN:
            known = self._known.get(block, _UNKNOWN)
        if known is not _UNKNOWN:
            return cast(T, known)
        if (own := decode_static(block, self._bytes_max)) is not None:
            return _remembered(self._static, _STATIC_MAX, block, own, self._read(own))
        table = self._hpack.header_table
        size, newest = table.maxsize, _newest(table)
        try:
            headers: list[Header] = [(bytes(n), bytes(v)) for n, v in self._hpack.decode(block, raw=True)]
        except hpack.HPACKError as e:
            raise Http2Error(COMPRESSION_ERROR, f"the header block cannot be decoded: {e!s:.80}") from None
        result = self._read(headers)
        if table.maxsize == size and _newest(table) is newest:
            return _remembered(self._known, _KNOWN_MAX, block, headers, result)
        self._known.clear()
        return result


def _remembered(known: dict[bytes, T], count_max: int, block: bytes, headers: Sequence[Header], result: T) -> T:
    """Note the result of a block unless that is long; returns it."""
    if max(len(block), sum(len(n) + len(v) + 32 for n, v in headers)) <= _KNOWN_BYTES_MAX:
        if len(known) >= count_max:
            known.clear()
        known[block] = result
    return result


class BlockReader(Generic[T]):
    """Puts the header blocks of one peer together from their frames, and decodes them."""

    def __init__(self, bytes_max: int, read: Callable[[Sequence[Header]], T]) -> None:
        """`bytes_max` bounds a block, encoded and decoded; `read` as in `HeaderDecoder`."""
        self._bytes_max, self._decoder = bytes_max, HeaderDecoder(bytes_max, read)
        self._begun: tuple[int, int, bytearray] | None = None
        """An incomplete block: its stream, its flags, and what has arrived of it."""
        self.unfinished = 0
        """The number of the block that is incomplete, which is another for each such block; or 0."""
        self._count = 0

    def check(self, kind: int) -> None:
        """Raise Http2Error unless the next frame may be of this kind: CONTINUATION while a block is incomplete."""
        if (self._begun is not None) != (kind == CONTINUATION):
            raise Http2Error(PROTOCOL_ERROR, "a header block that is interrupted or has no beginning")

    def read(self, stream: int, flags: int, payload: memoryview) -> tuple[T, bool] | None:
        """Take a HEADERS frame, or the CONTINUATION of a block; returns None if more of the block is to come.

        Otherwise returns what `read` makes of it, and whether the stream ends with it.  Raises Http2Error.
        """
        if self._begun is None:
            block = bytearray(header_fragment(flags, payload))
        else:
            opened, first_flags, block = self._begun
            if opened != stream:
                raise Http2Error(PROTOCOL_ERROR, "a header block that is interrupted")
            flags = flags & END_HEADERS | first_flags & END_STREAM
            block += payload
        if len(block) > self._bytes_max:
            raise Http2Error(ENHANCE_YOUR_CALM, "headers that are too long")
        if not flags & END_HEADERS:
            if self._begun is None:
                self._count += 1
            self._begun, self.unfinished = (stream, flags, block), self._count
            return None
        self._begun, self.unfinished = None, 0
        return self._decoder.decode(bytes(block)), bool(flags & END_STREAM)


def _newest(table: Any) -> object:
    """Return the table's newest entry, which is a different object once a block has changed the table."""
    return table.dynamic_entries[0] if table.dynamic_entries else None
