"""Hands a request on to another node, streaming both ways: the one-address rule."""

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

from paramserver.client.credentials import NO_CREDENTIALS, Credentials
from paramserver.client.transport import trusting
from paramserver.errors import problem
from paramserver_node.race import hung_up, race

MARK: Final = "x-paramserver-forwarded"
"""Set on what a shard sends on to another node: the receiver must not forward it again."""

HANDED_ON: Final = "x-paramserver-handed-on"
"""Set on what a scheduler that stands by hands on to the leader: the receiver leads, or nobody does."""
VOUCHED: Final = "x-paramserver-role"
"""On a request that one node hands to another under its own token: the role of whom it asks for."""

CONNECT_S: Final = 2.0
SILENCE_S: Final = 75.0
"""Longest pause of the other node; a long poll waits up to 60 s."""
_SAFE: Final = ("GET", "HEAD")
"""Methods of requests that change nothing, so that they may be sent twice."""
_CHUNK_BYTES_MAX: Final = 1 << 20

_HOP_BY_HOP: Final = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "host", "expect", "x-request-id", "date", "server", HANDED_ON,
}  # fmt: skip
_OWN: Final = {"authorization", "cookie", VOUCHED}
"""What a client says of itself to the node that it asked, and to no other."""


class Forwarder:
    """A pool of connections to other nodes; `aclose()` ends it.

    A client's own token and cookies stay here: the other node is shown this node's token and told the client's role.
    """

    def __init__(self, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._credentials = credentials
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
        mark: bool,
        code: str = "unavailable",
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """The answer of the first of `urls` that can be reached, to this very request with `headers` added.

        Once the body has begun to flow there is no second try.  Raises Unavailable (`code`) when no node was reached,
        InDoubt when one was and fell silent, and RequestError (`malformed`) for a target that no URL can hold or a body
        that was cut off.
        """
        body = _Body(request)
        own = [(k.decode("latin-1"), _text(v)) for k, v in request.headers.raw]
        sent = [(k, v) for k, v in _kept(own) if k not in _OWN]
        sent.append(("x-request-id", str(request.scope.get("state", {}).get("request_id", ""))))
        sent += (headers or {}).items()
        if mark:
            sent.append((MARK, "1"))
        if self._credentials.token:
            sent += self._credentials.headers.items()
            sent.append((VOUCHED, str(request.scope["state"]["role"])))
        last: Exception | None = None
        for url in urls:
            if body.started:
                break
            try:
                outgoing = self._client.request(request.method, url.rstrip("/") + target(request.scope))
                # The answer begins with the other node's first byte, not with its first 64 KiB: events flow.
                outgoing = outgoing.headers(sent).streamed_read_buffer_limit(0)
                if body.expected:
                    outgoing = outgoing.body_stream(body.pieces())
                stream = outgoing.build_streamed()
            except (BuilderError, ValueError) as e:
                raise problem("malformed", f"the request cannot be handed on: {e}") from None
            try:
                return _Answer(stream, await stream.__aenter__())
            except ClientDisconnect:
                raise problem("malformed", "the body was cut off") from None
            except PyreqwestError as e:
                last = e
            if body.cut_off:
                raise problem("malformed", "the body was cut off")
            if request.method not in _SAFE and "client error (Connect)" not in _causes(last):
                raise problem("in_doubt", f"the node that serves this broke off before it answered: {_why(last)}")
        raise problem(code, f"the node that serves this does not answer: {_why(last)}")


class _Body:
    """The request's body, read once; remembers whether any of it was taken."""

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
    """Another node's answer, passed on piece by piece while it comes in; given up when the client hangs up."""

    def __init__(self, stream: StreamRequest, upstream: Upstream) -> None:
        self._stream, self._upstream = stream, upstream
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
        reader = self._upstream.body_reader
        while (chunk := await reader.read_chunk()) is not None:
            view = memoryview(chunk)
            for at in range(0, len(view), _CHUNK_BYTES_MAX):
                piece = bytes(view[at : at + _CHUNK_BYTES_MAX])
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _kept(headers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """End-to-end headers in lower case: without the hop-by-hop ones and those that `Connection` names."""
    named = {n.strip().lower() for k, v in headers if k.lower() == "connection" for n in v.split(",")}
    return [(k.lower(), v) for k, v in headers if k.lower() not in _HOP_BY_HOP | named]


_DOTS: Final = re.compile(r"/((?:\.|%2[eE]){1,2})(?=/|\Z)")


def target(scope: Scope) -> str:
    """Path and query of a request as the client sent them, in ASCII.

    A URL parser would resolve a segment `.` or `..`, which may be part of a parameter's name; it leaves alone what
    stands behind an escaped slash.  Raises RequestError (`malformed`) for a path that begins with such a segment.
    """
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    path = quote(raw.split(b"?")[0], safe="/%:@!$&'()*+,;=-._~")
    if not path.startswith("/") or _DOTS.match(path):
        raise problem("malformed", "the path cannot be handed on")
    query: bytes = scope.get("query_string", b"")
    escaped = "?" + quote(query, safe="/%:@!$&'()*+,;=-._~?[]") if query else ""
    return _DOTS.sub(r"%2F\1", path) + escaped


def _causes(error: Exception | None) -> list[str]:
    return [str(c["message"]) for c in (getattr(error, "details", None) or {}).get("causes") or []]


def _why(error: Exception | None) -> str:
    return "no address is known" if error is None else [type(error).__name__, *_causes(error)][-1]
