"""Forwarding of requests to another node, streamed both ways: clients need to reach only one address."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import timedelta
from typing import Final
from urllib.parse import quote

from pyreqwest.client import ClientBuilder
from pyreqwest.exceptions import BuilderError, PyreqwestError
from pyreqwest.request import StreamRequest
from pyreqwest.response import Response as Upstream
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paramserver.client.credentials import Credentials
from paramserver.client.transport import trusting
from paramserver.errors import PsError, problem
from paramserver_node.conditions import idempotency_key
from paramserver_node.race import hung_up, race

FORWARDED_BY_SHARD: Final = "x-paramserver-forwarded"
"""Header on requests that a shard forwards to another node: the receiver must not forward them again."""

FORWARDED_TO_LEADER: Final = "x-paramserver-handed-on"
"""Header on requests that a standby scheduler forwards to the leader: a receiver that does not lead refuses them."""
FORWARDED_ROLE: Final = "x-paramserver-role"
"""Header on requests that a node forwards under its own token: the role of the client."""

CONNECT_S: Final = 2.0
SILENCE_S: Final = 75.0
"""Read timeout towards the other node; long polls take up to 60 s."""
_CHUNK_BYTES_MAX: Final = 1 << 20
_PUSHES: Final = ("/push", "/pushpull")
_ENDLESS: Final = ("text/event-stream", "application/x-ndjson")
"""Media types of answers that go on until one side ends them."""

_HOP_BY_HOP: Final = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "host", "expect", "x-request-id", "date", "server", FORWARDED_TO_LEADER,
}  # fmt: skip
_OWN: Final = {"authorization", "cookie", "origin", FORWARDED_ROLE}
"""Headers that are not forwarded, as they identify client and web page only to the node that was called."""


class Forwarder:
    """A pool of connections to other nodes; close it with `aclose()`.

    A client's token and cookies are not forwarded: the other node gets this node's token, and the client's role.
    Once `stop` is set, streams end, and requests that wait for an answer and change nothing are refused.
    """

    def __init__(self, credentials: Credentials, stop: asyncio.Event) -> None:
        self._credentials = credentials
        self._stop = stop
        self._client = (
            trusting(ClientBuilder(), credentials)
            .http1_only()
            .no_proxy()
            .follow_redirects(False)
            .referer(False)
            .gzip(False)
            .deflate(False)
            .brotli(False)
            .zstd(False)
            .connect_timeout(timedelta(seconds=CONNECT_S))
            .read_timeout(timedelta(seconds=SILENCE_S))
            .pool_idle_timeout(timedelta(seconds=5))
            .pool_max_idle_per_host(64)
            .build()
        )

    async def aclose(self) -> None:
        """Close every connection."""
        await self._client.close()

    async def forward(
        self,
        request: Request,
        urls: Sequence[str],
        *,
        by_shard: bool,
        code: str = "unavailable",
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Return the response of the first of `urls` that can be reached to this request, with `headers` added.

        No other URL is tried once some of the body has been read.  Raises Unavailable (`code`) if no node answered;
        InDoubt if one was reached and did not answer, unless the request changes nothing; and RequestError
        (`malformed`) for a target that is not valid in a URL, or a body that was cut off, or what `idempotency_key`
        raises.
        """
        if request.scope["path"] in _PUSHES:
            idempotency_key(request.headers)
        body = _Body(request)
        sent = [*self._headers(request, by_shard), *(headers or {}).items()]
        last: Exception | None = None
        for url in urls:
            if body.started:
                break
            stream = self._outgoing(request, url, sent, body)
            try:
                if changes_something(request.scope):
                    return _Answer(stream, await stream.__aenter__(), self._stop)
                opened = await race(stream.__aenter__(), self._stop.wait())
                if opened is None:
                    raise problem(code, "this node is stopping")
                return _Answer(stream, opened[0], self._stop)
            except ClientDisconnect:
                raise problem("malformed", "the body was cut off") from None
            except PyreqwestError as e:
                last = e
            if body.cut_off:
                raise problem("malformed", "the body was cut off")
            if changes_something(request.scope) and "client error (Connect)" not in _causes(last):
                detail = f"the node that serves this closed the connection before it answered: {_why(last)}"
                raise in_doubt(request.scope, detail)
        raise problem(code, f"the node that serves this does not answer: {_why(last)}")

    def _outgoing(self, request: Request, url: str, headers: Sequence[tuple[str, str]], body: "_Body") -> StreamRequest:
        """Build the request to the node at `url`; raises RequestError (`malformed`) if its target is invalid there."""
        try:
            outgoing = self._client.request(request.method, url.rstrip("/") + target(request.scope)).headers(headers)
            # Pass the response on from its first byte, not after 64 KiB, so that event streams are not held up.
            outgoing = outgoing.streamed_read_buffer_limit(0)
            if body.expected:
                outgoing = outgoing.body_stream(body.pieces())
            return outgoing.build_streamed()
        except (BuilderError, ValueError) as e:
            raise problem("malformed", f"the request cannot be forwarded: {e}") from None

    def _headers(self, request: Request, by_shard: bool) -> list[tuple[str, str]]:
        """Return the client's headers to pass on, and those with which this node says who asks."""
        own = [(k.decode("latin-1"), _text(v)) for k, v in request.headers.raw]
        sent = [(k, v) for k, v in _kept(own) if k not in _OWN]
        sent.append(("x-request-id", str(request.scope.get("state", {}).get("request_id", ""))))
        if by_shard:
            sent.append((FORWARDED_BY_SHARD, "1"))
        if self._credentials.token:
            sent += self._credentials.headers.items()
            sent.append((FORWARDED_ROLE, str(request.scope["state"]["role"])))
        return sent


def changes_something(scope: Scope) -> bool:
    """Return whether the request may change something, if it is done."""
    return scope["method"] not in ("GET", "HEAD") and scope["path"] != "/pull"


def in_doubt(scope: Scope, detail: str) -> PsError:
    """Return the error `in_doubt` for a forwarded request; `retryable` if it cannot count twice.

    That is so for idempotent methods (RFC 9110, 9.2.2) and for pushes with a key.  A push id, which also makes a push
    repeatable, is in the body, which is not looked into here.
    """
    keyed = scope["path"] in _PUSHES and any([name == b"idempotency-key" for name, _ in scope["headers"]])
    repeatable = keyed or scope["method"] in ("PUT", "DELETE")
    hint = "" if repeatable else "look first whether it was done; a push may be sent again under its id"
    return problem("in_doubt", detail, hint=hint, retryable=repeatable)


class _Body:
    """The request's body, which can be read once; tells whether reading has begun, and whether it was cut off."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.started = False
        self.cut_off = False
        length = request.headers.get("content-length")
        self.expected = "transfer-encoding" in request.headers or (
            length != "0" if length is not None else request.method in ("POST", "PUT", "PATCH")
        )

    async def pieces(self) -> AsyncIterator[bytes]:
        self.started = True
        try:
            async for piece in self._request.stream():
                if piece:
                    yield piece
        except ClientDisconnect:
            self.cut_off = True
            raise


class _Answer(Response):
    """Another node's response, passed on piece by piece as it arrives; abandoned if the client disconnects.

    A stream of events or documents has no end of its own, so it ends when `stop` is set.
    """

    def __init__(self, stream: StreamRequest, upstream: Upstream, stop: asyncio.Event) -> None:
        self._stream, self._upstream = stream, upstream
        self._stop = stop if upstream.headers.get("content-type", "").split(";")[0] in _ENDLESS else None
        self.status_code = upstream.status
        self.background = None
        self.body = b""
        self.raw_headers = [(k.encode(), v.encode("latin-1")) for k, v in _kept(list(upstream.headers.items()))]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await race(self._pump(send), hung_up(receive))
        finally:
            await self._stream.__aexit__(None, None, None)

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._stop is None:
            await self._pump_body(send)
        else:
            await race(self._pump_body(send), self._stop.wait())
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump_body(self, send: Send) -> None:
        reader = self._upstream.body_reader
        while (chunk := await reader.read_chunk()) is not None:
            view = memoryview(chunk)
            for at in range(0, len(view), _CHUNK_BYTES_MAX):
                piece = bytes(view[at : at + _CHUNK_BYTES_MAX])
                await send({"type": "http.response.body", "body": piece, "more_body": True})


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _kept(headers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the headers to pass on, in lower case: without `_HOP_BY_HOP` and those that `Connection` names."""
    named = {n.strip().lower() for k, v in headers if k.lower() == "connection" for n in v.split(",")}
    return [(k.lower(), v) for k, v in headers if k.lower() not in _HOP_BY_HOP | named]


_DOTS: Final = re.compile(r"/((?:\.|%2[eE]){1,2})(?=/|\Z)")


def target(scope: Scope) -> str:
    """Return the path and query of a request as the client sent them, in ASCII.

    A URL parser would resolve the segments `.` and `..`, which may be part of a parameter's name; so the slash before
    them is escaped, which the parser leaves alone.  Raises RequestError (`malformed`) for a path that begins with such
    a segment.
    """
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    path = quote(raw.split(b"?")[0], safe="/%:@!$&'()*+,;=-._~")
    if not path.startswith("/") or _DOTS.match(path):
        raise problem("malformed", "the path cannot be forwarded")
    query: bytes = scope.get("query_string", b"")
    escaped = "?" + quote(query, safe="/%:@!$&'()*+,;=-._~?[]") if query else ""
    return _DOTS.sub(r"%2F\1", path) + escaped


def _causes(error: Exception | None) -> list[str]:
    return [str(c["message"]) for c in (getattr(error, "details", None) or {}).get("causes") or []]


def _why(error: Exception | None) -> str:
    return "no address is known" if error is None else [type(error).__name__, *_causes(error)][-1]
