"""Connects to a host: to whichever of its addresses answers first."""

import asyncio
import os
import selectors
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeAlias, TypeVar

from paramserver.net.calls import Deadline

P = TypeVar("P", bound=asyncio.BaseProtocol)

CONNECT_S: Final = 3.0
"""Timeout for establishing a connection."""
_NEXT_S: Final = 0.25
"""How long an address has to answer before the next one is tried beside it (RFC 8305)."""

_Found: TypeAlias = list[tuple[int, int, int, str, Any]]
"""What `socket.getaddrinfo` returns."""


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Return a connection whose own timeout is the time left of `timeout_s`, for a handshake that may follow.

    Raises TimeoutError, or the system's error for the address that refused last.
    """
    deadline = Deadline.after(timeout_s)
    failure = OSError(f"{host} has no address")
    with selectors.DefaultSelector() as trying:  # before the look-up, which does not say that it lacks a file
        untried = _look_up(host, port, timeout_s)
        try:
            while untried or trying.get_map():
                if untried:
                    try:
                        trying.register(begun := _begun(*untried.pop(0)), selectors.EVENT_WRITE, begun)
                    except OSError as e:
                        failure = e
                        continue
                if not (left_s := deadline.left_s()):
                    raise TimeoutError
                for key, _ in trying.select(min(_NEXT_S, left_s) if untried else left_s):
                    connected: socket.socket = key.data
                    error = connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    trying.unregister(connected)
                    if not error:
                        connected.settimeout(deadline.attempt_s())
                        return connected
                    connected.close()
                    failure = OSError(error, os.strerror(error))
            raise failure
        finally:
            for key in trying.get_map().values():
                key.data.close()


async def connect_on_loop(make: Callable[[], P], host: str, port: int, context: ssl.SSLContext | None) -> P:
    """Return the protocol, made by `make`, of a connection on the running event loop; with a context, over TLS.

    Raises the error of the address that failed last.  uvloop's `create_connection` would try one after the other, and
    a silent one would take the time of all.
    """
    socket.socket().close()  # before the look-up, which does not say that it lacks a file
    if _is_address(host):
        found = _found(host, port)
    else:
        found = list(await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM))
    first = await _first_of(found, make, host, context)
    if not isinstance(first, BaseException):
        return first
    try:
        raise first
    finally:
        del first  # its traceback refers to this frame, and to those of the callers with their memory


async def _first_of(
    untried: _Found, make: Callable[[], P], host: str, context: ssl.SSLContext | None
) -> P | BaseException:
    """Return the protocol of the address that answers first, or the error of the last one."""
    create, name = asyncio.get_running_loop().create_connection, host if context else None
    failure: BaseException = OSError(f"{host} has no address")
    trying = set[asyncio.Task[tuple[asyncio.Transport, P]]]()
    try:
        while untried or trying:
            if untried:
                address: Any = untried.pop(0)[4]
                zone = f"%{address[3]}" if len(address) > 2 and address[3] else ""  # of an IPv6 address of one link
                attempt = create(make, address[0] + zone, address[1], ssl=context, server_hostname=name)
                trying.add(asyncio.create_task(attempt))
            wait_s = _NEXT_S if untried else None
            for task in (await asyncio.wait(trying, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED))[0]:
                trying.remove(task)
                if (error := task.exception()) is None:
                    return task.result()[1]
                failure = error
        return failure
    finally:
        for task in trying:
            if not task.cancel() and task.exception() is None:  # it was no later than the first
                task.result()[0].abort()


def _begun(family: int, kind: int, protocol: int, _: str, address: Any) -> socket.socket:
    """Return a socket that is connecting."""
    connecting = socket.socket(family, kind, protocol)
    connecting.setblocking(False)
    try:
        connecting.connect(address)
    except BlockingIOError:
        pass
    except OSError:
        connecting.close()
        raise
    return connecting


def _look_up(host: str, port: int, timeout_s: float) -> _Found:
    """Return the addresses of a host, in the order in which to try them.

    The system's call has no time limit, and takes up to a minute if the name servers are silent: a thread makes it.
    Raises TimeoutError, or what the system's call does.
    """
    if _is_address(host):
        return _found(host, port)
    found: Future[_Found] = Future()

    def ask() -> None:
        try:
            found.set_result(_found(host, port))
        except Exception as e:
            found.set_exception(e)

    try:
        threading.Thread(target=ask, name="paramserver look-up", daemon=True).start()
    except RuntimeError:  # the system cannot start more threads, or the interpreter is shutting down
        return _found(host, port)
    return found.result(timeout_s)


def _is_address(host: str) -> bool:
    """Whether the host is an address, which is only parsed."""
    return host.replace(".", "").isdigit() or ":" in host


def _found(host: str, port: int) -> _Found:
    return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
