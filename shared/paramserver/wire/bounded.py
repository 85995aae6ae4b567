"""Parsers for msgpack and JSON that check every length before they allocate.

`msgpack.unpackb` bounds a container only by the length of its input: nested headers that claim long arrays cost seconds
and hundreds of megabytes.  So the structure is walked first (`_measure`), without building anything.  JSON cannot claim
more than it spells out, but its depth is measured first too, so that code that recurses over it later is safe.
"""

import json
import math
import re
import struct
from collections import Counter
from typing import Any, Final

import msgpack
import numpy as np

from paramserver import limits
from paramserver.errors import problem

Buffer = bytes | bytearray | memoryview

_NOTHING: Final = (0, 0, 0, 0)
_LEADS: Final = (
    dict.fromkeys((*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3), _NOTHING)  # small integers, nil, booleans
    | {0x80 + i: (0, 0, i, 2) for i in range(16)}  # maps
    | {0x90 + i: (0, 0, i, 1) for i in range(16)}  # arrays
    | {0xA0 + i: (0, i, 0, 0) for i in range(32)}  # text
    | {0xCA + i: (0, 4 << i, 0, 0) for i in range(2)}  # floats
    | {first + i: (0, 1 << i, 0, 0) for first in (0xCC, 0xD0) for i in range(4)}  # integers
    | {first + i: (1 << i, 0, 0, 0) for first in (0xC4, 0xD9) for i in range(3)}  # bytes and text
    | {first + i: (2 << i, 0, 0, per) for first, per in ((0xDC, 1), (0xDE, 2)) for i in range(2)}  # arrays and maps
)
"""What follows the first byte of a msgpack value: bytes of a length, bytes of content, members, and values in each.

The length, if there is one, is that of the content or, of a container, the number of members.
"""


def _measure(buf: memoryview) -> None:
    """Walk one msgpack value; raises RequestError if it is truncated, too deep, too wide, or of an extension type."""
    at, end, total = 0, len(buf), 0
    open_items = [1]  # values still to come at each depth
    while open_items:
        if open_items[-1] == 0:
            open_items.pop()
            continue
        open_items[-1] -= 1
        lead = _LEADS.get(buf[at]) if at < end else _NOTHING
        if lead is None:
            raise problem("malformed", "msgpack extension types are not understood")
        length_bytes, size, members, per = lead
        at += 1 + length_bytes
        if length_bytes:
            length = int.from_bytes(buf[at - length_bytes : at], "big")
            size, members = (0, length) if per else (length, 0)
        at += size
        if at > end:
            raise problem("malformed", "the msgpack body is truncated")
        if members:
            total += members * per
            if members > limits.MSGPACK_CONTAINER_MAX:
                detail = f"a msgpack container holds more than {limits.MSGPACK_CONTAINER_MAX} items"
                raise problem("too_large", detail)
            if len(open_items) > limits.MSGPACK_DEPTH_MAX:
                raise problem("too_large", f"the msgpack body is nested deeper than {limits.MSGPACK_DEPTH_MAX}")
            if total > limits.MSGPACK_ITEMS_MAX:
                raise problem("too_large", f"the msgpack body holds more than {limits.MSGPACK_ITEMS_MAX} values")
            open_items.append(members * per)
    if at != end:
        raise problem("malformed", f"{end - at} bytes follow the msgpack body")


def _object(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise problem("malformed", f"an object has the key {twice!r:.80} more than once")
    if not all([type(k) is str for k in out]):
        raise problem("malformed", "the keys of an object must be strings")
    return out


def unpack(buf: Buffer) -> Any:
    """Return the value of a msgpack body; map keys must be unique strings.

    Raises RequestError: `malformed`, or `too_large` past the `limits.MSGPACK_*` of items in a container, of levels or
    of values in all.
    """
    view = memoryview(buf).cast("B")
    _measure(view)
    try:
        return msgpack.unpackb(view, raw=False, strict_map_key=True, object_pairs_hook=_object)
    except (ValueError, TypeError, OverflowError, struct.error, msgpack.exceptions.UnpackException) as e:
        raise problem("malformed", f"the msgpack body cannot be read: {e}") from None


_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""One JSON string, or an unterminated one at the end; possessive, so that it never looks at a byte twice."""
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_ODD_NUMBER: Final = re.compile(rb"[0-9]{19}|[eE]\+?[0-9]{3}")
"""Found in every number beyond 64 bits or beyond float64 (and in others: it only decides whether to look closer)."""
_HALF_PAIR: Final = re.compile(rb"\\u[dD][89a-fA-F]")


def _check_depth(text: bytes) -> None:
    if text.count(b"[") + text.count(b"{") <= limits.JSON_DEPTH_MAX:
        return
    brackets = np.frombuffer(_STRING.sub(b"", text).translate(None, _NOT_BRACKETS), np.uint8)
    steps = np.where(brackets & 2, 1, -1)  # the bit that is set in [ and {, and clear in ] and }
    if brackets.size and int(np.cumsum(steps).max()) > limits.JSON_DEPTH_MAX:
        raise problem("too_large", f"the JSON body is nested deeper than {limits.JSON_DEPTH_MAX}")


def _no_constant(name: str) -> float:
    raise problem("non_finite", f"{name} is not valid JSON")


def _normalized(value: Any) -> Any:
    """Return the value with integers beyond 64 bits as floats; raises RequestError (`malformed`, `non_finite`)."""
    if isinstance(value, dict):
        return {_normalized(k): _normalized(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_normalized(v) for v in value]
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise problem("malformed", "a string contains a lone surrogate") from None
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        try:
            return float(value)
        except OverflowError:
            raise problem("non_finite", "a number lies beyond float64") from None
    elif isinstance(value, float) and not math.isfinite(value):
        raise problem("non_finite", "a number lies beyond float64")
    return value


def parse_json(buf: Buffer) -> Any:
    """Return the value of a JSON body (RFC 8259 in UTF-8: no NaN or Infinity, no duplicate key, no lone surrogate).

    Integers beyond 64 bits become floats.  Bodies above `limits.CONTROL_BODY_BYTES_MAX` hold tensors or a heartbeat of
    a shard, whose readers check every number; there such integers and infinities (1e999) are passed through.
    Raises RequestError: `malformed`, `too_large` when nested deeper than `limits.JSON_DEPTH_MAX`, or `non_finite`.
    """
    text = bytes(buf)
    _check_depth(text)
    try:
        value = json.loads(text.decode(), parse_constant=_no_constant, object_pairs_hook=_object)
    except UnicodeDecodeError:
        hint = "a body that is not JSON needs a Content-Type"
        raise problem("malformed", "the JSON body is not UTF-8", hint=hint) from None
    except json.JSONDecodeError as e:
        raise problem("malformed", f"the JSON body cannot be read: {e}") from None
    except ValueError:  # of an integer with more digits than Python reads
        raise problem("non_finite", "a number lies beyond float64") from None
    odd = b"\\u" in text and _HALF_PAIR.search(text)
    odd = odd or (len(text) <= limits.CONTROL_BODY_BYTES_MAX and _ODD_NUMBER.search(text))
    return _normalized(value) if odd else value
