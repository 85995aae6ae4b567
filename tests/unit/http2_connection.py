"""A real HTTP/2 connection: the server's `Connection`, and a plain socket as its client, in one process."""

import asyncio
import math
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import pytest
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from paramserver.kernels import sockets
from paramserver.wire import http2 as wire
from paramserver_node.http2 import Connection
from paramserver_node.transfer_threads import TransferThreads

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: elsewhere no threads move bodies")
WAYS = [pytest.param(False, id="loop"), pytest.param(True, id="threads", marks=LINUX)]
"""Values of `threads` for `connected`: whether the event loop or transfer threads move large bodies."""
BODY_BYTES = 3 << 20
ASKED = wire.encoded([(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/")])


class Into:
    """A sink of two parts.  Counts the bytes read directly into them; raises ValueError beyond `refuses_at` bytes."""

    def __init__(self, refuses_at: int = -1) -> None:
        self.memory = bytearray(BODY_BYTES)
        self.at = self.direct = 0
        self._refuses_at = refuses_at

    def room(self) -> memoryview:
        """Return the unfilled memory of the first part; once that is full, of the second."""
        return memoryview(self.memory)[self.at : 1_000_000 if self.at < 1_000_000 else BODY_BYTES]

    def rest(self) -> list[memoryview]:
        """Return all unfilled memory."""
        return [memoryview(self.memory)[self.at :]]

    def filled(self, size: int) -> None:
        """Note that `size` bytes were written into the memory."""
        self.direct += size
        self._took(size)

    def feed(self, data: memoryview) -> None:
        """Copy `data` into the memory."""
        self.memory[self.at : self.at + len(data)] = data
        self._took(len(data))

    def _took(self, size: int) -> None:
        self.at += size
        if 0 <= self._refuses_at < self.at:
            raise ValueError("no more of it")


@asynccontextmanager
async def connected(app: ASGIApp, *, threads: bool = False) -> AsyncIterator[tuple[socket.socket, Connection]]:
    """Yield the client's socket, which has sent its settings, and the server's `Connection`, which calls `app`."""
    if threads:
        sockets.warm_up()  # as a shard does before it joins: no body's time runs while they compile
    transfer_threads = TransferThreads() if threads else None
    loop, config = asyncio.get_running_loop(), Config(app, log_config=None)
    config.load()
    made: dict[str, Any] = {}
    always = patch("paramserver_node.transfer_threads.ALTERNATION_S", math.inf)  # threads for every request
    with always, socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as theirs:
        theirs.setblocking(False)
        await loop.sock_connect(theirs, listener.getsockname())
        ours, _ = listener.accept()
        transport, connection = await loop.create_connection(
            lambda: Connection(config, ServerState(), made, transfer_threads), sock=ours
        )
        await loop.sock_sendall(theirs, wire.settings({}))
        yield theirs, connection
        transport.abort()
        while connection._running or connection._lent.reads or connection._lent.writes:
            await asyncio.sleep(0)
    if transfer_threads is not None:
        transfer_threads.close()


def frames_of(stream: int, body: bytes, frame_bytes: int, *, ends: bool = True) -> bytes:
    """Return a request body as DATA frames of `frame_bytes` each; with `ends`, the last one has END_STREAM."""
    sent = []
    for at in range(0, len(body), frame_bytes):
        flags = wire.END_STREAM if ends and at + frame_bytes >= len(body) else 0
        sent.append(wire.frame(wire.DATA, flags, stream, body[at : at + frame_bytes]))
    return b"".join(sent)


async def tell(theirs: socket.socket, data: bytes) -> None:
    """Send these bytes as the client."""
    await asyncio.get_running_loop().sock_sendall(theirs, data)
