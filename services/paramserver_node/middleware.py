"""Around every request: an id, checks of path and caller, the drain of a body nobody read, counts, the last word."""

import asyncio
import itertools
import logging
import re
import secrets
import time
from collections.abc import Awaitable
from functools import cache
from math import inf
from typing import Any, Final, TypeVar
from urllib.parse import unquote_to_bytes

from prometheus_client import Counter, Histogram
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paramserver.errors import PsError, problem
from paramserver.limits import PACE_BYTES_PER_S, PATIENCE_S
from paramserver_node import problems
from paramserver_node.access import Guard, Neighbours
from paramserver_node.metrics import IN_FLIGHT, REQUEST_S, REQUESTS

log = logging.getLogger("paramserver.node")

DRAIN_BYTES_MAX: Final = 64 << 20
"""Most that is read of a body whose request has been refused; a client that sends more is cut off."""
DRAIN_S_MAX: Final = 10.0

_ID: Final = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_BAD_ESCAPE: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_INTERRUPTED: Final = -1.0
T = TypeVar("T")

_PROCESS: Final = secrets.token_hex(8)
_NUMBERS: Final = itertools.count(1)
"""Of the requests of this process; with its random name they make ids that no other gives."""


class NodeMiddleware:
    """Outermost ASGI layer of a node.

    A response that ends before its request's body was read would be lost by the shard's server, so what the endpoint
    left is read (and dropped) before the response begins.
    """

    def __init__(self, app: ASGIApp, guard: Guard | Neighbours | None = None) -> None:
        self.app = app
        self._guard = guard
        """None: everyone may do everything."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        scope.setdefault("state", {})["request_id"] = exchange.request_id
        started_at = time.monotonic()
        IN_FLIGHT.inc()
        try:
            _check_path(scope)
            if self._guard is not None:
                scope["state"]["role"] = self._guard.check(scope)
            await self.app(scope, exchange.receive, exchange.send)
        except Exception as e:
            if exchange.ended:
                return  # answered as an internal error, and logged, further in
            if exchange.status:
                raise  # half a response is out: all that can be done is to cut the connection
            if not isinstance(e, PsError):
                log.exception("request.failed path=%s request_id=%s", scope["path"], exchange.request_id)
            error = e if isinstance(e, PsError) else problem("internal", problems.OUR_BUG)
            await problems.response(Request(scope), error)(scope, exchange.receive, exchange.send)
        finally:
            exchange.close()
            IN_FLIGHT.dec()
            route: Any = scope.get("route")
            path = getattr(route, "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "OTHER"
            requests, seconds = _series(path, method, exchange.status)
            requests.inc()
            seconds.observe(time.monotonic() - started_at)


class _Exchange:
    """One request and its response: how far the body was read, how far the answer got.

    One timer watches over whatever the request waits for at the moment; `asyncio.timeout` around each step would cost a
    small request a tenth of its time.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._size = _body_bytes(scope)
        self._body_ended = self._size == 0
        self._loop = asyncio.get_running_loop()
        self._reading: asyncio.Lock | None = None
        self._began_s = self._loop.time()
        self._received = 0
        self._too_slow = False
        self._waits: dict[asyncio.Task[Any], float] = {}
        """Until when each task that reads or writes now may wait."""
        self._watch: asyncio.TimerHandle | None = None
        self._looks_at_s = inf
        self.request_id: Final = _request_id(scope)
        self.status = 0
        """Of the response; 0 until it begins."""
        self.ended = False

    def close(self) -> None:
        """The request is over."""
        if self._watch is not None:
            self._watch.cancel()

    def _look_at(self, due_s: float) -> None:
        if due_s < self._looks_at_s:
            self.close()
            self._looks_at_s = due_s
            self._watch = self._loop.call_at(due_s, self._look)

    def _look(self) -> None:
        """Interrupt what has waited too long, and look again when the next will have."""
        self._watch, self._looks_at_s = None, inf
        now = self._loop.time()
        for task, due_s in self._waits.items():
            if due_s > now:
                self._look_at(due_s)
            elif due_s != _INTERRUPTED:
                self._waits[task] = _INTERRUPTED
                task.cancel()

    async def _in_time(self, step: Awaitable[T], due_s: float) -> T:
        """What `step` gives; raises TimeoutError if it has not by then."""
        task = asyncio.current_task()
        assert task is not None
        self._waits[task] = due_s
        self._look_at(due_s)
        try:
            return await step
        except asyncio.CancelledError:
            if self._waits[task] == _INTERRUPTED and task.uncancel() == 0:
                raise TimeoutError from None
            raise
        finally:
            del self._waits[task]

    async def receive(self) -> Message:
        if self._reading is None:
            self._reading = asyncio.Lock()
        async with self._reading:  # an endpoint may listen for a hang-up while the rest is being drained
            message = await self._receive() if self._body_ended else await self._received_in_time()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._body_ended = True
        return message

    async def _received_in_time(self) -> Message:
        """The next piece of the body; raises Unavailable (`too_slow`) for one that holds memory and does not come."""
        due_s = self._began_s + PATIENCE_S + self._received / PACE_BYTES_PER_S
        try:
            message = await self._in_time(self._receive(), due_s)
        except TimeoutError:
            self._too_slow = True
            raise problem(
                "too_slow", f"after {PATIENCE_S:g} s only {self._received} bytes of the body are here"
            ) from None
        self._received += len(message.get("body", b""))
        if self._received == self._size:
            message["more_body"] = False  # else the server would be asked once more, only to say so
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", []), (b"x-request-id", self.request_id.encode())]
            if not self._body_ended and not self._too_slow:
                await self._drain()
        try:
            await self._in_time(self._send(message), self._loop.time() + PATIENCE_S)
        except TimeoutError:
            self.ended = True
            raise problem("too_slow", f"nobody has read the answer for {PATIENCE_S:g} s") from None
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.ended = True

    async def _drain(self) -> None:
        drained = 0
        try:
            async with asyncio.timeout(DRAIN_S_MAX):
                while not self._body_ended and drained <= DRAIN_BYTES_MAX:
                    drained += len((await self.receive()).get("body", b""))
        except (TimeoutError, PsError):
            pass


@cache
def _series(path: str, method: str, status: int) -> tuple[Counter, Histogram]:
    """What counts such requests; looked up once, since prometheus_client's own lookup costs more than the count."""
    return REQUESTS.labels(path, method, str(status)), REQUEST_S.labels(path)


def _check_path(scope: Scope) -> None:
    """Raises RequestError (`malformed`) for a path that is not percent-encoded UTF-8.

    Servers decode such bytes to replacement characters, and then two different names would be one.
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


def _body_bytes(scope: Scope) -> int | None:
    """Length of the body; None where only its end will tell."""
    size = 0 if scope["method"] in ("GET", "HEAD") else None
    for name, value in scope["headers"]:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":
            size = int(value) if value.isdigit() else None
    return size


def _request_id(scope: Scope) -> str:
    """The client's `X-Request-Id` where it is a plain word, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text: str = value.decode("latin-1")
            if _ID.fullmatch(text):
                return text
    return f"{_PROCESS}-{next(_NUMBERS):x}"
