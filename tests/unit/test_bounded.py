"""The bounds of msgpack and JSON bodies, to the item and to the bit; `test_wire` has what is refused as malformed."""

from typing import Any

import msgpack
import pytest
from tests.refusals import refused_with

from paramserver import limits
from paramserver.errors import RequestError
from paramserver.wire.bounded import parse_json, unpack

CONTAINER, ITEMS, DEPTH = limits.MSGPACK_CONTAINER_MAX, limits.MSGPACK_ITEMS_MAX, limits.MSGPACK_DEPTH_MAX


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x00", 0), (b"\x7f", 127), (b"\xe0", -32), (b"\xff", -1), (b"\xc0", None), (b"\xc2", False), (b"\xc3", True),
        (b"\xca\x3f\x80\x00\x00", 1.0), (b"\xcb\x3f\xf0" + bytes(6), 1.0),
        (b"\xcc\x80", 1 << 7), (b"\xcd\x80" + bytes(1), 1 << 15), (b"\xce\x80" + bytes(3), 1 << 31),
        (b"\xcf\x80" + bytes(7), 1 << 63), (b"\xd0\x80", -1 << 7), (b"\xd1\x80" + bytes(1), -1 << 15),
        (b"\xd2\x80" + bytes(3), -1 << 31), (b"\xd3\x80" + bytes(7), -1 << 63),
        (b"\xa0", ""), (b"\xa1a", "a"), (b"\xbf" + b"a" * 31, "a" * 31),
        (b"\xd9\x01a", "a"), (b"\xda\x00\x01a", "a"),
        (b"\xdb\x00\x00\x00\x01a", "a"), (b"\xc4\x01a", b"a"),
        (b"\xc5\x00\x01a", b"a"), (b"\xc6\x00\x00\x00\x01a", b"a"),
        (b"\x90", []), (b"\x9f" + b"\x05" * 15, [5] * 15), (b"\x80", {}), (b"\x81\xa1a\x05", {"a": 5}),
        (b"\xdc\x00\x01\x05", [5]), (b"\xdd\x00\x00\x00\x01\x05", [5]),
        (b"\xde\x00\x01\xa1a\x05", {"a": 5}),
        (b"\xdf\x00\x00\x00\x01\xa1a\x05", {"a": 5}),
    ],
)  # fmt: skip
def test_every_kind_of_msgpack_value_is_read(data: bytes, value: Any) -> None:
    """Each kind of value is read alone and between others, and is refused when it lacks its last byte."""
    assert unpack(data) == value
    assert type(unpack(data)) is type(value)
    assert unpack(b"\x93\x07" + data + b"\x09") == [7, value, 9]
    with pytest.raises(RequestError, match="truncated"):
        unpack(data[:-1])
    with pytest.raises(RequestError, match="1 bytes follow"):
        unpack(data + b"\x00")


@pytest.mark.parametrize(
    ("most", "more"),
    [
        ([0] * CONTAINER, [0] * (CONTAINER + 1)),
        ({str(i): 0 for i in range(CONTAINER)}, {str(i): 0 for i in range(CONTAINER + 1)}),
        ([[0] * (ITEMS // 32 - 1)] * 32, [[0] * (ITEMS // 32 - 1)] * 31 + [[0] * (ITEMS // 32)]),
        ([{str(i): 0 for i in range(ITEMS // 64 - 1)}] * 32 + [[0] * 31], [{str(i): 0 for i in range(2048)}] * 32),
    ],
)
def test_msgpack_holds_so_many_items(most: Any, more: Any) -> None:
    """As many items as are allowed, in a container or in all, are read, and one more is refused as too large."""
    assert unpack(msgpack.packb(most)) == most
    with refused_with("too_large", RequestError, match="holds more than"):
        unpack(msgpack.packb(more))


def test_msgpack_is_nested_so_deep() -> None:
    """As many levels as are allowed are read, the last of them with a value; one more is refused as too large."""
    deepest = b"\x91" * DEPTH
    assert unpack(deepest + b"\x05") is not None
    assert unpack(deepest + b"\x90") is not None
    with refused_with("too_large", RequestError, match=f"nested deeper than {DEPTH}"):
        unpack(deepest + b"\x91\x05")


@pytest.mark.parametrize("number", [-(1 << 63), (1 << 64) - 1])
def test_integers_of_64_bits_stay_integers_in_json(number: int) -> None:
    """The integers of 64 bits, signed or not, are read as they are; those next to them become floats."""
    beyond = number - 1 if number < 0 else number + 1
    read = parse_json(f'[{number}, {beyond}, {{"a": {beyond}}}]'.encode())

    assert read == [number, float(beyond), {"a": float(beyond)}]
    assert [type(v) for v in read[:2]] == [int, float]
    assert type(read[2]["a"]) is float


def test_large_json_is_left_to_the_reader_of_tensors() -> None:
    """In a body above the limit of control routes, numbers are passed through, and strings are still checked."""
    padding = b" " * limits.CONTROL_BODY_BYTES_MAX

    assert parse_json(b"[1e999]" + padding) == [float("inf")]
    assert type(parse_json(b"[100000000000000000000]" + padding)[0]) is int
    with pytest.raises(RequestError, match="lone surrogate"):
        parse_json(b'["\\ud800"]' + padding)
    with pytest.raises(RequestError, match="beyond float64"):
        parse_json(b"[1e999]" + padding[7:])
