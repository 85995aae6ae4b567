"""HTTP/2 on the wire: frames, header blocks, and the parsing of request headers."""

import tracemalloc
from collections.abc import Sequence

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.wire import http2 as wire
from paramserver.wire.http2 import HeaderDecoder, Http2Error, Scanner
from paramserver_node.request_head import request_of

ASKED = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"a:1"), (b":path", b"/p%20q?x=1"), (b"a", b"b")]

texts = st.binary(max_size=140)
payloads = st.binary(max_size=40)
frames = st.lists(
    st.one_of(
        st.tuples(st.just(wire.DATA), st.sampled_from([0, wire.END_STREAM]), payloads, st.integers(-1, 5)),
        st.tuples(st.sampled_from([wire.HEADERS, wire.PING, 77]), st.integers(0, 255), payloads, st.just(-1)),
    ),
    max_size=8,
)


@given(frames, st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(1, 50))
def test_frames_are_found_wherever_the_bytes_are_cut(
    given_frames: list[tuple[int, int, bytes, int]], cuts: list[int], past_min: int
) -> None:
    """Frames are parsed alike however the bytes are split, and if the rest of a DATA frame is read past the scanner.

    Each comes once and complete: DATA in pieces without padding, END_STREAM with the last, and all its bytes counted.
    """
    sent = b""
    for number, (kind, flags, payload, padding) in enumerate(given_frames):
        if padding >= 0:
            flags, payload = flags | wire.PADDED, bytes((padding,)) + payload + bytes(padding)
        sent += wire.frame(kind, flags, number, payload)
    scanner, got, at, cost = Scanner(100, 100), list[list[object]](), 0, 0
    while at < len(sent):
        step = cuts[at % len(cuts)]
        past, due = scanner.due_stream, scanner.due
        if due >= past_min:
            taken = sent[at : at + min(due, step)]
            cost, at = cost + len(taken), at + len(taken)
            if not got or got[-1][0] != (wire.DATA, past) or got[-1][1]:
                got.append([(wire.DATA, past), 0, b""])
            got[-1][1:] = [scanner.consumed(len(taken)), bytes(got[-1][2]) + taken]  # type: ignore[call-overload]
            continue
        for kind, flags, stream, payload_piece, counted in scanner.scan(memoryview(sent[at : at + step])):
            cost += counted
            if kind == wire.DATA and got and got[-1][0] == (wire.DATA, stream) and not got[-1][1]:
                got[-1][1:] = [flags, bytes(got[-1][2]) + payload_piece]  # type: ignore[call-overload]
            else:
                got.append([(kind, stream), flags, bytes(payload_piece)])
        at += step

    wanted = [
        [(kind, n), flags & wire.END_STREAM if kind == wire.DATA else flags, p]
        for n, (kind, flags, p, _) in enumerate(given_frames)
    ]
    data = [(p, pad) for kind, _, p, pad in given_frames if kind == wire.DATA]
    assert got == wanted
    assert cost <= sum(len(p) + pad + 1 for p, pad in data)
    assert cost >= sum(len(p) for p, _ in data)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (wire.head(101, wire.DATA, 0, 1), wire.FRAME_SIZE_ERROR),
        (wire.head(51, wire.HEADERS, 0, 1), wire.FRAME_SIZE_ERROR),
        (wire.frame(wire.DATA, wire.PADDED, 1, b"\x05abc"), wire.PROTOCOL_ERROR),
        (wire.frame(wire.DATA, wire.PADDED, 1), wire.FRAME_SIZE_ERROR),
    ],
)
def test_frames_that_cannot_be_are_refused(sent: bytes, code: int) -> None:
    """A payload above the size limit, or padding that does not fit its frame, raises Http2Error."""
    with pytest.raises(Http2Error) as refused:
        list(Scanner(100, 50).scan(memoryview(sent)))
    assert refused.value.code == code


@pytest.mark.parametrize("size", [0, 1, 126, 127, 128, 254, 255, 300, 20_000])
def test_headers_of_any_length_are_read_by_others(size: int) -> None:
    """hpack decodes header blocks that were encoded without the dynamic table, whatever the length of a field."""
    headers = [(b":status", b"200"), (b":status", b"404"), (b"x" * max(1, size), b"y" * size)]
    assert hpack.Decoder(1 << 20).decode(wire.encoded(headers), raw=True) == headers


words = st.sampled_from([b"a", b"bb", b"content-type", b"etag", b"longer-than-that"])


@given(st.lists(st.lists(st.tuples(words, words), min_size=1, max_size=4), max_size=30), st.integers(0, 200))
def test_what_was_read_before_is_not_taken_for_something_else(blocks: list[list[wire.Header]], size: int) -> None:
    """A block is decoded correctly again after the peer's dynamic table has changed what the same bytes mean."""
    encoder, decoder = hpack.Encoder(), HeaderDecoder(1 << 16, tuple)
    encoder.header_table_size = size
    for headers in blocks:
        assert decoder.decode(encoder.encode(headers)) == tuple(headers)
        assert decoder.decode(wire.encoded(headers)) == tuple(headers)


@pytest.mark.parametrize(
    ("block", "reads"),
    [
        (wire.encoded(ASKED), 1),
        (wire.encoded([*ASKED, (b"x", b"y" * 3000)]), 2),
        (wire.encoded([(b"x", b"y")]) * 70, 2),
        (b"\x90" * 70, 2),
        (b"\x20" * 3000 + b"\x90", 2),
    ],
    ids=["short", "one long", "many", "many of the table", "nothing, said at length"],
)
def test_only_what_is_short_is_remembered(block: bytes, reads: int) -> None:
    """Only short header blocks are cached, so a connection holds little memory whatever its peer sends."""
    read: list[tuple[wire.Header, ...]] = []

    def kept(headers: Sequence[wire.Header]) -> int:
        read.append(tuple(headers))
        return len(read)

    decoder = HeaderDecoder(1 << 16, kept)
    decoder.decode(b"\x20")  # an empty dynamic table, which no block changes
    read.clear()
    assert [decoder.decode(block) for _ in range(2)] == [1, reads]
    assert len(set(read)) == 1


def test_idle_connections_share_what_they_remember(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections keep little of the header blocks that their clients have sent, however many these were."""
    count, blocks = 20, [[(b"%d" % i, b"x"), *[(b"a", b"b")] * 25] for i in range(64)]
    of_the_table = [b"\x20" + b"\x90" * (i % 8 + 1) + wire.encoded(headers) for i, headers in enumerate(blocks)]
    monkeypatch.setattr(wire, "_STATIC_MAX", 64)
    tracemalloc.start()
    try:
        decoders = [HeaderDecoder(1 << 16, list) for _ in range(count)]
        before, _ = tracemalloc.get_traced_memory()
        for i, decoder in enumerate(decoders):
            for headers, other in zip(blocks, of_the_table, strict=True):
                decoder.decode(wire.encoded([(b"c", b"%d" % i), *headers]))
                decoder.decode(other)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / count < 64 << 10


def test_blocks_of_many_connections_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the connections of a process remember together is bounded."""
    monkeypatch.setattr(wire, "_STATIC_MAX", 10)
    decoder = HeaderDecoder(1 << 16, list)
    for i in range(100):
        decoder.decode(wire.encoded([(b"x", b"%d" % i)]))
    assert 0 < len(decoder._static) <= 10


def test_the_rest_of_a_frame_or_of_a_block_is_awaited_under_its_number() -> None:
    """A frame, or a header block, that is incomplete has the same number as it grows, and the next one another."""
    scanner, ping = Scanner(100, 100), wire.frame(wire.PING, 0, 0, bytes(8))
    numbers = []
    for piece in (ping[:3], ping[3:8], ping[8:] + ping[:1], ping[1:], ping[:2]):
        list(scanner.scan(memoryview(piece)))
        numbers.append(scanner.unfinished)
    assert numbers[0] == numbers[1] != 0
    assert numbers[2] not in (0, numbers[1])
    assert numbers[3] == 0
    assert numbers[4] not in (0, *numbers[:3])

    heads, block = wire.BlockReader(1 << 16, tuple), memoryview(wire.encoded(ASKED))
    numbers = []
    for stream in (1, 3):
        heads.read(stream, 0, block[:1])
        numbers.append(heads.unfinished)
        heads.read(stream, 0, block[1:2])
        numbers.append(heads.unfinished)
        heads.read(stream, wire.END_HEADERS, block[2:])
        assert heads.unfinished == 0
    assert numbers == [1, 1, 2, 2]


def test_headers_that_cannot_be_read_are_refused() -> None:
    """A header block with an invalid index, or above its limit, raises Http2Error, in brief (COMPRESSION_ERROR)."""
    decoder = HeaderDecoder(100, list)
    for block in (b"\xff\xff\xff\xff\x0f", b"\x7f" + b"\xff" * 60_000, wire.encoded([(b"a", b"b" * 100)])):
        with pytest.raises(Http2Error) as refused:
            decoder.decode(block)
        assert refused.value.code == wire.COMPRESSION_ERROR
        assert len(str(refused.value)) < 200


def test_a_request_is_what_asgi_calls_it() -> None:
    """A request is parsed to the ASGI method, path, query and headers, with its authority as `host`, and its length."""
    scope = {
        "method": "POST", "path": "/p q", "raw_path": b"/p%20q", "query_string": b"x=1",
        "headers": [(b"host", b"a:1"), (b"a", b"b")],
    }  # fmt: skip
    assert request_of(ASKED) == (scope, None, False)
    assert request_of([*ASKED[:4], (b"host", b"a:1"), *ASKED[4:]]) == (scope, None, False)
    asked = request_of([*ASKED, (b"te", b"trailers"), (b"content-length", b"7")])
    assert asked is not None
    assert asked.length == 7


def test_cookies_in_fields_of_their_own_are_one_header() -> None:
    """Cookies that a browser sends in separate fields are joined into one header, as apps expect (RFC 9113, 8.2.3)."""
    asked = request_of([*ASKED, (b"cookie", b"a=1"), (b"c", b"d"), (b"cookie", b"b=2")])
    assert asked is not None
    assert [value for name, value in asked.scope["headers"] if name == b"cookie"] == [b"a=1; b=2"]


@pytest.mark.parametrize(
    "headers",
    [
        ASKED[1:], ASKED[:1] + ASKED[2:], ASKED[:3], [*ASKED, (b"A", b"b")], [*ASKED, (b":late", b"")],
        [ASKED[0], *ASKED], [*ASKED, (b"connection", b"close")], [(b":other", b""), *ASKED], [*ASKED, (b"", b"")],
        [*ASKED, (b"idempotency-key", b"k ")], [*ASKED, (b"x", b"\ty")],
        [*ASKED[:3], (b":path", b"p")], [*ASKED, (b"x", b"a\r\nb: c")], [*ASKED[:3], (b":path", b"/\x00")],
        [*ASKED, (b"content-length", b"9" * 5000)], [*ASKED, (b"content-length", b"-1")],
        [*ASKED, (b"content-length", b"1"), (b"content-length", b"2")],
        [*ASKED, (b"content-length ", b"1")], [*ASKED, (b"x:y", b"1")], [*ASKED, (b"x\r\ny", b"1")],
        [*ASKED, (b"\xe9", b"1")], [*ASKED, (b"host", b"b:1")], [*ASKED, (b"host", b"a:1"), (b"host", b"a:1")],
        [*ASKED, (b"te", b"gzip")], [(b":method", b"GET /x"), *ASKED[1:]],
    ],
)  # fmt: skip
def test_what_is_no_request_is_none(headers: list[wire.Header]) -> None:
    """Headers that are missing, repeated, misplaced, not allowed in HTTP/2 or malformed make no request."""
    assert request_of(headers) is None


@pytest.mark.parametrize(
    ("flags", "payload", "block"),
    [
        (0, b"abc", b"abc"),
        (wire.PADDED, b"\x02abc\x00\x00", b"abc"),
        (wire.WITH_PRIORITY, b"12345abc", b"abc"),
        (wire.PADDED | wire.WITH_PRIORITY, b"\x0212345abc\x00\x00", b"abc"),
        (wire.PADDED, b"\x02\x00\x00", b""),
        (wire.WITH_PRIORITY, b"12345", b""),
    ],
)
def test_a_header_block_lies_between_priority_and_padding(flags: int, payload: bytes, block: bytes) -> None:
    """The fragment of a HEADERS frame begins after its padding's length and priority, and ends before its padding."""
    assert wire.header_fragment(flags, memoryview(payload)) == block


@pytest.mark.parametrize(
    ("flags", "payload"),
    [
        (wire.PADDED, b""),
        (wire.PADDED, b"\x02\x00"),
        (wire.WITH_PRIORITY, b"1234"),
        (wire.PADDED | wire.WITH_PRIORITY, b"\x0112345"),
    ],
)
def test_a_header_block_that_is_all_padding_is_refused(flags: int, payload: bytes) -> None:
    """A HEADERS frame whose padding or priority does not fit it raises Http2Error."""
    with pytest.raises(Http2Error) as refused:
        wire.header_fragment(flags, memoryview(payload))
    assert refused.value.code == wire.PROTOCOL_ERROR


def test_numbers_of_the_protocol_are_the_rfcs() -> None:
    """Error codes and initial sizes are those of RFC 9113, 6.5.2, 6.9.2 and 7: tests know them by our names only."""
    codes = [wire.NO_ERROR, wire.PROTOCOL_ERROR, wire.INTERNAL_ERROR, wire.FLOW_CONTROL_ERROR, wire.STREAM_CLOSED]
    assert codes == [0x0, 0x1, 0x2, 0x3, 0x5]
    codes = [wire.FRAME_SIZE_ERROR, wire.REFUSED_STREAM, wire.CANCEL, wire.COMPRESSION_ERROR, wire.ENHANCE_YOUR_CALM]
    assert codes == [0x6, 0x7, 0x8, 0x9, 0xB]
    assert (wire.WINDOW_BYTES, wire.WINDOW_MAX, wire.PAYLOAD_BYTES_MAX) == (65_535, 2_147_483_647, 16_384)


def test_a_number_is_four_bytes_long() -> None:
    """A 32-bit payload is read as it was written, a 31-bit one without its top bit; another length is refused."""
    sent = memoryview(wire.u32_frame(5, wire.WINDOW_UPDATE, 0xFFFFFFFE))[wire.HEAD_BYTES :]

    assert (wire.parse_u32(sent), wire.parse_u31(sent)) == (0xFFFFFFFE, 0x7FFFFFFE)
    for size in (3, 5):
        with pytest.raises(Http2Error) as refused:
            wire.parse_u32(memoryview(bytes(size)))
        assert refused.value.code == wire.FRAME_SIZE_ERROR


def test_a_place_in_data_is_told_for_its_stream_alone() -> None:
    """Within DATA a scanner tells its stream what is due; other streams, and parts of other frames, have no place."""
    scanner = Scanner(100, 50)
    assert scanner.position(1) == (0, 0)
    data = wire.frame(wire.DATA, wire.END_STREAM, 1, b"abcd")
    list(scanner.scan(memoryview(data[:-3])))
    assert (scanner.position(1), scanner.position(3)) == ((3, wire.END_STREAM), None)
    assert (scanner.ends(1), scanner.ends(3)) == (True, False)
    list(scanner.scan(memoryview(data[-3:-1])))
    assert (scanner.position(1), scanner.ends(1)) == ((1, wire.END_STREAM), True)
    list(scanner.scan(memoryview(data[-1:])))
    assert (scanner.position(1), scanner.position(3)) == ((0, 0), (0, 0))
    assert not scanner.ends(1)
    list(scanner.scan(memoryview(data[:3])))
    assert scanner.position(1) is None


def test_a_place_in_padding_is_nobodys() -> None:
    """While padding is still to come there is no place to read from without the scanner."""
    scanner = Scanner(100, 50)
    padded = wire.frame(wire.DATA, wire.PADDED, 1, b"\x02abc\x00\x00")
    list(scanner.scan(memoryview(padded[:-1])))
    assert scanner.position(1) is None
    list(scanner.scan(memoryview(padded[-1:])))
    assert scanner.position(1) == (0, 0)


@pytest.mark.parametrize(
    "payload",
    [b"\x00\x05\x00\x00\x00", b"\x00\x04\x80\x00\x00\x00", b"\x00\x05\x00\x00\x3f\xff", b"\x00\x02\x00\x00\x00\x02"],
)
def test_settings_that_cannot_be_are_refused(payload: bytes) -> None:
    """Settings of a wrong length, with too large a window, too small a frame size or half a push, raise Http2Error."""
    with pytest.raises(Http2Error):
        wire.parse_settings(memoryview(payload))


@given(
    st.one_of(st.binary(max_size=60), st.lists(st.tuples(texts, texts), max_size=6).map(wire.encoded)),
    st.integers(0, 400),
)
def test_a_block_that_is_quickly_read_says_what_it_says(block: bytes, bytes_max: int) -> None:
    """`decode_static` returns what hpack decodes, or None; always None for a truncated or too large block."""
    try:
        wanted = [
            (bytes(n), bytes(v)) for n, v in hpack.Decoder(max_header_list_size=bytes_max).decode(block, raw=True)
        ]
    except hpack.HPACKError:
        wanted = None
    found = wire.decode_static(block, bytes_max)
    assert found is None or found == wanted


def test_our_own_blocks_are_quickly_read() -> None:
    """`decode_static` reads our own blocks of short fields, with and without names of the static table."""
    headers = [*ASKED, (b":status", b"200"), (b":status", b"418"), (b"", b""), (b"x", b"v" * 126)]
    assert wire.decode_static(wire.encoded(headers), 1 << 16) == headers
    assert wire.decode_static(wire.encoded(headers), 400) is None
    assert wire.decode_static(wire.encoded([(b"x", b"v" * 127)]), 1 << 16) is None
