"""Middleware around every request: its id, path and access checks, deadlines, draining, metrics, unhandled errors."""

import asyncio
import itertools
import logging
import re
import secrets
import time
from typing import Any, Final, NamedTuple, Self
from urllib.parse import unquote_to_bytes

from prometheus_client import Gauge
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paramserver.errors import PsError, problem
from paramserver.limits import PACE_BYTES_PER_S, PATIENCE_S
from paramserver.wire.sink import Destination
from paramserver_node import problems
from paramserver_node.access import ACCESS_ENDS_S, Guard, LocalOnly
from paramserver_node.deadlines import Deadlines
from paramserver_node.forward import changes_something, in_doubt
from paramserver_node.log import path_of
from paramserver_node.pieces import Pieces
from paramserver_node.stream import BODY, BodyTransfer
from paramserver_node.tally import Count, Counter, Histogram

log = logging.getLogger("paramserver.node")

DRAIN_BYTES_MAX: Final = 64 << 20
"""Most that is read of the body of a refused request; a client that sends more is cut off."""
DRAIN_S_MAX: Final = 10.0

_ID: Final = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_BAD_ESCAPE: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")

_EVENTS: Final = b"text/event-stream"
_NOT_STORED: Final = (b"cache-control", b"no-store")
"""Header of an answer to GET that has no other rule: a cache may store one without it as it sees fit (RFC 9111, 4.2.2),
also that something does not exist."""
_NO_DEADLINE: Final = "no_body_deadline"
_OMIT_ID: Final = "omit_request_id"
_PROCESS: Final = secrets.token_hex(8)
_NUMBERS: Final = itertools.count(1)
"""Request numbers; prefixed with the random `_PROCESS` they are unique ids."""

# No label is a path or name that clients choose: templates, methods, statuses and codes are bounded in number.
REQUESTS: Final = Counter("paramserver_http_requests_total", "Requests answered", ["route", "method", "status", "code"])
OPEN_REQUESTS: Final = Count()
"""All that are being answered, also those that no bound counts."""
Gauge("paramserver_http_requests_in_flight", "Requests that are being answered").set_function(
    lambda: OPEN_REQUESTS.total
)
REQUEST_S: Final = Histogram(
    "paramserver_http_request_seconds",
    "Time from the first byte of a request to the end of its response",
    ["route"],
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)


def no_body_deadline(scope: Scope) -> None:
    """Let the body of this request arrive without a deadline, and answer without reading the rest of it.

    Only after its sender has been authorized.
    """
    scope["state"][_NO_DEADLINE] = True


def omit_request_id(scope: Scope) -> None:
    """Omit the request id from a good answer unless the client gave one, so that equal answers are equal bytes."""
    scope["state"][_OMIT_ID] = True


class NodeMiddleware:
    """Outermost ASGI layer of a node.

    A client that sends its whole body before it reads would lose a response that ends earlier.  So what the endpoint
    did not read of the body is read and dropped before the response begins.
    """

    def __init__(self, app: ASGIApp, guard: Guard | LocalOnly | None = None) -> None:
        self.app = app
        self._guard = guard
        """None: no access control."""
        self._deadlines: Deadlines | None = None
        """Deadlines, on the event loop that serves."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        if self._deadlines is None or self._deadlines.loop is not loop:
            self._deadlines = Deadlines(loop)
        exchange = _Exchange(scope, receive, send, self._deadlines)
        scope.setdefault("state", {})["request_id"] = exchange.request_id
        started_at = time.monotonic()
        OPEN_REQUESTS.total += 1
        try:
            _check_path(scope)
            if self._guard is not None:
                scope["state"]["role"] = self._guard.check(scope)
            await self.app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:  # the server's time for requests in flight is over, or that of what this awaits
            if exchange.status:
                raise
            await problems.response(Request(scope), exchange.cut_short())(scope, exchange.receive, exchange.send)
        except Exception as e:
            if exchange.ended:
                return  # an inner layer has answered it as an internal error, and logged it
            if exchange.status:
                raise  # half a response is sent: all that can be done is to cut the connection
            # Bind the error to no other name: it refers to this frame, and such a cycle would keep both, and the body,
            # until the next garbage collection.
            answer = problems.failed(Request(scope), e)
            await answer(scope, exchange.receive, exchange.send)
        finally:
            OPEN_REQUESTS.total -= 1
            route: Any = scope.get("route")
            path = getattr(route, "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "OTHER"
            REQUESTS.labels(path, method, str(exchange.status), scope["state"].get(problems.CODE, "")).inc()
            REQUEST_S.labels(path).observe(time.monotonic() - started_at)


class _Exchange:
    """One request and its response: how much of the body was read, and how much of the response sent."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, deadlines: Deadlines) -> None:
        self._receive, self._send, self._deadlines = receive, send, deadlines
        self._scope = scope
        self._size, self.request_id, self._id_given, self._sender_waits = _Head.of(scope)
        self._body_begun, self._body_ended = False, self._size == 0
        extensions = scope.get("extensions", {})
        if BODY in extensions:
            self._body_transfer: BodyTransfer = extensions[BODY]
            extensions[BODY] = self
            self._size = None  # over HTTP/2 a body may exceed its announced size, and is then refused: wait for its end
        self._reading = asyncio.Lock()
        self._began_s = deadlines.now()
        self.received = 0
        self._drains = True
        """Whether the response waits for the rest of the body."""
        self._before = 0
        """Size of the last piece of the response, over HTTP/1.1: there the next one waits until it has been read."""
        self._ends_s: float | None = None
        """Unix time at which the response ends, as it is a stream of events whose reader's token expires then."""
        self.status = 0
        """Status of the response; 0 until it begins."""
        self.ended = False

    async def receive(self) -> Message:
        async with self._reading:  # an endpoint may wait for a disconnect while the rest is being drained
            return await self._next()

    async def _next(self) -> Message:
        self._sender_waits, self._body_begun = False, True  # the server now tells it to continue
        untimed = self._body_ended or _NO_DEADLINE in self._scope["state"]
        message = await (self._receive() if untimed else self._received_in_time())
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._body_ended = True
        return message

    def whole(self) -> bytes | None:
        """See `BodyTransfer`."""
        body = self._body_transfer.whole()
        if body is not None:
            self.received = len(body)
            self._body_ended = True
        return body

    async def into(self, sink: Destination) -> bool:
        """See `BodyTransfer`; raises like `_received_in_time`."""
        self._sender_waits, self._body_begun = False, True
        counted = _Counted(self, sink)
        while True:
            try:
                whole: bool = await self._deadlines.within(self._due_s(), self._body_transfer.into(counted))
                break
            except TimeoutError:
                if self._due_s() <= self._deadlines.now():
                    raise self._slow() from None
        self._body_ended = True
        return whole

    async def send_rest(self, pieces: Pieces) -> Pieces:
        """See `BodyTransfer`."""
        left = await self._body_transfer.send_rest(pieces)
        self.ended = not left
        return left

    def _due_s(self) -> float:
        """Deadline for the next bytes of the body."""
        return self._began_s + PATIENCE_S + self.received / PACE_BYTES_PER_S

    def _slow(self) -> PsError:
        self._drains = False
        passed_s = self._deadlines.now() - self._began_s
        return problem("too_slow", f"only {self.received} bytes of the body arrived in {passed_s:.0f} s")

    def cut_short(self) -> PsError:
        """Return the error for a request that the end of this node cuts off; its answer can wait for nothing more.

        One whose body is still being read has done nothing; any other one that changes something may have done it.
        """
        self._drains = False
        if (self._body_begun and not self._body_ended) or not changes_something(self._scope):
            return problem("unavailable", "this node is stopping")
        return in_doubt(self._scope, "this node is stopping, and may have done this")

    async def _received_in_time(self) -> Message:
        """Return the next piece of the body; raises Unavailable (`too_slow`) if it is late, as bodies hold memory."""
        try:
            message = await self._deadlines.within(self._due_s(), self._receive())
        except TimeoutError:
            raise self._slow() from None
        self.received += len(message.get("body", b""))
        if self.received == self._size:
            message["more_body"] = False  # saves another call, which would only tell this
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if ACCESS_ENDS_S in self._scope["state"] and _streams_events(message):
                self._ends_s = self._scope["state"][ACCESS_ENDS_S]
            if self._id_given or self.status >= 400 or _OMIT_ID not in self._scope["state"]:
                message["headers"] = [*message.get("headers", []), (b"x-request-id", self.request_id.encode())]
            if self._scope["method"] in ("GET", "HEAD") and not _has_cache_control(message):
                message["headers"] = [*message.get("headers", []), _NOT_STORED]
            if self._sender_waits and not self._body_ended:  # it has sent no body and need not; what follows is unclear
                # Over HTTP/2, which drops this header, the stream alone ends.
                message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
            elif not self._body_ended and self._drains and _NO_DEADLINE not in self._scope["state"]:
                await self._drain()
            await self._send(message)  # no deadline: HTTP/2 holds the head back for the body, `Http1` has its own
            return
        if self._ends_s is not None and time.time() >= self._ends_s and not self.ended:
            self.ended = True
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            raise problems.CutOff("the reader's token has expired")
        try:
            size = len(message.get("body", b""))
            within_s = PATIENCE_S + (self._before + size) / PACE_BYTES_PER_S
            self._before = 0 if self._scope["http_version"] == "2" else size
            await self._deadlines.within(self._deadlines.now() + within_s, self._send(message))
        except TimeoutError:
            self.ended = True
            log.info("request.unread path=%s request_id=%s", path_of(self._scope), self.request_id)
            raise problems.CutOff(f"a piece of the response was not read within {within_s:.0f} s") from None
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.ended = True

    async def _drain(self) -> None:
        drained = 0
        try:
            async with asyncio.timeout(DRAIN_S_MAX), self._reading:  # whoever had it may have been given the end
                while not self._body_ended and drained <= DRAIN_BYTES_MAX:
                    drained += len((await self._next()).get("body", b""))
        except (TimeoutError, PsError):
            pass


class _Counted:
    """A sink that also counts the bytes received, on which the sender's deadline depends."""

    def __init__(self, exchange: _Exchange, sink: Destination) -> None:
        self._exchange, self._sink = exchange, sink
        self.room: Final = sink.room
        self.rest: Final = sink.rest

    def filled(self, size: int) -> None:
        self._exchange.received += size
        self._sink.filled(size)

    def feed(self, data: memoryview) -> None:
        self._exchange.received += len(data)
        self._sink.feed(data)


def _check_path(scope: Scope) -> None:
    """Raise RequestError (`malformed`) unless the path is percent-encoded UTF-8.

    Servers decode other bytes to replacement characters, which would make different names equal.
    """
    raw: bytes = scope.get("raw_path") or b""
    if b"%" not in raw and raw.isascii():
        return
    path = raw.split(b"?")[0]
    if _BAD_ESCAPE.search(path):
        raise problem("malformed", "the path holds a '%' that does not begin an escape", hint="write it as %25")
    try:
        unquote_to_bytes(path).decode()
    except UnicodeDecodeError:
        raise problem("malformed", "the path is not UTF-8") from None


def _has_cache_control(start: Message) -> bool:
    return any(name == b"cache-control" for name, _ in start.get("headers", ()))


def _streams_events(start: Message) -> bool:
    return any(name == b"content-type" and value.startswith(_EVENTS) for name, value in start.get("headers", ()))


class _Head(NamedTuple):
    """What the headers of a request say about its body and its id."""

    size: int | None
    """Length of the body; None if only its end will tell."""
    request_id: str
    """The client's `X-Request-Id` if it is a plain word, else a new one."""
    id_given: bool
    """Whether it is the client's."""
    sender_waits: bool
    """Whether the client waits to be told to send the body."""

    @classmethod
    def of(cls, scope: Scope) -> Self:
        size = 0 if scope["method"] in ("GET", "HEAD") else None
        given, chunked, waits = "", False, False
        for name, value in scope["headers"]:
            if name == b"content-length":
                size = int(value) if value.isdigit() else None
            elif name == b"transfer-encoding":
                chunked = True
            elif name == b"x-request-id":
                given = value.decode("latin-1")
            elif name == b"expect":
                waits = value.lower() == b"100-continue" and scope["http_version"] != "1.0"
        named = given != "" and _ID.fullmatch(given) is not None
        return cls(None if chunked else size, given if named else f"{_PROCESS}-{next(_NUMBERS):x}", named, waits)
