"""One blocking HTTP/2 connection to a shard, used by one request at a time.

A body goes from the caller's memory into the socket, an answer from the socket to where it is wanted; nothing else is
copied, and no second thread is woken.  Against a general client that saves what counts here: a small round trip costs
two system calls.

A shard that stands still keeps its socket open.  So one that is silent for a while is sent a ping; if nothing comes
of it either, its answer is waited for no longer.
"""

import socket
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from paramserver.client import http2
from paramserver.client.calls import Sink
from paramserver.client.http2 import Answer, Client
from paramserver.limits import WAITED_BYTES
from paramserver.wire.http2 import HEAD_BYTES, PAYLOAD_BYTES_MAX, Header

T = TypeVar("T")

_READ_BYTES: Final = 256 << 10


def cut(connected: socket.socket) -> None:
    """Whoever uses it in another thread reads its end, and can write no more."""
    with suppress(OSError):
        # Not the method of TLS: it ends the encryption first, and what is being written would go on without.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


class Connection:
    """An open connection.  Raises OSError, also for what is no HTTP/2."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket: Final = connected
        self._gathers = type(connected) is socket.socket and hasattr(connected, "sendmsg")
        """Whether it takes several pieces at once; under TLS it does not."""
        self._can_wait = (
            sys.platform == "linux" and type(connected) is socket.socket and connected.family != socket.AF_UNIX
        )
        """Whether the kernel takes more than a byte for too little; under TLS nobody knows how much it is."""
        self._awaited = 1
        """How many bytes must be here before they are read."""
        self._slow = False
        """Whether they came far between, so that each counts."""
        self._client = Client()
        self._room = memoryview(bytearray(_READ_BYTES))
        self._give_up_at = 0.0
        self._pinged = False
        self._waits_s = -1.0
        """The socket's timeout."""
        # Of a client that was dropped, not closed, nothing is left open.  No __del__: if the client is in a cycle, the
        # socket may be collected first, and complain.
        weakref.finalize(self, connected.close).atexit = False

    @property
    def usable(self) -> bool:
        """Whether another request can be sent on it."""
        return self._client.usable

    def close(self) -> None:
        """Hang up."""
        self._client.usable = False
        self.socket.close()

    def cut(self) -> None:
        """End, from another thread, what is being asked; nothing is asked on it again."""
        self._client.usable = False
        cut(self.socket)

    def ask(self, headers: Sequence[Header], body: Sequence[memoryview], sink: Sink | None, timeout_s: float) -> Answer:
        """Sends one request and gives its answer, whose body goes to `sink` if it is a 200.

        Raises TimeoutError after `timeout_s` or when the shard is dead, Refused, and what the sink raises.
        """
        self._give_up_at = time.monotonic() + timeout_s
        self._wait_at_most(min(http2.SILENCE_S, timeout_s))
        self._pinged = self._slow = False
        answer, left = Answer(sink), sum(map(len, body))
        stream = self._client.begin(headers, answer, bodyless=not left)
        try:
            self._send(stream, answer, body, left)
            while not answer.ended:
                self._read()
            if answer.failed is not None:
                raise answer.failed
        except BaseException:
            self._client.usable = False  # half a request, or an answer that would be taken for the next one's
            raise
        finally:
            self._client.close(stream)  # an idle connection keeps nobody's sink alive
        return answer

    # What goes

    def _send(self, stream: int, answer: Answer, body: Sequence[memoryview], left: int) -> None:
        client = self._client
        for piece in body:
            while piece and not answer.ended:
                n = client.allowed(answer, len(piece))
                if n <= 0:
                    self._flush()
                    self._read()
                    continue
                left -= n
                client.body(stream, n, ends=not left)
                if left and len(client.unsent) + n <= PAYLOAD_BYTES_MAX:
                    client.unsent += piece[:n]  # it goes with what follows
                else:
                    self._flush(piece[:n])
                piece = piece[n:]
        if client.unsent:
            self._flush()
        if left:
            client.usable = False  # it has answered before it has heard all

    def _flush(self, payload: memoryview | None = None) -> None:
        first, self._client.unsent = self._client.unsent, b""
        if payload is not None and len(payload) <= PAYLOAD_BYTES_MAX:
            first, payload = first + payload, None
        if payload is None or not self._gathers:
            self._all(memoryview(first))
        else:
            sent = self._patiently(self.socket.sendmsg, (first, payload))
            self._all(memoryview(first)[sent:])
            payload = payload[max(0, sent - len(first)) :]
        if payload is not None:
            self._all(payload)

    def _all(self, data: memoryview) -> None:
        while data:
            data = data[self._patiently(self.socket.send, data) :]

    def _patiently(self, send: Callable[[T], int], what: T) -> int:
        """How much was sent; raises TimeoutError at the request's end, or when the shard has read nothing for long."""
        silent = self._pinged
        while True:
            try:
                return send(what)
            except TimeoutError:
                if silent or time.monotonic() >= self._give_up_at:
                    raise
                silent = True  # what it reads after all says that it lives, as a ping would

    # What comes

    def _read(self) -> None:
        left_s = self._give_up_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if left_s < http2.SILENCE_S:
            self._wait_at_most(left_s)
        client = self._client
        place = client.place()
        try:
            self._await(1 if place is None or self._slow else min(len(place), WAITED_BYTES))
            if place is None:
                n = self.socket.recv_into(self._room)
            elif self._gathers:  # what follows it is another frame's head
                n = self.socket.recvmsg_into((place, self._room[:HEAD_BYTES]))[0]
            else:
                n = self.socket.recv_into(place)
        except TimeoutError:
            if self._awaited > 1:
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
        if place is not None:
            there = min(n, len(place))
            client.filled(place[:there])
            n -= there
        if n:
            client.feed(self._room[:n])
        if client.unsent:
            self._flush()

    def _wait_at_most(self, seconds: float) -> None:
        if seconds != self._waits_s:
            self.socket.settimeout(seconds)
            self._waits_s = seconds

    def _await(self, size: int) -> None:
        """So many bytes must be here before any are read; they will be: a frame that has begun has its window."""
        if size != self._awaited and self._can_wait:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            self._awaited = size
