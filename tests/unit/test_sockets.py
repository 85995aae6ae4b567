"""The loops that move large bodies between memory and a socket, on real sockets."""

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from paramserver.kernels import prebuilt, sockets
from paramserver.wire import http2 as wire

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux: elsewhere the event loop moves all bodies"
)

BODY = bytes(range(251)) * 20_000
"""5 MB: more than a socket holds."""


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection, of which the first does not block."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as theirs:
        ours, _ = listener.accept()
        with ours:
            ours.setblocking(False)
            yield ours, theirs


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the loops as a library."""
    if not all(map(shutil.which, ("cc", "nm"))):
        pytest.skip("needs a C compiler and binutils: apt install gcc libc6-dev")
    target = tmp_path_factory.mktemp("prebuilt")
    subprocess.run([sys.executable, "-m", "paramserver.kernels.build", str(target)], check=True, timeout=280)
    return target


def frames(body: bytes, size: int, stream: int = 1, *, ends: bool = True) -> bytes:
    """A body in DATA frames of that size."""
    out = b""
    for at in range(0, len(body), size):
        flags = wire.END_STREAM if ends and at + size >= len(body) else 0
        out += wire.frame(wire.DATA, flags, stream, body[at : at + size])
    return out


def places(*sizes: int) -> tuple[bytearray, list[memoryview]]:
    """Memory, cut into places of those sizes."""
    memory, cut, at = bytearray(sum(sizes)), [], 0
    for size in sizes:
        cut.append(memoryview(memory)[at : at + size])
        at += size
    return memory, cut


def both_ways(ours: socket.socket, theirs: socket.socket) -> None:
    """A body of several pieces each way, with a peer that is slower than the loops."""
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

    writer = Thread(target=theirs.sendall, args=(frames(BODY, 300_000),))
    memory, cut = places(1, 999_999, len(BODY) - 1_000_000)
    writer.start()
    got = sockets.receive(ours.fileno(), cut, 1, 0, 0, 1 << 20)
    writer.join()
    assert got == sockets.Received(len(BODY), 0, wire.END_STREAM, b"")
    assert memory == BODY
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


def test_a_body_is_moved_whole(pair: tuple[socket.socket, socket.socket]) -> None:
    """Through more places, system calls and waits than one; afterwards the socket waits for single bytes again."""
    both_ways(*pair)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_library_moves_as_the_compiler_does(
    pair: tuple[socket.socket, socket.socket], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images have the loops without numba."""
    monkeypatch.setattr(sockets, "_found", prebuilt.load(library))
    both_ways(*pair)


def test_a_peer_that_pauses_is_not_waited_for(pair: tuple[socket.socket, socket.socket]) -> None:
    """What has been moved until then counts, and the rest is still to be moved."""
    ours, theirs = pair
    sent = sockets.send(ours.fileno(), [memoryview(BODY)] * 4)
    assert 0 < sent < 4 * len(BODY)

    theirs.sendall(frames(BODY, 1 << 20)[:100_000])
    memory, cut = places(len(BODY))
    got = sockets.receive(ours.fileno(), cut, 1, 0, 0, 1 << 20)
    assert got == sockets.Received(100_000 - wire.HEAD_BYTES, (1 << 20) - got.size, 0, b"")
    assert memory[: got.size] == BODY[: got.size]


@pytest.mark.parametrize(
    "follows",
    [
        wire.head(5, wire.DATA, 0, 3),
        wire.head(5, wire.DATA, wire.PADDED, 1),
        wire.head(0, wire.DATA, 0, 1),
        wire.head((1 << 20) + 1, wire.DATA, 0, 1),
        wire.head(5, wire.HEADERS, wire.END_HEADERS, 3),
    ],
    ids=["another stream", "padding", "empty", "too long", "another frame"],
)
def test_another_frame_is_left_to_who_understands_it(pair: tuple[socket.socket, socket.socket], follows: bytes) -> None:
    """Only its head has been read, and it comes back."""
    ours, theirs = pair
    theirs.sendall(frames(BODY[:1000], 500, ends=False) + follows + b"xyz")
    memory, cut = places(2000)
    assert sockets.receive(ours.fileno(), cut, 1, 0, 0, 1 << 20) == sockets.Received(1000, 0, 0, follows)
    assert memory[:1000] == BODY[:1000]
    assert ours.recv(10) == b"xyz"


def test_the_end_of_a_body_is_the_end(pair: tuple[socket.socket, socket.socket]) -> None:
    """Though there is place for more; what comes behind it is not taken for it."""
    ours, theirs = pair
    theirs.sendall(frames(BODY[:1000], 500) + frames(b"more", 4))
    _, cut = places(2000)
    got = sockets.receive(ours.fileno(), cut, 1, 0, 0, 1 << 20)
    assert (got.size, got.due, got.flags) == (1000, 0, wire.END_STREAM)
    assert got.head + ours.recv(100) == frames(b"more", 4)


def test_a_peer_that_has_hung_up_ends_it(pair: tuple[socket.socket, socket.socket]) -> None:
    """In either direction, with what was moved before."""
    ours, theirs = pair
    theirs.sendall(frames(BODY, 1 << 20)[:1009])
    theirs.shutdown(socket.SHUT_WR)
    _, cut = places(len(BODY))
    assert sockets.receive(ours.fileno(), cut, 1, 0, 0, 1 << 20).size == 1000
    theirs.close()
    assert sockets.send(ours.fileno(), [memoryview(BODY)] * 4) < 4 * len(BODY)
