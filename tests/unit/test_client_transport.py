"""How a client performs its requests: concurrently, not after it was closed, and at a scheduler that answers."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import paramserver as ps
from paramserver.client.calls import Request, Response
from paramserver.client.credentials import NO_CREDENTIALS
from paramserver.client.transport import BlockingTransport

THREADS = 40


class Node(ThreadingHTTPServer):
    """A server that answers `/livez` at once, and other requests once `2 * THREADS` of them have arrived."""

    daemon_threads = True
    request_queue_size = 4 * THREADS

    def __init__(self) -> None:
        self.together = threading.Barrier(2 * THREADS)
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    """Handles one connection."""

    protocol_version = "HTTP/1.1"
    server: Node

    def do_GET(self) -> None:
        """Answer one request."""
        if self.path != "/livez":
            try:
                self.server.together.wait(10.0)
            except threading.BrokenBarrierError:
                self.close_connection = True
                return
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def node() -> Iterator[Node]:
    """A running node on a free port."""
    with Node() as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def test_a_waiting_request_is_in_no_other_threads_way(node: Node) -> None:
    """Many threads have all their requests in flight at once while none of them is answered."""
    transport = BlockingTransport((node.url,), NO_CREDENTIALS)
    outcomes: list[object] = []

    def ask() -> None:
        outcomes.extend(transport.perform([Request("GET", "/first"), Request("GET", "/second")]))

    threads = [threading.Thread(target=ask) for _ in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    transport.close()

    assert [o.status for o in outcomes if isinstance(o, Response)] == [200] * 2 * THREADS


def test_a_closed_client_says_so_at_once(node: Node) -> None:
    """A closed client raises ConflictError without retrying, and may be closed again."""
    client = ps.connect(node.url, timeout=3.0)
    client.close()

    with pytest.raises(ps.ConflictError, match=r"this client is closed \(make another with ps\.connect\(\)\)"):
        client.models()
    outcomes = client.transport.perform([Request("GET", "/livez"), Request("GET", "/livez")])
    assert [type(o) for o in outcomes] == [ps.ConflictError] * 2
    client.close()


def test_a_closed_client_on_asyncio_says_so_at_once(node: Node) -> None:
    """A closed asyncio client raises ConflictError without retrying, and may be closed again."""

    async def main() -> None:
        client = ps.AsyncClient(node.url, timeout=3.0)
        await client.request("GET", "/livez")
        await client.close()
        with pytest.raises(ps.ConflictError, match="this client is closed"):
            await client.models()
        await client.close()

    asyncio.run(main())


def test_a_client_that_was_closed_before_its_first_call_is_closed(node: Node) -> None:
    """A client that was closed before its first call refuses that call, blocking or on asyncio."""
    request = [Request("GET", "/livez")]
    blocking = BlockingTransport((node.url,), NO_CREDENTIALS)
    blocking.close()
    (outcome,) = blocking.perform(request)
    assert isinstance(outcome, ps.ConflictError)

    async def main() -> None:
        async with ps.AsyncClient(node.url) as client:
            pass
        with pytest.raises(ps.ConflictError, match="this client is closed"):
            await client.models()

    asyncio.run(main())


def test_a_silent_scheduler_does_not_hide_the_one_that_answers(node: Node) -> None:
    """If a scheduler does not answer, `connect` tries the next one, with which later requests begin."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with ps.connect(f"{url},{node.url}", timeout=0.5) as client:
            assert client.request("GET", "/livez") == {}
        with pytest.raises(ps.Unreachable, match="did not answer within"):
            ps.connect(url, timeout=0.2)
