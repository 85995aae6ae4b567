"""Connects to a host within a time limit: to whichever of its addresses answers first."""

import os
import selectors
import socket
import threading
from concurrent.futures import Future
from typing import Any, Final, TypeAlias

from paramserver.net.calls import Deadline

CONNECT_S: Final = 3.0
"""Timeout for establishing a connection."""
_NEXT_S: Final = 0.25
"""How long an address has to answer before the next one is tried beside it, as asyncio does (RFC 8305)."""

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

    def looked_up() -> _Found:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))

    if host.replace(".", "").isdigit() or ":" in host:  # an address, which is only parsed
        return looked_up()
    found: Future[_Found] = Future()

    def ask() -> None:
        try:
            found.set_result(looked_up())
        except Exception as e:
            found.set_exception(e)

    try:
        threading.Thread(target=ask, name="paramserver look-up", daemon=True).start()
    except RuntimeError:  # the system cannot start more threads, or the interpreter is shutting down
        return looked_up()
    return found.result(timeout_s)
