"""HTTP/1.1: uvicorn's protocol, with the limits it lacks, and not stopped by offers of another protocol (`Upgrade`).

Limits: of the requests that come before the responses to earlier ones, `WAITING_MAX` may wait; if more come, these are
answered, and the connection is closed.  A head, trailers and everything else that is not body may have
`HEADER_BYTES_MAX` bytes, and a head must arrive within `HEAD_S`.  What is unread of a response once it is written, or
when the connection is closed, must be read at the pace required of bodies (see `read_deadline`).
"""

import asyncio
import sys
from array import array
from http import HTTPStatus
from typing import Any, Final

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from paramserver.errors import PsError, problem
from paramserver_node.http2 import HEADER_BYTES_MAX
from paramserver_node.negotiate import json_text
from paramserver_node.read_deadline import ReadDeadline

HEAD_S: Final = 30.0
"""Time within which a request's head must arrive; for the first one, from the start of the connection."""
WAITING_MAX: Final = 64
"""Pipelined requests that may wait for their turn in a connection; of tiny ones, one read contains thousands."""


def refusal(error: PsError) -> bytes:
    """Return the last response of a connection, for an error without a request that an app could answer."""
    status, body = HTTPStatus(error.status), json_text(error.document())
    lines = (f"HTTP/1.1 {status} {status.phrase}", "content-type: application/problem+json", "connection: close")
    return "\r\n".join((*lines, f"content-length: {len(body)}", "", "")).encode() + body


def _too_long() -> PsError:
    return problem(
        "headers_too_large",
        f"the request line, headers, trailers and other data outside the body are limited to {HEADER_BYTES_MAX} bytes",
        hint="send long names and lists in a body, as POST /pull takes them",
    )


TOO_LONG: Final = refusal(_too_long())


def _without_chunks(send: Send) -> Send:
    """Return `send` for an HTTP/1.0 client, to which a response ends with the connection.

    uvicorn would send one of unknown length chunked, as it does to any client.
    """
    cycle: Any = send.__self__  # type: ignore[attr-defined]

    async def unframed(message: Message) -> None:
        cycle.chunked_encoding = False
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return unframed


class _Parser(httptools.HttpRequestParser):
    """A parser that continues after a head with `Upgrade`; llhttp would take the body for the other protocol's data."""

    def __init__(self, protocol: "Http1") -> None:
        super().__init__(protocol)
        self._protocol = protocol

    def feed_data(self, data: "bytes | bytearray | memoryview | array[int]") -> None:
        """Parse the next bytes."""
        parser, rest = self, memoryview(data)
        while rest:
            try:
                super(_Parser, parser).feed_data(rest)
                return
            except httptools.HttpParserUpgrade as e:
                if not self._protocol.offers_upgrade:
                    raise
                rest, head = rest[e.args[0] :], self._protocol.head_without_upgrade()
                # A new parser, as this one takes no more data if the head also has `Connection: close`.
                parser = self._protocol.parser = _Parser(self._protocol)
                super(_Parser, parser).feed_data(head)


class Http1(HttpToolsProtocol):
    """One client's HTTP/1.1 connection, from the complete head of its first request on."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self.parser = _Parser(self)
        self._app: ASGIApp = config.loaded_app
        self.app = self._run_app
        self._in_message = self._in_head = False
        """Whether a request, or its head, has begun to arrive and is not complete."""
        self._running: Any = None
        """uvicorn's object of the request that the app is answering, or has answered last."""
        self._progressed = False
        """Whether the last read made progress: completed a head or a message, or contained some of a body."""
        self._bytes_without_progress = 0
        """Bytes read since the last progress."""
        self._head_timer: asyncio.TimerHandle | None = None
        """Timer that runs while a head is awaited."""

    # Transport callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take over the connection, whose first head has arrived."""
        super().connection_made(transport)
        self._read_deadline = ReadDeadline(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers, and tell the app; uvicorn tells only the newest request, which may wait its turn."""
        super().connection_lost(exc)
        self._tell_gone()
        self.app = self._app  # the bound method `_run_app` would keep this connection alive
        self._read_deadline.close()
        if self._head_timer is not None:
            self._head_timer.cancel()

    def pause_writing(self) -> None:
        """Start the deadline for unread data: the next response's head waits for it, without a deadline of its own."""
        super().pause_writing()
        self._read_deadline.start()

    def resume_writing(self) -> None:
        """Cancel that deadline: the client has caught up."""
        super().resume_writing()
        self._read_deadline.cancel()

    def data_received(self, data: bytes) -> None:
        """Process the next bytes from the client, and check the limits."""
        self._progressed = False
        super().data_received(data)
        self._bytes_without_progress = 0 if self._progressed else self._bytes_without_progress + len(data)
        if self._bytes_without_progress > HEADER_BYTES_MAX and not self.transport.is_closing():
            self._refuse(TOO_LONG)
        if self.transport.is_closing():
            self._read_deadline.start()
        elif not self._answering:
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that the parser, or one of the callbacks below, does not accept."""
        error = sys.exc_info()[1]
        if isinstance(error, httptools.HttpParserCallbackError):
            error = error.__context__
        if not isinstance(error, PsError):
            why = error if isinstance(error, httptools.HttpParserError) else "the request target has no path"
            error = problem("malformed", f"this is not valid HTTP/1.1: {why}")
        self._refuse(refusal(error))

    def _refuse(self, answer: bytes) -> None:
        """Refuse what has just arrived, and close the connection.

        Complete requests before it are answered first, as this would be taken for their answer.  If a request's own
        body is at fault while its response is in progress, nothing more can be said.
        """
        if self._answering and not self.cycle.more_body:
            self.cycle.keep_alive = False
            self.flow.pause_reading()
            return
        if not self._response_pending:
            self.transport.write(answer)
        self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, which has been idle for too long."""
        super().timeout_keep_alive_handler()
        self._read_deadline.start()

    def shutdown(self) -> None:
        """Take no new requests; those in flight are finished."""
        super().shutdown()
        if self.transport.is_closing():
            self._read_deadline.start()

    # Parser callbacks

    @property
    def offers_upgrade(self) -> bool:
        """Whether the head just parsed offers another protocol, which a server may ignore (RFC 9110, 7.8)."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def head_without_upgrade(self) -> bytes:
        """Return the same head without the offer, as of an ordinary request."""
        first = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        return b"".join((first, *(b"%s: %s\r\n" % h for h in self.headers if h[0] != b"upgrade"), b"\r\n"))

    def on_message_begin(self) -> None:
        """Note that a request has begun."""
        self._in_message = self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; a trailer is ignored, as it must not count as one (RFC 9110, 6.5.1)."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin the request, unless its head is to be parsed again without its offer."""
        if self.offers_upgrade:
            return
        if len(self.pipeline) == WAITING_MAX:
            raise problem("too_many_requests", "too many pipelined requests")  # not sent: those that wait are answered
        self._check_head()
        self._progressed, self._in_head = True, False
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # such a client knows no interim answers (RFC 9110, 10.1.1)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def _check_head(self) -> None:
        """Check what the parser does not.  Raises RequestError (`headers_too_large`, `malformed`)."""
        size, hosts, codings = len(self.url), 0, []
        for name, value in self.headers:
            size += len(name) + len(value) + 4
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding":
                codings.append(value)
        if size > HEADER_BYTES_MAX:
            raise _too_long()
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            raise problem("malformed", f"a request needs one Host header (RFC 9112, 3.2), this one has {hosts}")
        coding = b",".join(codings)
        if coding.strip().lower() not in (b"", b"chunked"):
            # Otherwise the still encoded body would be taken for its content.
            text = coding[:80].decode("latin-1")
            raise problem("malformed", f"only the transfer coding 'chunked' is supported, not {text!r}")

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._progressed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the request is complete."""
        if self.offers_upgrade:
            return
        self._progressed, self._in_message = True, False
        super().on_message_complete()

    # The app

    async def _run_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._running = send.__self__  # type: ignore[attr-defined]
        if self.transport.is_closing():
            self._tell_gone()
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(self._app_done)
        await self._app(scope, receive, send if scope["http_version"] == "1.1" else _without_chunks(send))

    def _tell_gone(self) -> None:
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
            self._running = None

    def _app_done(self, _: "asyncio.Task[None]") -> None:
        if self.transport.is_closing():
            self._read_deadline.start()

    def on_response_complete(self) -> None:
        """Continue after a complete response; start the timer if the next head has begun to arrive."""
        super().on_response_complete()
        if self._in_message and not self._answering and not self.transport.is_closing():
            self._await_head()

    @property
    def _answering(self) -> bool:
        """Whether a request is being answered: then the middleware around the app enforces its pace."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _response_pending(self) -> bool:
        """Whether a response is in progress or another request waits for its turn, so that no error can be written."""
        return self._answering and (self.cycle.response_started or bool(self.pipeline))

    # Limits

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self.transport.abort)
