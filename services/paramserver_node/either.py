"""What a new connection speaks: HTTP/2 by prior knowledge or ALPN, else HTTP/1.1.

It is handed on to either when that is clear; to HTTP/1.1 with its first request's head.  In either, who asks for
nothing is hung up on.
"""

import asyncio
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from uvicorn.config import Config
from uvicorn.server import ServerState

from paramserver.errors import problem
from paramserver.limits import CONNECTIONS_MAX
from paramserver.wire.http2 import PREFACE
from paramserver_node.http1 import HEAD_S, TOO_LONG, Http1, refusal
from paramserver_node.http2 import HEADER_BYTES_MAX, Connection

if TYPE_CHECKING:
    from paramserver_node.carrier import Carrier

SILENCE_S: Final = 60
"""After so much the kernel asks whether the other side is still there: it may be, and rest for hours ..."""
ASKED_AGAIN_S: Final = 10
ASKED_MAX: Final = 6
"""... and is gone if it has not said so by then."""
_HEAD_END: Final = b"\r\n\r\n"
_HANDSHAKE: Final = b"\x16\x03"
"""Begins a client's first record of TLS (RFC 8446, 5.1), and no method."""
_NO_TLS: Final = refusal(problem("malformed", "this node speaks HTTP without TLS: ask http://, not https://"))
"""A client takes it for a record of TLS that is none, and says so at once."""

P = TypeVar("P", bound=asyncio.BaseProtocol)


class _Http2(Connection):
    """HTTP/2 whose first request's head has its time; afterwards the connection may rest."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """That time begins."""
        super().connection_made(transport)
        self._giving_up = self.loop.call_later(HEAD_S, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for."""
        super().connection_lost(exc)
        self._giving_up.cancel()

    def _give_up(self) -> None:
        if not self._newest:
            self.shutdown()


class Either(asyncio.Protocol):
    """A connection until it is clear what it speaks."""

    alpn_protocols: ClassVar[list[str]] = ["h2", "http/1.1"]
    carrier: "ClassVar[Carrier | None]" = None
    """Of the server, if it has one."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self._config, self._server, self._state = config, server_state, app_state
        self._loop = _loop or asyncio.get_running_loop()
        self._begun = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The time for the first request begins."""
        self.transport = transport
        if len(self._server.connections) >= CONNECTIONS_MAX:
            transport.abort()
            return
        self._server.connections.add(self)  # type: ignore[arg-type]
        _keep_alive(transport.get_extra_info("socket"))
        self._giving_up = self._loop.call_later(HEAD_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has said nothing."""
        if self in self._server.connections:
            self._forget()

    def eof_received(self) -> None:
        """The client has hung up."""

    def shutdown(self) -> None:
        """Nothing is in flight."""
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        """The first bytes."""
        self._begun += data
        if self._begun.startswith(PREFACE):
            app = self._config.loaded_app
            self._become(_Http2(self._config, self._server, app, self._state, self.carrier)).feed(
                memoryview(self._begun)[len(PREFACE) :]
            )
        elif PREFACE.startswith(self._begun):
            return
        elif self._begun.startswith(_HANDSHAKE):
            self._refuse(_NO_TLS)
        elif _HEAD_END in self._begun:
            self._become(Http1(self._config, self._server, self._state, self._loop)).data_received(self._begun)
        elif len(self._begun) > HEADER_BYTES_MAX:
            self._refuse(TOO_LONG)

    def _refuse(self, answer: bytes) -> None:
        self.transport.write(answer)
        self.transport.close()

    def _forget(self) -> None:
        self._giving_up.cancel()
        self._server.connections.discard(self)

    def _become(self, spoken: P) -> P:
        self._forget()
        self.transport.set_protocol(spoken)
        spoken.connection_made(self.transport)
        return spoken


def _keep_alive(connected: socket.socket) -> None:
    """A client that vanishes does not keep its place: a resting one says nothing, so the kernel asks."""
    if connected.family == socket.AF_UNIX:
        return
    with suppress(OSError):  # it may be gone by now, which some systems do not forgive
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASKED_AGAIN_S)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, ASKED_MAX)
