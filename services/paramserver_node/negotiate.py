"""Content negotiation: bodies are JSON or msgpack, as Content-Type and Accept say."""

import json
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, Final

import msgpack
from fastapi import Request, Response

from paramserver.errors import problem
from paramserver.limits import JSON_BODY_BYTES_MAX, JSON_ELEMENTS_MAX, NAMED_BODY_BYTES_MAX
from paramserver.wire.bounded import parse_json, unpack

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
MERGE_PATCH: Final = "application/merge-patch+json"
_JSON_NAMES: Final = (JSON, MERGE_PATCH)
_MSGPACK_NAMES: Final = (MSGPACK, "application/x-msgpack", "application/vnd.msgpack")

_MORE: Final = f"send {MSGPACK} or frames, which are for more, or split the request"
_FIELDS: Final = 1024
"""Commas allowed in addition, as some do not separate numbers; so a body with a few numbers too many may pass."""


def media_type(request: Request) -> str:
    """Return the Content-Type without parameters, in lower case; JSON if there is none."""
    return request.headers.get("content-type", JSON).split(";")[0].strip().lower() or JSON


def announced(request: Request) -> int | None:
    """Return the Content-Length; None if there is no valid one."""
    text = request.headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() else None


async def read_body(request: Request, size_max: int, hint: str = "") -> bytes:
    """Return the whole body.

    Raises RequestError: `unsupported_media_type` if it is compressed, `too_large` above `size_max`, `malformed` if it
    is incomplete.  The middleware reads the rest of a body that is too large, so that the answer reaches the client.
    """
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise problem("unsupported_media_type", "compressed bodies are not understood", hint="send it uncompressed")
    length = announced(request)
    if length is not None and length > size_max:
        raise problem("too_large", f"the body has {length} bytes; the limit is {size_max}", hint=hint)
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise problem("malformed", "the body was cut off")
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > size_max:
            raise problem("too_large", f"the body has more than {size_max} bytes, the limit", hint=hint)
        parts.append(part)
        more = message.get("more_body", False)
    if length is not None and length != size:
        raise problem("malformed", f"Content-Length says {length}, but {size} bytes came")
    return b"".join(parts)


async def read(request: Request, size_max: int) -> Any:
    """Return the body as plain values (msgpack `bin` as bytes).

    Raises RequestError: `unsupported_media_type`, `too_large`, `malformed`, `non_finite`.
    """
    raw, parse = await read_encoded(request, size_max)
    return parse(raw)


async def read_encoded(
    request: Request, size_max: int, *, optional: bool = False, numbers_max: int | None = None
) -> tuple[bytes, Callable[[bytes], Any]]:
    """Return the body, and the function that parses it; if it is `optional`, an empty one becomes an empty object.

    `numbers_max`: most values that a JSON body may list, judged by its commas before it is parsed.

    Raises RequestError: `unsupported_media_type`, `too_large`, `malformed`; the function also `non_finite`.
    """
    kind = media_type(request)
    if kind not in _JSON_NAMES and kind not in _MSGPACK_NAMES:
        raise problem(
            "unsupported_media_type", f"Content-Type '{kind:.80}' is not understood", hint=f"{JSON} or {MSGPACK}"
        )
    raw = await read_body(request, size_max, "" if numbers_max is None else _MORE)
    if numbers_max is not None and raw.count(b",") >= numbers_max + _FIELDS:
        raise problem("too_large", f"a JSON body holds at most {numbers_max} numbers", hint=_MORE)
    if not raw and optional:
        return b"{}", parse_json
    if not raw:
        raise problem("malformed", "the body is empty", hint=f"send one {kind} value")
    return raw, parse_json if kind in _JSON_NAMES else unpack


async def read_tensors(request: Request) -> Any:
    """Return a body that may hold tensors, like `read`; JSON has lower limits, as parsing it blocks the event loop.

    Raises like `read`.
    """
    if media_type(request) not in _JSON_NAMES:
        return await read(request, NAMED_BODY_BYTES_MAX)
    raw, parse = await read_encoded(request, JSON_BODY_BYTES_MAX, numbers_max=JSON_ELEMENTS_MAX)
    return parse(raw)


def accepted(request: Request) -> str:
    """Return the media type for the answer; raises RequestError (`not_acceptable`) if Accept allows neither.

    If Accept leaves the choice, a msgpack body is answered in msgpack, and anything else in JSON.
    """
    own = MSGPACK if media_type(request) in _MSGPACK_NAMES else JSON
    header = ", ".join(request.headers.getlist("accept")).strip()
    if not header:
        return own
    # The most specific range that matches a type gives its quality (RFC 9110, 12.5.1).
    quality: dict[str, tuple[int, float]] = {}
    for entry in header.split(","):
        name, *params = (p.strip().lower() for p in entry.split(";"))
        q = _quality(params)
        for offer, names in ((JSON, (*_JSON_NAMES, "application/problem+json")), (MSGPACK, _MSGPACK_NAMES)):
            rank = 2 if name in names else 1 if name == "application/*" else 0 if name == "*/*" else -1
            if rank >= 0 and (rank, q) > quality.get(offer, (-1, 0.0)):
                quality[offer] = (rank, q)
    best = max((JSON, MSGPACK), key=lambda offer: (quality.get(offer, (0, 0.0))[1], offer == own))
    if quality.get(best, (0, 0.0))[1] <= 0.0:
        raise problem("not_acceptable", f"Accept '{header:.80}' allows neither {JSON} nor {MSGPACK}")
    return best


def _quality(params: list[str]) -> float:
    for param in params:
        if param.startswith("q="):
            try:
                q = float(param[2:])
            except ValueError:
                return 0.0
            return q if 0.0 <= q <= 1.0 else 0.0
    return 1.0


def check_accept(request: Request) -> None:
    """Raise RequestError (`not_acceptable`) if the client could not read the answer; to be called before any change."""
    accepted(request)


def json_text(body: Any) -> bytes:
    """Return JSON in UTF-8; NaN and infinity become null, and characters that UTF-8 cannot encode become '?'."""
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_without_nan(body), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode(errors="replace")


def pack(body: Any) -> bytes:
    """Return msgpack; integers beyond 64 bits become floats."""
    try:
        return bytes(msgpack.packb(body))
    except (OverflowError, UnicodeEncodeError):
        return bytes(msgpack.packb(json.loads(json_text(body), parse_int=_int64), unicode_errors="replace"))


def _int64(text: str) -> int | float:
    value = int(text)
    return value if -(1 << 63) <= value < 1 << 64 else float(value)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v) for v in value]
    return value


def respond(request: Request, body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with plain values in a media type that the client accepts."""
    if accepted(request) == MSGPACK:
        return Response(pack(body), status, dict(headers or {}), media_type=MSGPACK)
    return Response(json_text(body), status, dict(headers or {}), media_type=JSON)


def encoder(request: Request) -> Callable[[Any], bytes]:
    """Return what encodes a value in the media type that the client accepts: for `respond_items`."""
    return pack if accepted(request) == MSGPACK else json_text


def respond_items(request: Request, fields: Mapping[str, Any], items: Sequence[bytes]) -> Response:
    """Return a response with these fields (one at least) and `items`, a list whose items are encoded already.

    A list of megabytes would hold up the event loop if it were encoded, or converted, at once.
    """
    if accepted(request) == JSON:
        return Response(b'%b,"items":[%b]}' % (json_text(fields)[:-1], b",".join(items)), media_type=JSON)
    to = msgpack.Packer()
    pairs = [part for pair in fields.items() for part in map(pack, pair)]
    heads = to.pack_map_header(len(fields) + 1), *pairs, pack("items"), to.pack_array_header(len(items))
    return Response(b"".join((*heads, *items)), media_type=MSGPACK)


def respond_text(request: Request, text: bytes) -> Response:
    """Return a response with what this JSON text, which is not long, says, in a media type that the client accepts."""
    if accepted(request) == MSGPACK:
        return Response(pack(json.loads(text)), media_type=MSGPACK)
    return Response(text, media_type=JSON)
