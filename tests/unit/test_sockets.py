"""The loops that move large bodies between memory and a socket, on real sockets."""

import socket
import sys
from collections.abc import Iterator

import pytest
from tests.unit.http2_connection import frames_of
from tests.unit.moved_bodies import BODY, both_ways, connected_pair, places

from paramserver.kernels import sockets
from paramserver.wire import http2 as wire

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux: elsewhere the event loop moves all bodies"
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of `connected_pair`."""
    with connected_pair() as ends:
        yield ends


def test_a_body_is_moved_whole(pair: tuple[socket.socket, socket.socket]) -> None:
    """A body of several pieces, system calls and waits is moved whole, and SO_RCVLOWAT is 1 again afterwards."""
    both_ways(*pair)


def test_a_peer_that_pauses_is_not_waited_for(pair: tuple[socket.socket, socket.socket]) -> None:
    """When the peer pauses, the loops return with what has been moved so far instead of waiting."""
    ours, theirs = pair
    sent = sockets.send(ours.fileno(), [memoryview(BODY)] * 4)
    assert 0 < sent < 4 * len(BODY)

    theirs.sendall(frames_of(1, BODY, 1 << 20)[:100_000])
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
    """A frame that the loop does not handle ends it: its head is returned, and its payload stays unread."""
    ours, theirs = pair
    theirs.sendall(frames_of(1, BODY[:1000], 500, ends=False) + follows + b"xyz")
    memory, cut = places(2000)
    assert sockets.receive(ours.fileno(), cut, 1, 0, 0, 1 << 20) == sockets.Received(1000, 0, 0, follows)
    assert memory[:1000] == BODY[:1000]
    assert ours.recv(10) == b"xyz"


def test_the_end_of_a_body_is_the_end(pair: tuple[socket.socket, socket.socket]) -> None:
    """END_STREAM ends a body even if there is room for more, and what follows is not taken for part of it."""
    ours, theirs = pair
    theirs.sendall(frames_of(1, BODY[:1000], 500) + frames_of(1, b"more", 4))
    _, cut = places(2000)
    got = sockets.receive(ours.fileno(), cut, 1, 0, 0, 1 << 20)
    assert (got.size, got.due, got.flags) == (1000, 0, wire.END_STREAM)
    assert got.head + ours.recv(100) == frames_of(1, b"more", 4)


def test_a_peer_that_has_hung_up_ends_it(pair: tuple[socket.socket, socket.socket]) -> None:
    """When the peer has hung up, both loops end and return the number of bytes moved before."""
    ours, theirs = pair
    theirs.sendall(frames_of(1, BODY, 1 << 20)[:1009])
    theirs.shutdown(socket.SHUT_WR)
    _, cut = places(len(BODY))
    assert sockets.receive(ours.fileno(), cut, 1, 0, 0, 1 << 20).size == 1000
    theirs.close()
    assert sockets.send(ours.fileno(), [memoryview(BODY)] * 4) < 4 * len(BODY)
