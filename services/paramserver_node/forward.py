"""Forwarding of requests to another node, streamed both ways: clients need to reach only one address."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Final
from urllib.parse import quote

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paramserver.errors import PsError, problem
from paramserver.net.credentials import Credentials
from paramserver_node.app import FOR_HEAD
from paramserver_node.conditions import idempotency_key
from paramserver_node.race import hung_up, race

FORWARDED_BY_SHARD: Final = "x-paramserver-forwarded"
"""Header on requests that a shard forwards to another node: the receiver must not forward them again."""

FORWARDED_TO_LEADER: Final = "x-paramserver-handed-on"
"""Header on requests that a standby scheduler forwards to the leader: a receiver that does not lead refuses them."""
FORWARDED_TO_SHARD: Final = "x-paramserver-handed-over"
"""Header on requests that a scheduler forwards to a shard: a scheduler that receives one refuses it."""
FORWARDED_ROLE: Final = "x-paramserver-role"
"""Header on requests that a node forwards under its own token: the role of the client."""

SILENCE_S: Final = 75.0
"""Timeout of each read from and write to the other node, but for `_LONG`; long polls take up to 60 s."""
_TIMEOUT: Final = httpx.Timeout(SILENCE_S, connect=2.0).as_dict()
_NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL)
"""Errors after which the other node cannot have begun with the request."""
_IDLE_S: Final = 5.0
_IDLE_MAX: Final = 64
"""Idle connections kept, and how long they are used again."""
_PIECE_BYTES: Final = 256 << 10
"""Size of the pieces in which a response of known length is passed on; others are passed on as they come."""
_PUSHES: Final = ("/push", "/pushpull")
_ABSOLUTE: Final = re.compile("/models/[^/]+/(clock|tasks/.+/done|workers/.+/drain)")
"""POSTs that change nothing if they come again."""
_LONG: Final = re.compile("/models/[^/]+/(checkpoints|restore)")
"""POSTs that take as long as the model is large, without a byte of the answer."""
_LONG_SILENCE_S: Final = 3600.0
_ENDLESS: Final = ("text/event-stream", "application/x-ndjson")
"""Media types of answers that go on until one side ends them."""

_HOP_BY_HOP: Final = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade", b"host", b"expect", b"x-request-id", b"date", b"server",
    FORWARDED_TO_LEADER.encode(),
}  # fmt: skip
_OWN: Final = {b"authorization", b"cookie", b"origin", FORWARDED_ROLE.encode()}
"""Headers that are not forwarded, as they identify client and web page only to the node that was called."""


class Forwarder:
    """Forwards requests to other nodes; close it with `aclose()`.

    A client's token and cookies are not forwarded: the other node gets this node's token, and the client's role.
    A request is called off at the other node, by closing its connection, once its client has disconnected; and if it
    changes nothing, once `stop` is set.  Streams end with `stop`, too.
    """

    def __init__(self, credentials: Credentials, stop: asyncio.Event) -> None:
        self._credentials = credentials
        self._stop = stop
        self._connections = _Connections(credentials)

    async def aclose(self) -> None:
        """Close the idle connections, and the others once their requests have ended."""
        await self._connections.aclose()

    async def forward(
        self,
        request: Request,
        urls: Sequence[str],
        *,
        code: str = "unavailable",
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Return the response of the first of `urls` that can be reached to this request, with `headers` added.

        No other URL is tried once some of the body has been read.  Raises Unavailable (`code`) if no node answered;
        InDoubt if one was reached and did not answer, unless the request changes nothing; and RequestError
        (`malformed`) for a target or headers that are not valid HTTP, or a body that was cut off, or what
        `idempotency_key` raises.
        """
        if request.scope["path"] in _PUSHES:
            idempotency_key(request.headers)
        body, changes = _Body(request), changes_something(request.scope)
        sent = [*self._headers(request), *_encoded(headers or {})]
        last: Exception | None = None
        for url in urls:
            if body.started:
                break
            try:
                outgoing = _outgoing(request, url, sent, body)
                opened = await race(self._connections.send(outgoing, self._stop), self._called_off(body, changes))
            except ClientDisconnect:
                raise problem("malformed", "the body was cut off") from None
            except httpx.LocalProtocolError as e:
                raise problem("malformed", f"the request cannot be forwarded: {e}") from None
            except (httpx.TransportError, httpx.InvalidURL) as e:
                if changes and not isinstance(e, _NOT_SENT):
                    detail = f"the node that serves this closed the connection before it answered: {_why(e)}"
                    raise in_doubt(request.scope, detail) from e
                last = e
                continue
            if opened is None:
                raise problem(code, "this node is stopping" if self._stop.is_set() else "the client disconnected")
            return opened[0]
        raise problem(code, f"the node that serves this does not answer: {_why(last)}")

    async def _called_off(self, body: "_Body", changes: bool) -> None:
        """Wait until the answer to a request is no longer wanted."""
        if changes:
            await body.hung_up()
        else:
            await race(body.hung_up(), self._stop.wait())

    def _headers(self, request: Request) -> list[tuple[bytes, bytes]]:
        """Return the client's headers to pass on, and those with which this node says who asks."""
        sent = [(k, v) for k, v in _kept(request.headers.raw) if k not in _OWN]
        own = {"x-request-id": str(request.scope.get("state", {}).get("request_id", ""))}
        if self._credentials.token:
            own |= self._credentials.headers
            own[FORWARDED_ROLE] = str(request.scope["state"]["role"])
        return [*sent, *_encoded(own)]


def changes_something(scope: Scope) -> bool:
    """Return whether the request may change something, if it is done."""
    return scope["method"] not in ("GET", "HEAD") and scope["path"] != "/pull"


def in_doubt(scope: Scope, detail: str) -> PsError:
    """Return the error `in_doubt` for a request; `retryable` if it cannot count twice.

    That is so for idempotent methods (RFC 9110, 9.2.2), for POSTs that are idempotent all the same, and for pushes with
    a key.  A push id, which also makes a push repeatable, is in the body, which is not looked into here.
    """
    is_push = scope["path"] in _PUSHES
    keyed = is_push and any([name == b"idempotency-key" for name, _ in scope["headers"]])
    repeatable = keyed or scope["method"] in ("PUT", "DELETE") or _ABSOLUTE.fullmatch(scope["path"]) is not None
    hint = "" if repeatable else "look first whether it was done"
    if is_push and not repeatable:
        hint += "; a push may be sent again under its id"
    return problem("in_doubt", detail, hint=hint, retryable=repeatable)


class _Body:
    """The request's body, which can be read once; tells whether reading has begun."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._read = asyncio.Event()
        self.started = False
        length = request.headers.get("content-length")
        self.expected = "transfer-encoding" in request.headers or (
            length != "0" if length is not None else request.method in ("POST", "PUT", "PATCH")
        )
        if not self.expected:
            self._read.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        self.started = True
        async for piece in self._request.stream():
            if piece:
                yield piece
        self._read.set()

    async def hung_up(self) -> None:
        """Wait until the body has been read, and its client has disconnected."""
        await self._read.wait()
        await hung_up(self._request.receive)


class _Answer(Response):
    """Another node's response, passed on piece by piece as it arrives; abandoned if the client disconnects.

    A stream of events or documents has no end of its own, so it ends when `stop` is set.
    """

    def __init__(self, upstream: httpx.Response, stop: asyncio.Event, close: Callable[[], Awaitable[None]]) -> None:
        """`close` is called once the response has ended, or is abandoned."""
        self._upstream, self._close = upstream, close
        self._stop = stop if upstream.headers.get("content-type", "").split(";")[0] in _ENDLESS else None
        self.status_code = upstream.status_code
        self.background = None
        self.body = b""
        self.raw_headers = _kept(upstream.headers.raw)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await race(self._pump(send), hung_up(receive))
        finally:
            await self._close()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._stop is None:
            await self._pump_body(send)
        else:
            await race(self._pump_body(send), self._stop.wait())
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump_body(self, send: Send) -> None:
        size = _PIECE_BYTES if "content-length" in self._upstream.headers else None
        async for piece in self._upstream.aiter_raw(size):
            await send({"type": "http.response.body", "body": piece, "more_body": True})


class _Connections:
    """Connections to other nodes, each a transport of its own: httpx's pool looks at all of them for every request.

    They are no httpx clients, which would keep cookies, decode bodies, and add headers of their own.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._context = credentials.context()
        self._idle: list[tuple[httpx.AsyncHTTPTransport, str, float]] = []
        """(connection, URL of the node, when it became idle), the longest idle one first."""
        self._closed = False

    async def send(self, request: httpx.Request, stop: asyncio.Event) -> "_Answer":
        """Send the request, on a kept connection if there is one.  Raises httpx.TransportError."""
        await self._expire()
        url = str(request.url)
        connection = self._taken(url) or httpx.AsyncHTTPTransport(verify=self._context, trust_env=False)
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            await connection.aclose()
            raise

        async def close() -> None:
            await response.aclose()
            if self._closed:
                await connection.aclose()
            else:
                self._idle.append((connection, url, asyncio.get_running_loop().time()))
                await self._expire()

        return _Answer(response, stop, close)

    async def aclose(self) -> None:
        """Close the idle connections, and the others once their requests have ended."""
        self._closed = True
        while self._idle:
            await self._idle.pop()[0].aclose()

    def _taken(self, url: str) -> httpx.AsyncHTTPTransport | None:
        index = next((i for i in reversed(range(len(self._idle))) if self._idle[i][1] == url), None)
        return None if index is None else self._idle.pop(index)[0]

    async def _expire(self) -> None:
        """Close what is too old, before the other node does, or one too many."""
        oldest = asyncio.get_running_loop().time() - _IDLE_S
        while self._idle and (self._idle[0][2] < oldest or len(self._idle) > _IDLE_MAX):
            await self._idle.pop(0)[0].aclose()


def _outgoing(request: Request, url: str, headers: Sequence[tuple[bytes, bytes]], body: _Body) -> httpx.Request:
    """Return the request to the node at `url`.  Raises httpx.InvalidURL."""
    base = httpx.URL(url)
    exact = base.raw_path.rstrip(b"/") + target(request.scope)  # a parsed URL would lose `.` and `..`
    content = body.pieces() if body.expected else None
    long = request.method == "POST" and _LONG.fullmatch(request.scope["path"])
    extensions = {"timeout": {**_TIMEOUT, "read": _LONG_SILENCE_S} if long else _TIMEOUT, "target": exact}
    method = "HEAD" if FOR_HEAD in request.scope else request.method
    return httpx.Request(method, base, headers=headers, content=content, extensions=extensions)


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def _kept(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers to pass on, in lower case: without `_HOP_BY_HOP` and those that `Connection` names."""
    lowered = [(name.lower(), value.strip(b" \t")) for name, value in headers]  # h11 refuses such a space at the end
    named = {n.strip().lower() for name, value in lowered if name == b"connection" for n in value.split(b",")}
    return [(name, value) for name, value in lowered if name not in _HOP_BY_HOP | named]


def target(scope: Scope) -> bytes:
    """Return the path and query of a request as the client sent them, in ASCII.

    Raises RequestError (`malformed`) for a target without a path.
    """
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    path = quote(raw.split(b"?")[0], safe="/%:@!$&'()*+,;=-._~")
    if not path.startswith("/"):
        raise problem("malformed", "the path cannot be forwarded")
    query: bytes = scope.get("query_string", b"")
    return (path + ("?" + quote(query, safe="/%:@!$&'()*+,;=-._~?[]") if query else "")).encode()


def _why(error: BaseException | None) -> str:
    """Return the reason of an error in words: the system's, if it is behind it."""
    if error is None:
        return "no address is known"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__
