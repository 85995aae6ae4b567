"""Unreadable responses of another shard, played by a scripted server, as `PeerClient` reports them."""

import pytest
from tests.unit.scripted_server import Blocking, Peer, Server

from paramserver.client.credentials import NO_CREDENTIALS
from paramserver.errors import InDoubt, PsError, Unavailable
from paramserver.wire import http2 as wire
from paramserver.wire.frame import PullFrame, PullReply, PushFrame, PushPart, PushReply
from paramserver_shard.buffers import BufferPool
from paramserver_shard.peers import PeerClient

PUSH, PULL = PushFrame("m", [PushPart(0, None, None)], forwarded=True), PullFrame([(0, None)], model="m")


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

    async def outcome(header: PushFrame | PullFrame, of: type[PushReply] | type[PullReply]) -> PsError:
        with Server(Blocking, script) as server:
            with pytest.raises(PsError) as raised:
                await PeerClient(BufferPool(), NO_CREDENTIALS).call(server.url, header, [], of)
            return raised.value

    assert isinstance(await outcome(PUSH, PushReply), InDoubt)
    assert isinstance(error := await outcome(PULL, PullReply), Unavailable)
    assert error.code == "unavailable"
