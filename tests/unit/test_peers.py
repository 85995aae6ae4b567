"""Unreadable responses of another shard, played by a scripted server, as `PeerClient` reports them."""

from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from tests.refusals import refused_with
from tests.unit.scripted_server import Blocking, Peer, Server

from paramserver.errors import InDoubt, PsError, Unavailable
from paramserver.net.credentials import Credentials
from paramserver.wire import http2 as wire
from paramserver.wire.frame import PullFrame, PullReply, PushFrame, PushPart, encode_header
from paramserver_shard.buffers import BufferPool
from paramserver_shard.peers import PeerClient

PUSH, PULL = PushFrame("m", [PushPart(0, None, None)], forwarded=True), PullFrame([(0, None)], model="m")


def close_last(peer: Peer) -> None:
    """Wait until the client has hung up: a close before all that it sent is read would break its connection."""
    with suppress(OSError):
        while peer.socket.recv(65536):
            pass


@pytest.mark.parametrize(
    ("length", "body"),
    [(b"0", b""), (b"4", b"what"), (b"24", b"neither a frame nor JSON"), (b"many", b"what")],
    ids=["nothing", "less than a prefix", "no frame", "a length that is no number"],
)
async def test_an_unreadable_answer_is_no_fault_of_the_client(length: bytes, body: bytes) -> None:
    """After an unreadable response a push is in doubt, because it may have been applied, and a pull is unavailable."""

    def script(peer: Peer) -> None:
        peer.send(wire.settings({}))
        stream = peer.until(wire.DATA, wire.END_STREAM)
        head = wire.encoded([(b":status", b"200"), (b"content-length", length)])
        ends = 0 if body else wire.END_STREAM
        peer.send(wire.frame(wire.HEADERS, wire.END_HEADERS | ends, stream, head))
        if body:
            peer.send(wire.frame(wire.DATA, wire.END_STREAM, stream, body))
        close_last(peer)

    async def outcome(call: Callable[[PeerClient, str], Awaitable[object]]) -> PsError:
        with Server(Blocking, script) as server:
            client = PeerClient(BufferPool(), Credentials())
            with pytest.raises(PsError) as raised:
                await call(client, server.url)
            await client.aclose()
            return raised.value

    assert isinstance(await outcome(lambda c, url: c.push(url, "/push", PUSH, [])), InDoubt)
    assert isinstance(error := await outcome(lambda c, url: c.pull(url, PULL, 4)), Unavailable)
    assert error.code == "unavailable"


@pytest.mark.parametrize(
    ("status", "size_bytes", "why"),
    [(200, 8, "more than"), (200, 16, "before it was complete"), (202, 12, "HTTP 202")],
)
async def test_values_have_the_size_that_was_asked_for(status: int, size_bytes: int, why: str) -> None:
    """An answer to a pull that has more or fewer values than were asked for is unavailable, like one without any."""
    body = encode_header(PullReply("m", 1, 0, 1, 1, "float32", [(0, 1, 1)])) + bytes(12)

    def script(peer: Peer) -> None:
        peer.send(wire.settings({}))
        stream = peer.until(wire.DATA, wire.END_STREAM)
        head = wire.encoded([(b":status", b"%d" % status)])
        peer.send(wire.frame(wire.HEADERS, wire.END_HEADERS, stream, head))
        peer.send(wire.frame(wire.DATA, wire.END_STREAM, stream, body))
        close_last(peer)

    with Server(Blocking, script) as server:
        client = PeerClient(BufferPool(), Credentials())
        with refused_with("unavailable", Unavailable, why):
            await client.pull(server.url, PULL, size_bytes)
        await client.aclose()
