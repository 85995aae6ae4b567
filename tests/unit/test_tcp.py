"""Socket options of TCP connections that carry bodies."""

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paramserver.limits import RECEIVE_LOW_WATER_BYTES, SEND_BUFFER_BYTES
from paramserver.wire import tcp


@contextmanager
def connected(own: str) -> Iterator[socket.socket]:
    """Yield a connection to 127.0.0.1 from that source address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname(), source_address=(own, 0)) as client:
            peer, _ = listener.accept()
            with peer:
                yield client


def send_buffer(s: socket.socket) -> int:
    return s.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def test_to_the_same_machine_the_send_buffer_is_small() -> None:
    """To its own address, a connection gets a small send buffer, but above the low-water mark, and TCP_NODELAY."""
    with connected("127.0.0.1") as client:
        tcp.prepare(client)
        assert RECEIVE_LOW_WATER_BYTES < send_buffer(client) <= 2 * SEND_BUFFER_BYTES
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux answers on all of 127.0.0.0/8")
def test_to_another_address_the_kernel_finds_the_size() -> None:
    """To another address, a connection gets TCP_NODELAY, and the kernel sizes the send buffer."""
    with connected("127.0.0.2") as client:
        before = send_buffer(client)
        tcp.prepare(client)
        assert send_buffer(client) == before
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_unix_socket_is_left_alone() -> None:
    """The send buffer of a Unix socket is not changed."""
    one, other = socket.socketpair()
    with one, other:
        before = send_buffer(one)
        tcp.prepare(one)
        assert send_buffer(one) == before


def test_a_peer_that_is_gone_is_no_matter() -> None:
    """A socket without a peer is no error, because the next read from it reports that."""
    with socket.socket() as alone:
        tcp.prepare(alone)
