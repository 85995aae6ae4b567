"""The transport on asyncio, and so its client, belongs to one event loop at a time; on real sockets."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.unit.scripted_server import Peer, serving
from tests.waiting import eventually

from paramserver.errors import PsError
from paramserver.net.calls import Outcome, Request, Response
from paramserver.net.credentials import Credentials
from paramserver.net.direct import AsyncDirectTransport
from paramserver.wire import http2 as wire


class Shard:
    """A server that answers whatever is asked, on any number of connections."""

    def __init__(self) -> None:
        self.connections = 0
        self.open = set[Peer]()

    def __call__(self, connected: socket.socket) -> None:
        """Serve one connection until the client hangs up."""
        peer = Peer(connected)
        self.connections += 1
        self.open.add(peer)
        try:
            while True:
                peer.send(peer.answer(peer.until(wire.HEADERS), b"ok"))
        except (AssertionError, OSError):
            self.open.discard(peer)


@contextmanager
def loop_that_runs() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20.0)
        loop.close()


async def ask(transport: AsyncDirectTransport, url: str) -> Outcome:
    """Send one request."""
    return await transport.send(Request("GET", "/p", to=url), url)


def test_a_second_loop_beside_the_first_is_refused() -> None:
    """A transport whose event loop runs refuses another loop's requests, and goes on with its own connection.

    The two would drop each other's connections, and open another one for each request.
    """
    shard, transport = Shard(), AsyncDirectTransport(Credentials())
    with serving(shard) as url, loop_that_runs() as loop:
        for _ in range(3):
            own = asyncio.run_coroutine_threadsafe(ask(transport, url), loop).result(20.0)
            other = asyncio.run(ask(transport, url))
            assert isinstance(own, Response)
            assert isinstance(other, PsError)
            assert (other.code, other.detail) == ("conflict", "this client belongs to another event loop")
        assert shard.connections == 1
        asyncio.run_coroutine_threadsafe(transport.close(), loop).result(20.0)


def test_a_loop_that_connects_while_another_takes_its_place_hangs_up() -> None:
    """A connection made for a loop that stopped meanwhile, and was replaced by another, is not given to that one."""
    shard, transport = Shard(), AsyncDirectTransport(Credentials())
    with serving(shard) as url, asyncio.Runner() as first, asyncio.Runner() as second:

        async def begin() -> asyncio.Task[Outcome]:
            asking = asyncio.ensure_future(ask(transport, url))
            await asyncio.sleep(0)
            return asking

        async def end(asking: asyncio.Task[Outcome]) -> Outcome:
            return await asking

        asking = first.run(begin())
        assert isinstance(second.run(ask(transport, url)), Response)
        outcome = first.run(end(asking))
        assert isinstance(outcome, PsError)
        assert outcome.code == "unreachable"
        assert isinstance(second.run(ask(transport, url)), Response)
        eventually(lambda: len(shard.open) == 1, within_s=20.0)
        second.run(transport.close())


@pytest.mark.parametrize("rounds", [1, 5])
def test_loops_that_run_by_turns_hold_no_heap_of_connections(rounds: int) -> None:
    """A loop that is left open but does not run gives way to another one, and its connections are closed."""
    shard, transport = Shard(), AsyncDirectTransport(Credentials())
    with serving(shard) as url, asyncio.Runner() as first, asyncio.Runner() as second:
        for _ in range(rounds):
            assert isinstance(first.run(ask(transport, url)), Response)
            assert isinstance(second.run(ask(transport, url)), Response)
        first.run(asyncio.sleep(0))
        eventually(lambda: len(shard.open) == 1, within_s=20.0)
        second.run(transport.close())
