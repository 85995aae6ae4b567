"""Media types: bodies come and go as JSON or msgpack, whichever Content-Type and Accept say."""

from collections.abc import Mapping
from typing import Any, Final

import msgpack
from fastapi import Request, Response
from starlette.responses import JSONResponse
from starlette.types import Receive

from paramserver.errors import problem
from paramserver.wire.bounded import parse_json, unpack

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
_MSGPACK_NAMES: Final = (MSGPACK, "application/x-msgpack", "application/vnd.msgpack")


def media_type(request: Request) -> str:
    """The Content-Type without parameters, in lower case; a body without one is taken as JSON."""
    return request.headers.get("content-type", JSON).split(";")[0].strip().lower() or JSON


async def read_body(receive: Receive, size_max: int, declared: str | None = None) -> bytes:
    """The whole body; raises RequestError: `too_large` past `size_max`, `malformed` when it is cut off.

    A body that is too large is read to its end (but not kept), so that the answer reaches the client.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise problem("malformed", "the body was cut off")
        part: bytes = message.get("body", b"")
        size += len(part)
        if size <= size_max:
            parts.append(part)
        else:
            parts.clear()
        if not message.get("more_body", False):
            break
    if size > size_max:
        raise problem("too_large", f"the body has {size} bytes; at most {size_max} are taken")
    if declared is not None and declared.isascii() and declared.isdigit() and int(declared) != size:
        raise problem("malformed", f"Content-Length says {declared}, but {size} bytes came")
    return b"".join(parts)


async def read(request: Request, size_max: int) -> Any:
    """The request's body as plain values (msgpack `bin` as bytes).

    Raises RequestError: `unsupported_media_type`, `too_large`, `malformed`, `non_finite`.
    """
    raw = await read_body(request.receive, size_max, request.headers.get("content-length"))
    kind = media_type(request)
    if request.headers.get("content-encoding", "identity") != "identity":
        raise problem("unsupported_media_type", "compressed bodies are not understood", hint="send it uncompressed")
    if kind == JSON:
        return parse_json(raw)
    if kind in _MSGPACK_NAMES:
        return unpack(raw)
    raise problem("unsupported_media_type", f"Content-Type '{kind:.80}' is not understood", hint=f"{JSON} or {MSGPACK}")


def accepted(request: Request) -> str:
    """The media type to answer in; raises RequestError (`not_acceptable`) when Accept allows neither."""
    header = request.headers.get("accept")
    if not header:
        return MSGPACK if media_type(request) in _MSGPACK_NAMES else JSON
    best, best_q = "", 0.0
    for entry in header.split(","):
        name, *params = (p.strip().lower() for p in entry.split(";"))
        q = 1.0
        for param in params:
            if param.startswith("q="):
                try:
                    q = float(param[2:])
                except ValueError:
                    q = 0.0
        offer = ""
        if name in _MSGPACK_NAMES:
            offer = MSGPACK
        elif name in (JSON, "application/problem+json"):
            offer = JSON
        elif name in ("*/*", "application/*"):
            offer = MSGPACK if media_type(request) in _MSGPACK_NAMES else JSON
        if offer and q > best_q:
            best, best_q = offer, q
    if not best:
        raise problem("not_acceptable", f"Accept '{header:.80}' allows neither {JSON} nor {MSGPACK}")
    return best


def check_accept(request: Request) -> None:
    """Raises RequestError (`not_acceptable`) before anything is done for a client that could not read the answer."""
    accepted(request)


def respond(request: Request, body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response of plain values in the media type that the client accepts."""
    if accepted(request) == MSGPACK:
        return Response(msgpack.packb(body), status, dict(headers or {}), media_type=MSGPACK)
    return JSONResponse(body, status, dict(headers or {}))
