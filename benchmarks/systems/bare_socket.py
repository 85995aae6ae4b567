"""The floor of TCP: the same bytes over plain local TCP connections, and one pass that applies them.

The server has a thread for each worker; the GIL is released while bytes are transferred and applied.
"""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection

import numba
import numpy as np
from benchmarks.meters import memory_bytes
from benchmarks.systems.process import attend_each, serving, wait_for_end
from benchmarks.systems.system import Running
from benchmarks.workloads import Parts, Work

from paramserver.types import F32

PULL, PUSH, APPLIED = b"r", b"w", b"k"


@numba.njit(nogil=True, cache=True)
def descend(values: F32, gradient: F32, rate: np.float32) -> None:
    """Compute values -= rate*gradient in one pass."""
    for i in range(values.size):
        values[i] -= rate * gradient[i]


def serve(work: Work, pipe: Connection) -> None:
    """Run the server until the pipe is closed."""
    descend(np.zeros(2, np.float32), np.zeros(2, np.float32), np.float32(0))
    pipe.send(memory_bytes([os.getpid()], "VmRSS"))
    values, lock = work.initial(), threading.Lock()
    listener = socket.create_server(("127.0.0.1", 0))

    attend_each(listener, partial(attend, values=values, lock=lock, work=work))
    pipe.send(listener.getsockname())
    wait_for_end(pipe)


def attend(connection: socket.socket, values: F32, lock: threading.Lock, work: Work) -> None:
    """Serve one worker until it disconnects."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    gradient, rate = np.zeros(work.elements, np.float32), np.float32(work.rate)
    while verb := connection.recv(1):
        if verb == PULL:
            connection.sendall(values.data.cast("B"))
            continue
        receive(connection, gradient)
        with lock:
            descend(values, gradient, rate)
        connection.sendall(APPLIED)


def receive(connection: socket.socket, into: F32) -> None:
    """Receive a whole array; raises ConnectionError if the connection ends early."""
    left = into.data.cast("B")
    while left:
        got = connection.recv_into(left)
        if got == 0:
            raise ConnectionError("the other side hung up")
        left = left[got:]


class SocketClient:
    """A client with one connection."""

    fused, pairs = False, 1

    def __init__(self, work: Work, rank: int, address: tuple[str, int]) -> None:
        self._connection = socket.create_connection(address)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._values = np.zeros(work.elements, np.float32)

    def pull(self) -> Parts:
        self._connection.sendall(PULL)
        receive(self._connection, self._values)
        return [self._values]

    def push(self, gradient: F32) -> None:
        body = gradient.data.cast("B")
        if len(body) < 1 << 16:  # one packet instead of two
            self._connection.sendall(PUSH + body)
        else:
            self._connection.sendall(PUSH)
            self._connection.sendall(body)
        if self._connection.recv(1) != APPLIED:
            raise ConnectionError("the other side hung up")

    def exchange(self, gradient: F32) -> Parts:
        raise NotImplementedError("the floor has no synchronous mode")

    def close(self) -> None:
        self._connection.close()


class BareSocket:
    """The TCP floor as a system; async only, one server."""

    key, label = "socket", "bare TCP loop"

    def missing(self) -> str:
        return ""

    @contextmanager
    def start(self, work: Work) -> Iterator[Running]:
        """See `System.start`."""
        with serving(serve, work) as (pid, answers):
            base = int(answers.next())
            yield Running([pid], base, partial(SocketClient, address=answers.next()))
