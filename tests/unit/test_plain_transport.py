"""The transport of forked children: requests on a kept connection that the node closes."""

import socket
from typing import Any

import pytest
from tests.unit.scripted_server import serving

from paramserver.client import control
from paramserver.client.calls import Deadline, Request, Response
from paramserver.client.credentials import NO_CREDENTIALS
from paramserver.client.plain import PlainTransport
from paramserver.errors import InDoubt

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
RUN = b"POST /runs"


class Node:
    """A server that answers one request per connection, reads a second one and closes the connection."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    def __call__(self, connected: socket.socket) -> None:
        """Serve one connection."""
        self.heard.append(connected.recv(65536).split(b" HTTP")[0])
        connected.sendall(OK)
        if said := connected.recv(65536):
            self.heard.append(said.split(b" HTTP")[0])


def asked(transport: PlainTransport, url: str, call: Any) -> Any:
    """Return the result of a call whose requests this transport sends."""
    requests = next(call)
    try:
        while True:
            requests = call.send([transport.send(r, url) for r in requests])
    except StopIteration as stop:
        return stop.value


def test_what_may_have_been_done_is_not_sent_again() -> None:
    """If a kept connection breaks, a request that may have created a run raises InDoubt and is not sent again."""
    node, transport = Node(), PlainTransport(NO_CREDENTIALS)
    with serving(node) as url:
        transport.send(Request("GET", "/livez"), url)
        with pytest.raises(InDoubt, match="broke before it answered"):
            asked(transport, url, control.post_unrepeatable("/runs", {}, Deadline.after(5.0)))
        transport.close()
    assert node.heard == [b"GET /livez", RUN]


def test_what_changes_nothing_is_sent_again() -> None:
    """If a kept connection breaks, a GET is sent again at once on another connection."""
    node, transport = Node(), PlainTransport(NO_CREDENTIALS)
    with serving(node) as url:
        outcomes = [transport.send(Request("GET", path), url) for path in ("/a", "/b")]
        transport.close()
    assert [o.status for o in outcomes if isinstance(o, Response)] == [200, 200]
    assert node.heard == [b"GET /a", b"GET /b", b"GET /b"]


def test_a_connection_that_the_node_has_closed_is_not_used_again() -> None:
    """If the node has closed a kept connection, a request that must not be repeated is sent once, on another one."""
    heard: list[bytes] = []

    def serve(connected: socket.socket) -> None:
        heard.append(connected.recv(65536).split(b" HTTP")[0])
        connected.sendall(OK)

    transport = PlainTransport(NO_CREDENTIALS)
    with serving(serve) as url:
        transport.send(Request("GET", "/livez"), url)
        (kept,) = transport._idle[url]
        assert kept.sock is not None
        kept.sock.recv(1, socket.MSG_PEEK)  # returns once the node has closed the connection
        assert asked(transport, url, control.post_unrepeatable("/runs", {}, Deadline.after(5.0))) == {}
        transport.close()
    assert heard == [b"GET /livez", RUN]
