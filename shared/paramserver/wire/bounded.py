"""msgpack and JSON, read with every length checked before it allocates.

`msgpack.unpackb` bounds a container by the length of its input only: nested headers that claim long arrays cost seconds
and hundreds of megabytes.  So the structure is walked first (`_measure`), without building anything.
"""

import json
import struct
from typing import Any, Final

import msgpack

from paramserver import limits
from paramserver.errors import problem

Buffer = bytes | bytearray | memoryview

_FIXED: Final = (
    {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8}
    | {0xCC + i: 1 << i for i in range(4)}
    | {0xD0 + i: 1 << i for i in range(4)}
)
_SIZED: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_LONG: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def _measure(buf: memoryview, container_max: int, depth_max: int) -> None:
    """Walk one msgpack value; raises RequestError if it is cut short, too deep, too wide, or of an extension type."""
    at, end = 0, len(buf)
    open_items = [1]  # values still to come at each depth
    while open_items:
        if open_items[-1] == 0:
            open_items.pop()
            continue
        open_items[-1] -= 1
        if at >= end:
            raise problem("malformed", "the msgpack body is cut short")
        b = buf[at]
        at += 1
        items = 0
        if b <= 0x7F or b >= 0xE0:
            continue
        if b <= 0x8F:
            items = (b & 0x0F) * 2
        elif b <= 0x9F:
            items = b & 0x0F
        elif b <= 0xBF:
            at += b & 0x1F
        elif b in _FIXED:
            at += _FIXED[b]
        elif b in _SIZED:
            n = _SIZED[b]
            at += n + int.from_bytes(buf[at : at + n], "big")
        elif b in _LONG:
            n, per = _LONG[b]
            items = int.from_bytes(buf[at : at + n], "big") * per
            at += n
        else:
            raise problem("malformed", "msgpack extension types are not understood")
        if at > end:
            raise problem("malformed", "the msgpack body is cut short")
        if items:
            if items > container_max * 2:
                raise problem("too_large", f"a msgpack container holds more than {container_max} items")
            if len(open_items) > depth_max:
                raise problem("too_large", f"the msgpack body is nested deeper than {depth_max}")
            open_items.append(items)
    if at != end:
        raise problem("malformed", f"{end - at} bytes follow the msgpack body")


def unpack(
    buf: Buffer, *, container_max: int = limits.MSGPACK_CONTAINER_MAX, depth_max: int = limits.MSGPACK_DEPTH_MAX
) -> Any:
    """The value of a msgpack body; map keys are strings.

    Raises RequestError: `malformed`, or `too_large` past `container_max` items in a container or `depth_max` levels.
    """
    view = memoryview(buf).cast("B")
    _measure(view, container_max, depth_max)
    try:
        return msgpack.unpackb(
            view, raw=False, strict_map_key=True, max_array_len=container_max, max_map_len=container_max
        )
    except (ValueError, TypeError, OverflowError, struct.error, msgpack.exceptions.UnpackException) as e:
        raise problem("malformed", f"the msgpack body cannot be read: {e}") from None


def _no_constant(name: str) -> float:
    raise problem("non_finite", f"{name} is not a number that JSON or paramserver knows")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise problem("malformed", "a key comes twice in one JSON object")
    return out


def parse_json(buf: Buffer) -> Any:
    """The value of a JSON body (RFC 8259: no NaN, no Infinity, no key twice).

    Raises RequestError: `malformed`, `too_large` when nested too deep, or `non_finite`.
    """
    try:
        return json.loads(bytes(buf).decode(), parse_constant=_no_constant, object_pairs_hook=_unique)
    except RecursionError:
        raise problem("too_large", "the JSON body is nested too deep") from None
    except UnicodeDecodeError:
        raise problem("malformed", "the JSON body is not UTF-8") from None
    except ValueError as e:
        raise problem("malformed", f"the JSON body cannot be read: {e}") from None
