"""Responses of another shard, played by a scripted server, as `PeerClient` takes and reports them."""

import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

import numpy as np
import pytest
from msgspec.structs import replace
from tests.refusals import refused_with
from tests.unit.scripted_server import Blocking, Peer, Server

from paramserver.errors import InDoubt, PsError, Unavailable, problem
from paramserver.limits import MIB
from paramserver.net.credentials import Credentials
from paramserver.types import U8, AnyArray
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


REPLY = encode_header(PullReply("m", 1, 0, 1, 1, "float32", [(0, 1, 1)]))


def answering(body: bytes) -> Callable[[Peer], None]:
    """Return a script that answers a pull with these values."""

    def script(peer: Peer) -> None:
        peer.send(wire.settings({}))
        stream = peer.until(wire.DATA, wire.END_STREAM)
        peer.send(wire.frame(wire.HEADERS, wire.END_HEADERS, stream, wire.encoded([(b":status", b"200")])))
        data = REPLY + body
        for at in range(0, len(data), MIB):
            ends = at + MIB >= len(data)
            peer.send(wire.frame(wire.DATA, wire.END_STREAM if ends else 0, stream, data[at : at + MIB]))
        close_last(peer)

    return script


@pytest.mark.parametrize("wait_s", [0.0, 5.0])
async def test_values_without_room_are_refused_before_they_take_memory(wait_s: float) -> None:
    """A pull whose values have no room fails with that error: before it is sent, or if it waits, once they come."""
    asked: list[int] = []

    def full(size_bytes: int) -> None:
        asked.append(size_bytes)
        raise problem("too_many_requests", "this client has too much in flight")

    def answer(peer: Peer) -> None:
        with suppress(ConnectionError):  # who has no room for it may hang up while it is sent
            answering(bytes(MIB))(peer)

    with Server(Blocking, answer) as server:
        pool = BufferPool()
        client = PeerClient(pool, Credentials())
        with refused_with("too_many_requests", Unavailable, "in flight"):
            url = server.url if wait_s else "http://127.0.0.1:9"
            await client.pull(url, replace(PULL, wait_s=wait_s), MIB, full)
        if not wait_s:
            await client.pull(server.url, PULL, MIB)
        await client.aclose()
    assert (asked, pool.lent_bytes) == ([MIB], 0)


class Noting(BufferPool):
    """A pool that notes which threads take memory from it."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []

    def take_bytes(self, size_bytes: int, *, shared: bool = False, after: AnyArray | None = None) -> U8:
        """Take it."""
        self.threads.append(threading.current_thread())
        return super().take_bytes(size_bytes, shared=shared, after=after)


@pytest.mark.parametrize("wait_s", [0.0, 5.0])
async def test_memory_for_large_values_is_not_made_on_the_event_loop(wait_s: float) -> None:
    """A thread makes it, or if the pull waits, it is faulted in as the values come; a GiB stopped all for a second."""
    values = np.arange(MIB, dtype=np.float32)
    pool = Noting()
    with Server(Blocking, answering(values.tobytes())) as server:
        client = PeerClient(pool, Credentials())
        reply, got = await client.pull(server.url, replace(PULL, wait_s=wait_s), values.nbytes)
        await client.aclose()
    assert reply.version == 1
    assert np.array_equal(got.view(np.float32), values)
    assert threading.main_thread() not in pool.threads
