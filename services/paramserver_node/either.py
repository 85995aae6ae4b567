"""What a new connection speaks: HTTP/2 by prior knowledge or ALPN, else HTTP/1.1.

It is handed on to either when that is clear; to HTTP/1.1 with its first request's head, which has so long to arrive.
"""

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from uvicorn.config import Config
from uvicorn.server import ServerState

from paramserver.limits import CONNECTIONS_MAX
from paramserver.wire.http2 import PREFACE
from paramserver_node.http1 import HEAD_S, TOO_LONG, Http1
from paramserver_node.http2 import HEADER_BYTES_MAX, Connection

if TYPE_CHECKING:
    from paramserver_node.carrier import Carrier

_HEAD_END: Final = b"\r\n\r\n"

P = TypeVar("P", bound=asyncio.BaseProtocol)


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
            self._become(Connection(self._config, self._server, app, self._state, self.carrier)).feed(
                memoryview(self._begun)[len(PREFACE) :]
            )
        elif PREFACE.startswith(self._begun):
            return
        elif _HEAD_END in self._begun:
            self._become(Http1(self._config, self._server, self._state, self._loop)).data_received(self._begun)
        elif len(self._begun) > HEADER_BYTES_MAX:
            self.transport.write(TOO_LONG)
            self.transport.close()

    def _forget(self) -> None:
        self._giving_up.cancel()
        self._server.connections.discard(self)

    def _become(self, spoken: P) -> P:
        self._forget()
        self.transport.set_protocol(spoken)
        spoken.connection_made(self.transport)
        return spoken
