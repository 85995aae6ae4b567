"""Frames, tensors and bounded parsing: round trips, and bad bytes raise only PsError."""

import json
import math
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refused_with

from paramserver import limits
from paramserver.core.ranges import of_pairs
from paramserver.errors import RequestError
from paramserver.types import PushId
from paramserver.wire import frame, tensor
from paramserver.wire.bounded import parse_json, unpack

GOLDEN = Path(__file__).parents[1] / "golden" / "frames"

PUSH = frame.PushFrame(
    "demo",
    [frame.PushPart(0, (6, (1 << 32) | 3), None), frame.PushPart(2, None, of_pairs([(0, 1), (5, 7)]))],
    generation=4,
    map_epoch=9,
    timeline=0,
    worker="run-7f3a/w0",
    epoch=2,
    seq=17,
    clock=6,
    weight=0.5,
    norm=1.25,
    pull=frame.PullSpec([(0, None)], 7, 5.0, "float16"),
)
PULL = frame.PullFrame(
    [(0, None), (1, of_pairs([(0, 3)]))], 7, 5.0, "bfloat16", model="demo", generation=4, map_epoch=9, timeline=0
)
PUSHED = frame.PushReply("applied", False, 7, 5, (1 << 32) | 3, 0, [(0, 7, (1 << 32) | 3, 5)])
PULLED = frame.PullReply("demo", 4, 0, 7, (1 << 32) | 3, "float16", [(0, 7, (1 << 32) | 3)], PUSHED)
FRAMES: dict[str, Any] = {"push": PUSH, "pull": PULL, "pushed": PUSHED, "pulled": PULLED}


RANGES = np.column_stack((np.arange(limits.RANGES_PER_REQUEST_MAX // 2 + 1),) * 2) * 2 + np.array([0, 1])


def spelled_out(header: Any) -> dict[str, Any]:
    """Return the msgpack map of that header."""
    data = frame.encode_header(header)
    out: dict[str, Any] = msgpack.unpackb(data[8 : 8 + int.from_bytes(data[4:8], "little")])
    return out


def plain(value: Any) -> Any:
    """Return a header, or a part of one, in comparable form."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(v) for v in value]
    return value


def read(header: dict[str, Any], of: type[frame.H]) -> frame.H:
    """Encode the map as a frame, and return its header decoded as `of`."""
    return frame.decode_header(frame.encode_header(header), of)[0]


@pytest.mark.parametrize("name", sorted(FRAMES))
def test_frames_are_the_bytes_that_the_golden_files_hold(name: str) -> None:
    """A frame is encoded to the bytes of its golden file, and decoding them gives the same frame."""
    golden = (GOLDEN / f"{name}.bin").read_bytes()

    assert frame.encode_header(FRAMES[name]) == golden
    header, offset = frame.decode_header(golden, type(FRAMES[name]))
    assert plain(header) == plain(FRAMES[name])
    assert offset == len(golden)
    assert offset % frame.ALIGN == 0


@pytest.mark.parametrize("name", sorted(FRAMES))
def test_a_header_may_spell_out_what_has_its_default(name: str) -> None:
    """A header with nulls, defaults and ranges spelled out, as earlier clients wrote it, gives the same frame."""
    golden = (GOLDEN / "spelled_out" / f"{name}.bin").read_bytes()

    header = frame.decode_header(golden, type(FRAMES[name]))[0]
    assert plain(header) == plain(FRAMES[name])


def test_the_example_of_the_protocol_page_is_a_real_frame() -> None:
    """The hex dump in docs/protocol.md is a frame that pushes two values to one whole partition."""
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    block = page.split("<!-- test: example -->\n```\n")[1].split("```")[0]
    dump = bytes.fromhex("".join(line.split("|")[0] for line in block.splitlines()))

    push, offset = frame.decode_header(dump, frame.PushFrame)

    assert (push.model, push.push_id, push.clock) == ("demo", PushId("w0", 1, 7), 6)
    assert np.frombuffer(dump[offset:], "<f4").tolist() == [1.0, -2.0]


def test_unknown_header_keys_are_ignored() -> None:
    """Unknown header keys, as a newer client may send them, are ignored."""
    assert spelled_out(read(spelled_out(PUSH) | {"color": "blue"}, frame.PushFrame)) == spelled_out(PUSH)


def test_a_newer_frame_format_is_refused_by_name() -> None:
    """A frame in an unknown format is refused with the number of that format."""
    data = bytearray(frame.encode_header(PUSH))
    data[2] = 2

    with pytest.raises(RequestError, match="frame format 2"):
        frame.decode_header(data, frame.PushFrame)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model": "../x"}, "malformed"),
        ({"worker": None}, "invalid_field"),
        ({"seq": -1}, "malformed"),
        ({"seq": True}, "malformed"),
        ({"parts": []}, "empty_push"),
        ({"parts": [[0, None, None], [0, None, None]]}, "malformed"),
        ({"parts": [[0, None]]}, "malformed"),
        ({"parts": [[0, None, None, None]]}, "malformed"),
        ({"parts": [[0, None, []]]}, "invalid_range"),
        ({"ack": ""}, "malformed"),
        ({"parts": [[0, [1], None]]}, "malformed"),
        ({"parts": [[0, None, [[3, 3]]]]}, "invalid_range"),
        ({"parts": [[0, None, [[3, 5], [4, 6]]]]}, "invalid_range"),
        ({"dtype": "int8"}, "invalid_dtype"),
        ({"dtype": 4}, "malformed"),
        ({"weight": float("nan")}, "malformed"),
        ({"pull": {"parts": [["x", None]]}}, "malformed"),
        ({"pull": {"parts": [[0, None], [0, None]]}}, "malformed"),
        ({"pull": {"parts": [[0]]}}, "malformed"),
        ({"pull": {"parts": [[0, None]], "dtype": "int8"}}, "invalid_dtype"),
        ({"clock": 1 << 63}, "malformed"),
        ({"worker": "w" * 129}, "malformed"),
        ({"slot": ""}, "malformed"),
        ({"release": [-1]}, "malformed"),
        ({"ends": [0, 1.0]}, "malformed"),
        ({"ends": [1, 60.5]}, "malformed"),
        ({"codec": "int4"}, "unknown_codec"),
        ({"codec": "int8", "sizes": [[1, 1]]}, "invalid_encoding"),
        ({"codec": "int8", "sizes": [[1, 1], [1, 1]]}, "invalid_encoding"),
        ({"parts": [[0, None, [[3, 4.5]]]]}, "malformed"),
        ({"parts": [[0, None, [[3]]]]}, "malformed"),
        ({"parts": [[0, None, [[3, 1 << 63]]]]}, "malformed"),
        ({"parts": [[0, None, 5]]}, "malformed"),
        ({"parts": [[0, None, bytes(15)]]}, "malformed"),
        ({"parts": [[0, None, b""]]}, "invalid_range"),
        ({"parts": [[0, None, struct.pack("<4Q", 3, 5, 4, 6)]]}, "invalid_range"),
        ({"parts": [[0, None, struct.pack("<2Q", 3, 1 << 63)]]}, "invalid_range"),
        ({"parts": [[p, None, RANGES[p:]] for p in range(2)]}, "too_large"),
        ({"parts": [[0, None, [[0, 1]] * (limits.RANGES_PER_REQUEST_MAX + 1)]]}, "too_large"),
        ({"map": 1}, "malformed"),
    ],
)
def test_a_wrong_header_is_refused(change: dict[str, Any], code: str) -> None:
    """A header with a wrong field is refused with the error code for it."""
    with refused_with(code, RequestError):
        read(spelled_out(PUSH) | change, frame.PushFrame)


def test_a_header_has_a_size_that_is_allowed() -> None:
    """A frame that announces a header above the limit is refused by its first 8 bytes; one at the limit is not."""
    longest = limits.FRAME_HEADER_BYTES_MAX

    assert (
        frame.header_end(frame.encode_header(PUSH)[:4] + longest.to_bytes(4, "little")) == -(-(longest + 8) // 64) * 64
    )
    with refused_with("too_large", RequestError):
        frame.header_end(frame.encode_header(PUSH)[:4] + (longest + 1).to_bytes(4, "little"))


def test_numbers_of_numpy_are_numbers_in_a_frame() -> None:
    """NumPy's numbers are sent as plain ones; what is neither number nor text is refused by the name of its type."""
    assert read({**spelled_out(PUSH), "clock": np.int64(9), "weight": np.float64(2.5)}, frame.PushFrame).clock == 9
    with pytest.raises(RequestError, match="a complex cannot be sent in a frame"):
        frame.encode_header({"weight": 1j})


@given(st.sampled_from(sorted(FRAMES)), st.integers(0, 400), st.binary(max_size=3))
def test_damaged_frames_give_a_problem_or_a_frame(name: str, at: int, junk: bytes) -> None:
    """A frame changed or cut off anywhere gives a RequestError or a frame, never another exception."""
    data = frame.encode_header(FRAMES[name])
    for damaged in (data[:at], data[:at] + junk + data[at + len(junk) :]):
        try:
            frame.decode_header(damaged, type(FRAMES[name]))
        except RequestError:
            continue


@pytest.mark.parametrize("name", sorted(FRAMES))
def test_every_truncation_of_a_frame_is_refused(name: str) -> None:
    """A frame cut off after any byte before the end of its header is refused."""
    data = (GOLDEN / f"{name}.bin").read_bytes()
    whole = frame.PREFIX_BYTES + int.from_bytes(data[4:8], "little")

    for end in range(whole):
        with pytest.raises(RequestError):
            frame.decode_header(data[:end], type(FRAMES[name]))
    frame.decode_header(data[:whole], type(FRAMES[name]))


@pytest.mark.parametrize(
    "claim",
    [
        b"\xdd\xff\xff\xff\xff",  # four billion parts
        b"\x91\x93\x00\xc0\xdd\xff\xff\xff\xff",  # four billion ranges
        b"\x91\x93\x00\xc0\xdc\x10\x00",  # as many ranges as are allowed, but none of them present
        b"\xdb\xff\xff\xff\xff",  # a string of four gigabytes
        b"\x91" * 100_000,  # lists in lists
        b"\x90\xa1x" + b"\x91" * 100_000,  # the same under an unknown key
        b"\x90\xa1x\xdd\xff\xff\xff\xff",
    ],
)
def test_a_header_that_claims_more_than_it_holds_allocates_nothing(claim: bytes) -> None:
    """Claimed lengths are checked against the limits and the bytes that follow before memory is allocated."""
    packed = b"\x83\xa5model\xa4demo\xa5parts" + claim
    data = b"PS\x01\x00" + len(packed).to_bytes(4, "little") + packed
    tracemalloc.start()
    try:
        with pytest.raises(RequestError) as caught:
            frame.decode_header(data, frame.PushFrame)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.code == "malformed"


@pytest.mark.parametrize(
    "ranges", [["a" * 5000, *[""] * 10000], [b"a" * 5000, *[b""] * 10000], [[]] * 30000, [[False, True]]]
)
def test_ranges_that_are_no_pairs_take_no_memory(ranges: list[Any]) -> None:
    """A list that is not of pairs of integers is refused before an array is made of it."""
    data = frame.encode_header(spelled_out(PUSH) | {"parts": [[0, None, ranges]]})
    tracemalloc.start()
    try:
        with refused_with("malformed", RequestError):
            frame.decode_header(data, frame.PushFrame)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


scrambled = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda c: st.lists(c, max_size=4) | st.dictionaries(st.text(max_size=3), c, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.sampled_from(sorted(FRAMES)), st.data())
def test_scrambled_headers_give_a_problem_or_a_frame(name: str, data: st.DataObject) -> None:
    """A header with any value in any field gives a RequestError or a frame that can be encoded again."""
    golden = (GOLDEN / "spelled_out" / f"{name}.bin").read_bytes()
    header = msgpack.unpackb(golden[8 : 8 + int.from_bytes(golden[4:8], "little")])
    header[data.draw(st.sampled_from(sorted(header)))] = data.draw(scrambled)
    try:
        again = read(header, type(FRAMES[name]))
    except RequestError:
        return
    frame.encode_header(again)


def nested(depth: int, claimed: int) -> bytes:
    return b"".join(b"\xdd" + struct.pack(">I", claimed) for _ in range(depth))


def test_msgpack_bombs_are_refused_before_they_allocate() -> None:
    """Nested msgpack that claims up to billions of items is refused before memory is allocated."""
    tracemalloc.start()
    bombs = [
        nested(900, 65_536),
        nested(12, 2**32 - 1),
        nested(200, 1),
        b"\xc6\xff\xff\xff\xff",
        b"\xc7\x08\x01" + bytes(8),
    ]
    for bomb in bombs:
        with pytest.raises(RequestError):
            unpack(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 1 << 20


@given(st.binary(max_size=200))
def test_any_bytes_are_msgpack_or_a_problem(data: bytes) -> None:
    """Arbitrary bytes read as msgpack give a value or a RequestError."""
    try:
        unpack(data)
    except RequestError:
        return


msgpack_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda c: st.lists(c, max_size=5) | st.dictionaries(st.text(), c, max_size=5),
    max_leaves=20,
)


@given(msgpack_values)
def test_msgpack_round_trips(value: Any) -> None:
    """A value within the bounds is the same after packing and unpacking."""
    assert unpack(msgpack.packb(value)) == value


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"[" * 100_000, "too_large"),
        (b'{"a":1,"a":2}', "malformed"),
        (b"NaN", "non_finite"),
        (b"[1, -Infinity]", "non_finite"),
        (b"\xff\xfe", "malformed"),
        (b"9" * 10_000, "non_finite"),
        (b"1e999", "non_finite"),
        (b'{"a": -' + b"9" * 400 + b"}", "non_finite"),
        (b"[" * 33 + b"]" * 33, "too_large"),
        (b'["]]","\\"]]",' + b"[" * 32 + b"]" * 33, "too_large"),
        (b'{"a": "\\ud800"}', "malformed"),
        (b'{"\\uDC00x": 1}', "malformed"),
        (b"\xef\xbb\xbf{}", "malformed"),
        ('{"a": "é"}'.encode("latin-1"), "malformed"),
        ("{}".encode("utf-16"), "malformed"),
        (b"", "malformed"),
        (b"{} {}", "malformed"),
    ],
)
def test_bad_json_is_refused(text: bytes, code: str) -> None:
    """JSON that is not RFC 8259, or is nested too deeply, is refused with the error code for it."""
    with refused_with(code, RequestError):
        parse_json(text)


def test_a_repeated_key_is_named() -> None:
    """The refusal of an object with a repeated key says which one, also within another object, in JSON and msgpack."""
    repeated = b"\x81\xa1o\x82\xa1w\x01\xa1w\x02"
    for parse, body in ((parse_json, b'{"o": {"v": 0, "w": 1, "w": 2}}'), (unpack, repeated)):
        with pytest.raises(RequestError, match="key 'w' more than once"):
            parse(body)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"[" * 32 + b"]" * 32, None),
        (b'{"a": "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\\"[[["}', {"a": "[" * 40 + '"[[['}),
        (b'"\\ud83d\\ude00"', "\U0001f600"),
        (b"[1e22, 100000000000000000000]", [1e22, 1e20]),
    ],
)
def test_unusual_json_is_read(text: bytes, value: Any) -> None:
    """JSON that only looks too deeply nested, like half a surrogate pair or too large is read."""
    assert value is None or parse_json(text) == value
    assert parse_json(text) is not None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda c: st.lists(c, max_size=5) | st.dictionaries(st.text(st.characters(codec="utf-8")), c, max_size=5),
    max_leaves=20,
)  # fmt: skip


@given(json_values, st.booleans())
def test_json_round_trips(value: Any, ascii_only: bool) -> None:
    """A JSON value is the same after writing and reading, with or without ASCII escapes."""
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=60) | st.text('[]{}",:\\u0d8e19-+.Ntrue ', max_size=60).map(str.encode))
def test_any_bytes_are_json_or_a_problem(data: bytes) -> None:
    """Arbitrary bytes read as JSON give a value that can be written again, or a RequestError."""
    try:
        value = parse_json(data)
    except RequestError:
        return
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    msgpack.packb(value)


@pytest.mark.parametrize(
    "data",
    [
        b"\x82\xa1a\x01\xa1a\x02",
        b"\x81\xc4\x01a\x01",
        b"\x81\x01\x01",
        b"\x81\x90\x01",
        b"\xa2\xed\xa0",
        b"\xd6\xff\x00\x00\x00\x00",
        b"\xc1",
        b"\x01\x01",
        msgpack.packb([0] * 4097),
        msgpack.packb([[0] * 4096] * 64),
    ],
)
def test_msgpack_outside_the_rules_is_refused(data: bytes) -> None:
    """Duplicate and non-string keys, extension types, bad UTF-8, trailing bytes and too many values are refused."""
    with pytest.raises(RequestError):
        unpack(data)


floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(st.lists(floats32, min_size=2, max_size=2), max_size=4))
def test_json_numbers_round_trip_as_float32(rows: list[list[float]]) -> None:
    """A float32 array written as JSON is read back bit for bit."""
    a = np.array(rows, np.float32).reshape(len(rows), 2) if rows else np.zeros((0,), np.float32)

    back, dtype = tensor.from_json(tensor.to_json(a, "float32"), "w")

    assert dtype == "float32"
    assert back.tobytes() == a.tobytes()


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ([[1], [2, 3]], "invalid_shape"),
        ([1, [2]], "invalid_shape"),
        ("3", "malformed"),
        ([None], "malformed"),
        ([True], "malformed"),
        ([1e39], "non_finite"),
        ([10**400], "non_finite"),
        ([[[[[[[[[1]]]]]]]]], "invalid_shape"),
    ],
)
def test_json_that_is_no_tensor_is_refused(value: Any, code: str) -> None:
    """Ragged lists, non-numbers and numbers beyond float32 are refused with a code and the tensor's name."""
    with pytest.raises(RequestError) as caught:
        tensor.from_json(value, "w")

    assert caught.value.code == code
    assert caught.value.members["where"] == "w"


@pytest.mark.parametrize(
    "value",
    [
        {"dtype": "float32", "shape": [2**40, 2**40], "data": b""},
        {"dtype": "float32", "shape": [0, 2**36, 2**36, 2**36], "data": b""},
        {"dtype": "float32", "shape": [0] * 100, "data": b""},
        {"dtype": "float32", "shape": [-1], "data": b"1234"},
        {"dtype": "float32", "shape": [2], "data": b"1234"},
        {"dtype": "object", "shape": [1], "data": b"1234"},
        {"dtype": ">f4", "shape": [1], "data": b"1234"},
        {"dtype": "float32", "shape": [1], "data": "1234"},
        {"dtype": "float32", "shape": [1]},
        [1],
    ],
)
def test_msgpack_tensors_that_lie_are_refused(value: Any) -> None:
    """A msgpack tensor whose shape, dtype and bytes do not fit together is refused."""
    with pytest.raises(RequestError):
        tensor.from_msgpack(value, "w")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_msgpack_tensors_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    """An array of any dtype is written as a msgpack tensor, transposed or not, and read back in its shape."""
    a = tensor.from_f32(np.arange(6, dtype=np.float32)[: math.prod(shape)].reshape(shape), dtype).T

    back, named = tensor.from_msgpack(unpack(msgpack.packb(tensor.to_msgpack(a, dtype))), "w")

    assert (named, back.shape, back.dtype) == (dtype, a.shape, a.dtype)
    assert np.array_equal(back, a)


def test_json_of_many_numbers_or_wide_ones_is_exact() -> None:
    """A float64, and an array too large for its shortest decimals, are written in full; others as short as possible."""
    tenth = np.float32(0.1)

    assert tensor.to_json(np.full((2, 1), 0.1), "float64") == [[0.1], [0.1]]
    assert tensor.to_json(np.full(1 << 16, tenth), "float32")[-1] == 0.1
    assert tensor.to_json(np.full((1, (1 << 16) + 1), tenth), "float32")[0][-1] == float(tenth)
    assert tensor.to_json(np.array(tenth), "float32") == 0.1


@given(st.lists(st.floats(width=32), max_size=20))
def test_bfloat16_rounds_to_the_nearest(values: list[float]) -> None:
    """bfloat16 keeps its own values exactly, and is never farther from others than the two values around them."""
    a = np.array(values, np.float32)
    bits = tensor.f32_to_bf16(a)
    back = tensor.bf16_to_f32(bits)

    assert np.array_equal(tensor.f32_to_bf16(back), bits)
    kept = np.isfinite(a) & np.isfinite(back)
    toward_zero = a.view(np.uint32)[kept] & 0xFFFF0000
    exact, rounded = a[kept].astype(np.float64), back[kept].astype(np.float64)
    for bits_around in (toward_zero, toward_zero + np.uint32(0x10000)):
        around = bits_around.view(np.float32).astype(np.float64)
        assert np.all(np.abs(rounded - exact) <= np.abs(around - exact))


def test_slice_checksums_are_zlibs() -> None:
    """A slice's checksum is zlib's crc32 of the dtype name, the ranges as u64 pairs, and the elements."""
    a = np.arange(5, dtype=np.float32)

    crc = tensor.slice_crc("float32", of_pairs([(0, 2), (4, 7)]), a)

    assert crc == zlib.crc32(b"float32" + struct.pack("<4Q", 0, 2, 4, 7) + a.tobytes())
    assert crc != tensor.slice_crc("float32", of_pairs([(0, 3), (4, 6)]), a)
