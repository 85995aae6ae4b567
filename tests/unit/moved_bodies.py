"""Transfers of bodies by the loops of `paramserver.kernels.sockets`, over a real connection."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

from tests.unit.http2_connection import frames_of

from paramserver.kernels import sockets
from paramserver.wire import http2 as wire

BODY = bytes(range(251)) * 20_000
"""5 MB: more than the socket buffers hold."""


@contextmanager
def connected_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield the two ends of a TCP connection; the first is non-blocking."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as theirs:
        ours, _ = listener.accept()
        with ours:
            ours.setblocking(False)
            yield ours, theirs


def places(*sizes: int) -> tuple[bytearray, list[memoryview]]:
    """Return memory, and consecutive views of it with these sizes."""
    memory, cut, at = bytearray(sum(sizes)), [], 0
    for size in sizes:
        cut.append(memoryview(memory)[at : at + size])
        at += size
    return memory, cut


def both_ways(ours: socket.socket, theirs: socket.socket) -> None:
    """Transfer and check a body of several pieces in each direction, with a peer that is slower than the loops."""
    received = bytearray()

    def read() -> None:
        while len(received) < len(BODY):
            received.extend(theirs.recv(100_000))

    reader = Thread(target=read)
    reader.start()
    pieces = [memoryview(BODY)[:3], memoryview(b""), memoryview(BODY)[3:1_000_000], memoryview(BODY)[1_000_000:]]
    assert sockets.send(ours.fileno(), pieces) == len(BODY)
    reader.join()
    assert received == BODY

    writer = Thread(target=theirs.sendall, args=(frames_of(1, BODY, 300_000),))
    memory, cut = places(1, 999_999, len(BODY) - 1_000_000)
    writer.start()
    got = sockets.receive(ours.fileno(), cut, 1, 0, 0, 1 << 20)
    writer.join()
    assert got == sockets.Received(len(BODY), 0, wire.END_STREAM, b"")
    assert memory == BODY
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
