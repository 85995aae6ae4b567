"""HTTP/1.1: uvicorn's, with the bounds that it lacks, and without its end at an offer of another protocol.

Bounds: a head, trailers and whatever else is no body have `HEADER_BYTES_MAX`, a head has `HEAD_S` besides; what is left
of an answer when it has been written, or when the connection is closed, must be read at the pace of bodies.
"""

import asyncio
from array import array
from http import HTTPStatus
from typing import Any, Final

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from paramserver.errors import PsError, problem
from paramserver_node.http2 import HEADER_BYTES_MAX
from paramserver_node.negotiate import json_text
from paramserver_node.unread import Unread

HEAD_S: Final = 30.0
"""How long a request's head may take to arrive; the first one, from the beginning of the connection."""


def refusal(error: PsError) -> bytes:
    """The last answer of a connection, where no request is there that an app could refuse."""
    status, body = HTTPStatus(error.status), json_text(error.document())
    lines = (f"HTTP/1.1 {status} {status.phrase}", "content-type: application/problem+json", "connection: close")
    return "\r\n".join((*lines, f"content-length: {len(body)}", "", "")).encode() + body


TOO_LONG: Final = refusal(
    problem("headers_too_large", f"headers, trailers and what else is no body have {HEADER_BYTES_MAX} bytes at most")
)


class _Parser(httptools.HttpRequestParser):
    """Goes on after a head that offers another protocol, where llhttp would take the body for that protocol's."""

    def __init__(self, protocol: "Http1") -> None:
        super().__init__(protocol)
        self._protocol = protocol
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's: it answers before it closes

    def feed_data(self, data: "bytes | bytearray | memoryview | array[int]") -> None:
        """The next bytes."""
        parser, rest = self, memoryview(data)
        while rest:
            try:
                super(_Parser, parser).feed_data(rest)
                return
            except httptools.HttpParserUpgrade as e:
                if not self._protocol.offers:
                    raise
                rest, head = rest[e.args[0] :], self._protocol.head_without_offer()
                # Another one, because where the connection is to be closed this one takes nothing any more.
                parser = self._protocol.parser = _Parser(self._protocol)
                super(_Parser, parser).feed_data(head)


class Http1(HttpToolsProtocol):
    """One client's HTTP/1.1, from its first request's head on."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.parser = _Parser(self)
        self._app: ASGIApp = config.loaded_app
        self.app = self._called
        self._in_message = False
        """Whether a request has begun to arrive and is not whole."""
        self._moved = False
        """Whether what was just read has ended a head or a message, or brought some of a body."""
        self._held = 0
        """Bytes that have come since anything did so."""
        self._wrong = ""
        """What is wrong with the request, where the parser does not mind."""
        self._giving_up: asyncio.TimerHandle | None = None
        """Runs while a head is awaited."""

    # Of the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Its first request's head is here."""
        super().connection_made(transport)
        self._unread = Unread(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for."""
        super().connection_lost(exc)
        self.app = self._app  # what refers to this connection would keep it
        self._unread.close()
        if self._giving_up is not None:
            self._giving_up.cancel()

    def pause_writing(self) -> None:
        """What is left must be read in its time: the next answer's head waits for that, and nobody watches heads."""
        super().pause_writing()
        self._unread.watch()

    def resume_writing(self) -> None:
        """It has been read."""
        super().resume_writing()
        self._unread.caught_up()

    def data_received(self, data: bytes) -> None:
        """The next bytes of the client."""
        self._moved = False
        super().data_received(data)
        self._held = 0 if self._moved else self._held + len(data)
        if self._held > HEADER_BYTES_MAX and not self.transport.is_closing():
            if not self._answers:
                self.transport.write(TOO_LONG)
            self.transport.close()
        if self.transport.is_closing():
            self._unread.watch()
        elif not self._asked:
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        """What cannot be read is told in a problem document as all else, unless an answer is in its middle."""
        if not self._answers:
            self.transport.write(refusal(problem("malformed", self._wrong or msg)))
        self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        """It has rested for long enough."""
        super().timeout_keep_alive_handler()
        self._unread.watch()

    def shutdown(self) -> None:
        """No new requests; those in flight are finished."""
        super().shutdown()
        if self.transport.is_closing():
            self._unread.watch()

    # Of the parser

    @property
    def offers(self) -> bool:
        """Whether the head that has just ended offers another protocol, which a server may ignore (RFC 9110, 7.8)."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def head_without_offer(self) -> bytes:
        """The same head, for a request like any other."""
        first = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        return b"".join((first, *(b"%s: %s\r\n" % h for h in self.headers if h[0] != b"upgrade"), b"\r\n"))

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._in_message = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """There is a request, if it is not to be read again without its offer."""
        if self.offers:
            return
        codings = b",".join([value for name, value in self.headers if name == b"transfer-encoding"])
        if codings.strip().lower() not in (b"", b"chunked"):
            # The body would be taken for what it holds in that coding.
            self._wrong = f"of transfer codings only 'chunked' is understood, not {codings[:80]!r}"
            raise ValueError(self._wrong)
        self._moved = True
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of its body."""
        self._moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of it is here."""
        if self.offers:
            return
        self._moved, self._in_message = True, False
        super().on_message_complete()

    # Of the app

    async def _called(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(self._answered)
        await self._app(scope, receive, send)

    def _answered(self, _: "asyncio.Task[None]") -> None:
        if self.transport.is_closing():
            self._unread.watch()

    def on_response_complete(self) -> None:
        """All of an answer is on its way."""
        super().on_response_complete()
        if self._in_message and not self._asked and not self.transport.is_closing():
            self._await_head()

    @property
    def _asked(self) -> bool:
        """Whether a request is being answered: then its pace is watched around the app."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _answers(self) -> bool:
        """Whether an answer has begun and not ended, so that nothing else can be said."""
        return self._asked and (self.cycle.response_started or bool(self.pipeline))

    # The bounds

    def _await_head(self) -> None:
        if self._giving_up is None:
            self._giving_up = self.loop.call_later(HEAD_S, self.transport.abort)
