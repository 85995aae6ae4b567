"""One blocking HTTP/2 connection to a node, used by one request at a time.

A body goes from the caller's memory to the socket, an answer from the socket to its destination; nothing else is
copied, and no second thread is woken.  Compared with a general-purpose client this saves what matters here: a small
round trip costs two system calls.

A stalled node keeps its socket open.  So a node that is silent for a while is sent a ping; if that goes unanswered
too, the request fails.
"""

import socket
import ssl
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from paramserver.limits import RECEIVE_LOW_WATER_BYTES
from paramserver.net import http2
from paramserver.net.calls import Sink
from paramserver.net.http2 import Answer, Client, NotSent, broken_off
from paramserver.wire.http2 import HEAD_BYTES, PAYLOAD_BYTES_MAX, Header

T = TypeVar("T")

_READ_BYTES: Final = 256 << 10
RESTED_S = 0.1
"""A connection that was used within this time counts as open: to look takes three system calls."""
ENDED: Final = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""Errors that mean that the connection has ended."""


def cut(connected: socket.socket) -> None:
    """Shut the socket down: a thread that is using it reads end-of-file, and can no longer write."""
    with suppress(OSError):
        # Not SSLSocket.shutdown: it drops TLS first, so that a write in progress would go on unencrypted.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


class Connection:
    """An open connection.  Its methods raise OSError, also if the peer does not speak HTTP/2."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket: Final = connected
        self._gathers = type(connected) is socket.socket and hasattr(connected, "sendmsg")
        """Whether the socket supports scatter/gather I/O (`sendmsg`, `recvmsg_into`); not under TLS."""
        self._can_wait = (
            sys.platform == "linux" and type(connected) is socket.socket and connected.family != socket.AF_UNIX
        )
        """Whether SO_RCVLOWAT can delay reads until enough is there; not under TLS, where the size is unknown."""
        self._low_watermark = 1
        """Bytes that must have arrived before the next read (SO_RCVLOWAT)."""
        self._slow = False
        """Whether bytes arrive slowly: from then on, until the next request, each read takes whatever has arrived."""
        self._client = Client()
        self._read_buffer = memoryview(bytearray(_READ_BYTES))
        self._give_up_at = 0.0
        self._pinged = False
        self._used_at = 0.0
        """When its last request ended."""
        self._timeout_s = -1.0
        """The socket's current timeout, in seconds."""
        # Closes the socket of a client that was dropped without close().  Not __del__: if the client is in a reference
        # cycle, the socket may be collected first, with a ResourceWarning.
        weakref.finalize(self, connected.close).atexit = False

    @property
    def usable(self) -> bool:
        """Whether another request can be sent on this connection."""
        return self._client.usable

    def still_open(self) -> bool:
        """Process what has come since the last request; return whether another one can be sent."""
        if time.monotonic() - self._used_at < RESTED_S:
            return self.usable
        self._wait_at_most(0.0)
        try:
            while self.usable and (n := self.socket.recv_into(self._read_buffer)):
                self._client.feed(self._read_buffer[:n])
        except (BlockingIOError, ssl.SSLWantReadError):
            return self.usable
        except (OSError, ValueError):  # it has ended, or does not speak HTTP/2
            pass
        return False

    def close(self) -> None:
        """Close the socket."""
        self._client.usable = False
        self.socket.close()

    def cut(self) -> None:
        """Abort, from another thread, the request in flight; the connection takes no more requests."""
        self._client.usable = False
        cut(self.socket)

    def ask(self, headers: Sequence[Header], body: Sequence[memoryview], sink: Sink | None, timeout_s: float) -> Answer:
        """Send one request and return its answer; the body of a 200 goes to `sink`, if given.

        Raises TimeoutError after `timeout_s` or when the node is found dead (NotSent if it has not taken the whole
        body), Refused, and what the sink raises.
        """
        self._give_up_at = time.monotonic() + timeout_s
        self._wait_at_most(min(http2.SILENCE_S, timeout_s))
        self._pinged = self._slow = False
        answer, left = Answer(sink), sum(map(len, body))
        stream = self._client.start_stream(headers, answer, bodyless=not left)
        try:
            try:
                self._send(stream, answer, body, left)
            except ENDED as e:
                raise broken_off(e) from e
            while not answer.ended:
                self._read()
            if answer.failed is not None:
                raise answer.failed
        except BaseException:
            self._client.usable = False  # half a request was sent, or its answer would be taken for the next one's
            raise
        finally:
            self._used_at = time.monotonic()
            self._client.close(stream)  # an idle connection must not keep a sink alive
        return answer

    # Sending

    def _send(self, stream: int, answer: Answer, body: Sequence[memoryview], left: int) -> None:
        client, whole = self._client, left
        try:
            for piece in body:
                while piece and not answer.ended:
                    n = client.allowed(answer, len(piece))
                    if n <= 0:
                        self._flush()
                        self._read()
                        continue
                    client.start_data_frame(stream, n, ends=n == left)
                    if n < left and len(client.unsent) + n <= PAYLOAD_BYTES_MAX:
                        client.unsent += piece[:n]  # sent with what follows
                    else:
                        self._flush(piece[:n])
                    left -= n
                    piece = piece[n:]
            if client.unsent:
                self._flush()
        except TimeoutError as e:
            if not left:
                raise
            raise NotSent(whole - left, whole) from e
        if left:
            client.usable = False  # the node answered before it had the whole body

    def _flush(self, payload: memoryview | None = None) -> None:
        first, self._client.unsent = self._client.unsent, b""
        if payload is not None and len(payload) <= PAYLOAD_BYTES_MAX:
            first, payload = first + payload, None
        if payload is None or not self._gathers:
            self._send_all(memoryview(first))
        else:
            sent = self._send_some(self.socket.sendmsg, (first, payload))
            self._send_all(memoryview(first)[sent:])
            payload = payload[max(0, sent - len(first)) :]
        if payload is not None:
            self._send_all(payload)

    def _send_all(self, data: memoryview) -> None:
        while data:
            data = data[self._send_some(self.socket.send, data) :]

    def _send_some(self, send: Callable[[T], int], what: T) -> int:
        """Call `send` and return the number of bytes sent; one socket timeout is tolerated.

        Raises TimeoutError at the request's deadline, and when a second timeout follows (with a ping unanswered, at the
        first): the node has read nothing for too long.
        """
        silent = self._pinged
        while True:
            if time.monotonic() >= self._give_up_at:
                raise TimeoutError
            try:
                return send(what)
            except TimeoutError:
                if silent:
                    raise
                silent = True  # if it reads after all, it lives, as the answer to a ping would show

    # Receiving

    def _read(self) -> None:
        left_s = self._give_up_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if left_s < http2.SILENCE_S:
            self._wait_at_most(left_s)
        client = self._client
        sink_buffer = client.sink_buffer()
        try:
            self._set_low_watermark(
                1 if sink_buffer is None or self._slow else min(len(sink_buffer), RECEIVE_LOW_WATER_BYTES)
            )
            if sink_buffer is None:
                n = self.socket.recv_into(self._read_buffer)
            elif self._gathers:  # the bytes after it are the next frame's header
                n = self.socket.recvmsg_into((sink_buffer, self._read_buffer[:HEAD_BYTES]))[0]
            else:
                n = self.socket.recv_into(sink_buffer)
        except TimeoutError:
            if self._low_watermark > 1:
                self._slow = True
                return
            if self._pinged:
                raise
            self._pinged = True
            client.ping()
            self._flush()
            return
        if n == 0:
            raise ConnectionResetError("closed before it answered")
        self._pinged = False
        if sink_buffer is not None:
            in_sink = min(n, len(sink_buffer))
            client.sink_buffer_filled(sink_buffer[:in_sink])
            n -= in_sink
        if n:
            client.feed(self._read_buffer[:n])
        if client.unsent:
            self._flush()

    def _wait_at_most(self, seconds: float) -> None:
        if seconds != self._timeout_s:
            self.socket.settimeout(seconds)
            self._timeout_s = seconds

    def _set_low_watermark(self, size: int) -> None:
        """Have the next read wait for `size` bytes (SO_RCVLOWAT).

        They will come: a DATA frame that has begun is within the flow-control window.
        """
        if size != self._low_watermark and self._can_wait:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            self._low_watermark = size
