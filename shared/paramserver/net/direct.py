"""Requests over connections of our own: HTTP/2 on TCP, TLS or a Unix socket; see `connection` and `aio_connection`.

If a kept connection has ended, its request is sent again on another one, unless the node may have carried it out and
it changes something: then it is in doubt, which the caller has to know, whatever a second attempt would be answered.
"""

import asyncio
import errno
import os
import socket
import ssl
import struct
import time
from collections import defaultdict
from functools import cached_property, lru_cache
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from paramserver.errors import InDoubt, PsError, problem
from paramserver.net.aio_connection import AsyncConnection
from paramserver.net.calls import Deadline, Outcome, Request, Response, TakenTooSlowly
from paramserver.net.concurrent_requests import Interruptible, using_memory
from paramserver.net.connect import CONNECT_S, connect, connect_on_loop
from paramserver.net.connection import ENDED, Connection
from paramserver.net.credentials import Credentials
from paramserver.net.http2 import Answer, NotSent, Refused
from paramserver.net.idle import Idle
from paramserver.net.proxies import is_here, proxy_of
from paramserver.wire import tcp
from paramserver.wire.http2 import Header

SCHEME: Final = "unix://"
_BROKEN: Final = (*ENDED, Refused)
"""Errors that mean that the connection has ended, or takes no more requests."""
_CHANGES_NOTHING: Final = ("/pull", "/slots")
"""Paths of POST requests that may be executed twice or for nothing; an unused slot expires."""
_CLOSED: Final = "this client is closed"
_ANOTHER_LOOPS: Final = "this client belongs to another event loop"


class NotHttp2(InDoubt):
    """The outcome of a request whose answer was not HTTP/2."""


def path_of(address: str) -> str:
    """Return the file system path of a `unix://` address."""
    return unquote(address.removeprefix(SCHEME))


def _check_owner(connected: Any) -> None:
    """Raise OSError unless a process of this user listens on the Unix socket at the other end.

    Another one may wait at the path of a shard that runs elsewhere, for the token and to be taken for the shard.
    """
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        raise OSError("this system does not tell whose socket it is")
    _, uid, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, option, 12))
    if uid != os.geteuid():
        raise OSError("the socket belongs to another user")


def unreachable(url: str, reason: str, *, shard: bool = False) -> PsError:
    """Return the error for a URL where no node answers, or one whose certificate is not trusted.

    `shard`: it is the address of one of a cluster that is up.
    """
    if "certificate" in reason:
        hint = "set ca= or PARAMSERVER_CA to a PEM file of the trusted authorities"
        return problem("unreachable", f"{url} is not trusted ({reason})", hint=hint)
    if shard:
        return problem("unreachable", f"cannot reach the shard at {url} ({reason})")
    if is_here(url):
        return problem("unreachable", f"cannot reach {url} ({reason}): is a cluster up? 'psctl up' starts one")
    hint = "does a node listen there, with --host, and does a firewall let it through?"
    if (proxy := proxy_of(url)) is not None:
        at = f"{proxy.scheme}://{proxy.netloc.rpartition('@')[2]}"
        hint = f"the environment names the proxy {at} for it; a host that NO_PROXY lists is reached without"
    return problem("unreachable", f"cannot reach {url} ({reason})", hint=hint)


def changes_nothing(request: Request) -> bool:
    """Whether the request may be executed twice, or for nothing."""
    return request.method == "GET" or request.path in _CHANGES_NOTHING


def _may_repeat(request: Request, error: OSError) -> bool:
    """Whether a request that a kept connection ended with this error may be sent again on another one."""
    return isinstance(error, Refused) or changes_nothing(request)


def common_headers(credentials: Credentials) -> dict[str, str]:
    """Return the headers that every request carries."""
    return {"user-agent": "paramserver-python", **credentials.headers}


class _RequestEncoder:
    """The encoding of requests, common to both transports."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._common = [(name.encode(), value.encode()) for name, value in common_headers(credentials).items()]

    @cached_property
    def _context(self) -> ssl.SSLContext:
        context = self._credentials.context()
        # Nodes prefer the first.  Without the second, a front that does not speak the first ends the handshake.
        context.set_alpn_protocols(["h2", "http/1.1"])
        return context

    def _body(self, request: Request) -> list[memoryview]:
        return [memoryview(piece).cast("B") for piece in (request.body or b"", *request.rest)]

    def _headers(self, request: Request, address: str, body: list[memoryview]) -> list[Header]:
        target, own = _encoded(request.method, address, request.path, tuple(request.headers.items()))
        headers, size = [*target, *self._common, *own], sum(map(len, body))
        if size or request.method not in ("GET", "HEAD", "DELETE"):
            headers.append((b"content-length", b"%d" % size))
        return headers


def _response(answer: Answer, address: str) -> Response:
    return Response(answer.status, answer.headers, bytes(answer.body), address)


def _failure(error: Exception, request: Request, address: str) -> PsError:
    """Return the outcome of a request that `error` ended; it is in doubt unless it was certainly not executed."""
    if isinstance(error, PsError):
        return error  # raised by the sink
    if isinstance(error, Refused):
        return problem("unavailable", f"{address} takes no requests at the moment ({error})", retry_after_s=0.0)
    if isinstance(error, NotSent):
        return taken_too_slowly(request, address, f": {error}")
    if isinstance(error, TimeoutError):
        return problem("in_doubt", f"{address} did not answer within {request.timeout_s:.3g} s")
    if isinstance(error, _BROKEN) or getattr(error, "errno", None) is not None:  # the system's
        return problem("in_doubt", f"the connection to {address} broke before it answered ({error})")
    return NotHttp2("in_doubt", f"{address} did not answer in HTTP ({error})")


def taken_too_slowly(request: Request, address: str, more: str = "") -> PsError:
    """Return the outcome of a request that was not sent whole in its time: nobody executes a part of one."""
    detail = f"{address} did not take the whole request within {request.timeout_s:.3g} s{more}"
    return TakenTooSlowly("unavailable", detail, hint="again, with a longer timeout=", retry_after_s=0.0)


def too_many_files(error: Exception) -> PsError | None:
    """Return the error if this process, or its machine, could open no more files: no node is at fault; else None."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        who, hint = "process", "raise its limit, which ulimit -n shows"
    elif number == errno.ENFILE:
        who, hint = "machine", "raise its limit, which sysctl fs.file-max shows"
    else:
        return None
    return problem("unavailable", f"this {who} has too many open files", hint=hint, retry_after_s=0.0)


def unreachable_by(error: Exception, address: str, *, shard: bool = False) -> PsError:
    """Return the error for an address that could not be connected to; `shard` as in `unreachable`."""
    if (too_many := too_many_files(error)) is not None:
        return too_many
    if isinstance(error, TimeoutError):
        reason = "timed out"
    elif isinstance(error, ConnectionRefusedError):
        reason = "connection refused"  # asyncio's strerror tells of its own connect call instead
    else:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return unreachable(address, reason.lower(), shard=shard)


class DirectTransport(_RequestEncoder):
    """The blocking transport: one request at a time per connection; safe to share between threads, and after a fork."""

    def __init__(self, credentials: Credentials) -> None:
        super().__init__(credentials)
        self._idle = Idle(Connection.still_open)

    def send(self, request: Request, address: str, within: Interruptible | None = None) -> Outcome:
        """Send one request to the node at that address, and return the outcome.

        Raises CallerInterrupted if the call that it belongs to (`within`) has been interrupted.
        """
        deadline = Deadline(time.monotonic() + request.timeout_s)
        connection = self._idle.take(address)
        if connection is not None:
            try:
                return self._attempt(connection, request, address, request.timeout_s, within)
            except _BROKEN as e:
                if not _may_repeat(request, e):
                    self._idle.drop(address)  # if the node has died, later requests would find them ended one by one
                    return _failure(e, request, address)
            if not deadline.left_s():
                return _failure(TimeoutError(), request, address)
        self._forget_closed()
        try:
            connection = Connection(self._connected(address, min(CONNECT_S, request.connect_s, deadline.attempt_s())))
        except OSError as e:
            self._idle.drop(address)
            return unreachable_by(e, address, shard=request.to is not None)
        if not deadline.left_s():
            connection.close()
            return unreachable_by(TimeoutError(), address, shard=request.to is not None)
        try:
            return self._attempt(connection, request, address, deadline.attempt_s(), within)
        except _BROKEN as e:
            return _failure(e, request, address)

    def _attempt(
        self, connection: Connection, request: Request, address: str, timeout_s: float, within: Interruptible | None
    ) -> Outcome:
        """Return the outcome on that connection; raises an error of `_BROKEN` if the connection has ended."""
        body = self._body(request)
        try:
            with using_memory(within, connection.cut):
                answer = connection.ask(self._headers(request, address, body), body, request.sink, timeout_s)
        except BaseException as e:
            connection.close()
            if isinstance(e, TimeoutError):
                self._idle.drop(address)  # if the network has lost them, later requests would time out one by one
            if isinstance(e, (PsError, OSError, ValueError)) and not isinstance(e, _BROKEN):
                return _failure(e, request, address)
            raise
        if connection.usable:
            self._idle.keep(address, connection)
        else:
            connection.close()
        return _response(answer, address)

    def _connected(self, address: str, timeout_s: float) -> socket.socket:
        if address.startswith(SCHEME):
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connected.settimeout(timeout_s)
                connected.connect(path_of(address))
                _check_owner(connected)
            except OSError:
                connected.close()
                raise
            return connected
        host, port, secure = _host(address)
        connected = connect(host, port, timeout_s)
        tcp.prepare(connected)
        if not secure:
            return connected
        try:
            return self._context.wrap_socket(connected, server_hostname=host)
        except OSError:
            connected.close()
            raise

    def _forget_closed(self) -> None:
        """Close idle connections that have ended: to addresses that are gone no later request would find them so."""
        for address in self._idle.addresses():
            if (kept := self._idle.take(address)) is not None:
                self._idle.keep(address, kept)

    def close(self) -> None:
        """Close the idle connections; one in use is closed once its answer has arrived."""
        self._idle.close()


class AsyncDirectTransport(_RequestEncoder):
    """The transport for an event loop, one at a time: many concurrent requests per connection."""

    def __init__(self, credentials: Credentials) -> None:
        super().__init__(credentials)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections = defaultdict[str, list[AsyncConnection]](list)
        self._connecting = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._closed = False

    async def send(self, request: Request, address: str) -> Outcome:
        """Send one request to the node at that address, and return the outcome."""
        if not self._belongs_to(asyncio.get_running_loop()):
            return problem("conflict", _ANOTHER_LOOPS, hint="make a client for each")
        deadline = Deadline(time.monotonic() + request.timeout_s)
        body = self._body(request)
        headers = self._headers(request, address, body)
        kept = self._kept(address)
        if kept is not None and kept.rested:  # it may have been closed while the event loop was busy: read that first
            for _ in range(2):
                await asyncio.sleep(0)
            kept = self._kept(address)
        if kept is not None:
            try:
                return _response(await kept.ask(headers, body, request.sink, request.timeout_s), address)
            except _BROKEN as e:
                if not _may_repeat(request, e):
                    return _failure(e, request, address)
            except (PsError, OSError, ValueError) as e:
                return _failure(e, request, address)
            if not deadline.left_s():
                return _failure(TimeoutError(), request, address)
        try:
            another = await self._another(address, kept, min(CONNECT_S, request.connect_s, deadline.attempt_s()))
        except OSError as e:
            return unreachable_by(e, address, shard=request.to is not None)
        try:
            return _response(await another.ask(headers, body, request.sink, deadline.attempt_s()), address)
        except (PsError, OSError, ValueError) as e:
            return _failure(e, request, address)

    def _belongs_to(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether this is the loop of the transport, which it becomes if the one before has ended or stopped."""
        before = self._loop
        if loop is before:
            return True
        if before is not None and before.is_running():  # in another thread, or around this one
            return False
        self._loop = loop
        if before is not None and not before.is_closed():
            for connection in [c for some in self._connections.values() for c in some]:
                connection.hang_up()
        self._connections.clear()
        self._connecting.clear()
        return True

    def _check_in_use(self) -> None:
        """Raise OSError if the transport was closed, or given to another loop, since a request began."""
        if self._closed:
            raise OSError(_CLOSED)
        if self._loop is not asyncio.get_running_loop():
            raise OSError(_ANOTHER_LOOPS)

    def _kept(self, address: str, tried: AsyncConnection | None = None) -> AsyncConnection | None:
        """Return a connection, other than `tried`, that takes another request; None if there is none."""
        return next((c for c in self._connections[address] if c.usable and not c.full and c is not tried), None)

    async def _another(self, address: str, tried: AsyncConnection | None, timeout_s: float) -> AsyncConnection:
        """Return a fresh connection, or one that another task has made meanwhile."""
        async with asyncio.timeout(timeout_s), self._connecting[address]:
            self._check_in_use()
            if (kept := self._kept(address, tried)) is not None:
                return kept
            connection = await self._connected(address)
            try:
                self._check_in_use()
            except OSError:  # nobody else would close it
                connection.hang_up()
                raise
            self._forget_closed()
            self._connections[address] = [connection, *(c for c in self._connections[address] if not c.is_closed)]
            return connection

    def _forget_closed(self) -> None:
        """Drop the entries of addresses without an open or pending connection."""
        for address in [a for a, some in self._connections.items() if all(c.is_closed for c in some)]:
            del self._connections[address]
        for address in [a for a, lock in self._connecting.items() if not lock.locked()]:
            if address not in self._connections:
                del self._connecting[address]

    async def _connected(self, address: str) -> AsyncConnection:
        if address.startswith(SCHEME):
            loop = asyncio.get_running_loop()
            transport, connection = await loop.create_unix_connection(AsyncConnection, path_of(address))
            try:
                _check_owner(transport.get_extra_info("socket"))
            except OSError:
                connection.hang_up()
                raise
            return connection
        host, port, secure = _host(address)
        return await connect_on_loop(AsyncConnection, host, port, self._context if secure else None)

    def close_rested(self) -> None:
        """Close the connections that have been idle: a network that has lost one may have lost all."""
        for connection in [c for some in self._connections.values() for c in some if c.rested]:
            connection.hang_up()

    async def close(self) -> None:
        """Close all connections; the transport cannot be used afterwards."""
        self._closed = True
        connections = [c for some in self._connections.values() for c in some]
        self._connections.clear()
        if self._loop is not asyncio.get_running_loop():
            return
        for connection in connections:
            connection.hang_up()
        for connection in connections:
            await connection.closed()


def _host(address: str) -> tuple[str, int, bool]:
    """Return the host and port of an address, and whether it uses TLS."""
    parts = urlsplit(address)
    secure = parts.scheme == "https"
    return parts.hostname or "", parts.port or (443 if secure else 80), secure


@lru_cache(maxsize=256)
def _encoded(
    method: str, address: str, path: str, own: tuple[tuple[str, str], ...]
) -> tuple[tuple[Header, ...], tuple[Header, ...]]:
    """Return the encoded pseudo-headers of a request, and its own headers, encoded."""
    authority, prefix = ("localhost", "") if address.startswith(SCHEME) else urlsplit(address)[1:3]
    target = (
        (b":method", method.encode()),
        (b":scheme", b"https" if address.startswith("https:") else b"http"),
        (b":authority", authority.encode()),
        (b":path", (prefix + path).encode()),
    )
    return target, tuple([(name.lower().encode(), value.encode("latin-1")) for name, value in own])
