"""How a client performs its requests: concurrently, not after it was closed, and at a scheduler that answers."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeAlias

import pytest

import paramserver as ps
from paramserver.client.cluster import Cluster
from paramserver.errors import problem
from paramserver.net.addresses import Addresses
from paramserver.net.calls import Call, Outcome, Pause, Request, Response
from paramserver.net.credentials import Credentials
from paramserver.net.transport import AsyncTransport, BlockingTransport, Protocols, _to_given
from paramserver.wire import http2 as wire

from .scripted_server import Peer, serving
from .sharding import Now

THREADS = 40


class Node(ThreadingHTTPServer):
    """A server that answers `/wait` once `2 * THREADS` of such requests have arrived, and all others at once."""

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
        if self.path == "/wait":
            try:
                self.server.together.wait(10.0)
            except threading.BrokenBarrierError:
                self.close_connection = True
                return
        if self.path == "/cut":
            self.close_connection = True
            return
        if self.path == "/token":
            self.answer(200, self.headers.get("authorization", "").encode())
        elif self.path == "/gone":
            self.answer(410, b"it is gone", Where="elsewhere")
        elif self.path == "/page/livez":
            self.answer(404, b'{"code":"not_found"}', **{"content-type": "application/problem+json"})
        elif self.path == "/catch-all/livez":
            self.answer(200, b"<html>Welcome</html>", **{"content-type": "text/html"})
        elif self.path == "/elsewhere":
            self.answer(307, b"", location="/livez")
        else:
            self.answer(200, b"{}")

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        """Send an answer."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """Answer a request with its body."""
        self.answer(200, self.rfile.read(int(self.headers["content-length"])))

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
    transport = BlockingTransport((node.url,), Credentials())
    outcomes: list[object] = []

    def ask() -> None:
        outcomes.extend(transport.perform([Request("GET", "/wait"), Request("GET", "/wait")]))

    threads = [threading.Thread(target=ask) for _ in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    transport.close()

    assert [o.status for o in outcomes if isinstance(o, Response)] == [200] * 2 * THREADS


Perform: TypeAlias = Callable[[Sequence[Request], Credentials], list[Outcome]]


def blocking(url: str, requests: Sequence[Request], credentials: Credentials) -> list[Outcome]:
    """Return the outcomes of these requests to the URL."""
    transport = BlockingTransport((url,), credentials)
    try:
        return transport.perform(requests)
    finally:
        transport.close()


def on_asyncio(url: str, requests: Sequence[Request], credentials: Credentials) -> list[Outcome]:
    """Return the outcomes of these requests to the URL."""

    async def main() -> list[Outcome]:
        transport = AsyncTransport((url,), credentials)
        try:
            return await transport.perform(requests)
        finally:
            await transport.close()

    return asyncio.run(main())


@pytest.fixture(params=[blocking, on_asyncio])
def perform(request: pytest.FixtureRequest, node: Node) -> Perform:
    """Performs requests to the node, blocking or on asyncio."""
    way = request.param
    return lambda requests, credentials: way(node.url, requests, credentials)


def test_each_request_has_its_own_outcome(node: Node, perform: Perform) -> None:
    """The outcomes of several requests are in their order, errors among answers; names of headers are lower case."""
    paths = ("/gone", "/cut", "/livez", "/elsewhere")
    gone, cut, alive, elsewhere = perform([Request("GET", path) for path in paths], Credentials())

    assert isinstance(gone, Response)
    assert (gone.status, gone.body, gone.headers["where"], gone.url) == (410, b"it is gone", "elsewhere", node.url)
    assert isinstance(cut, ps.InDoubt)
    assert cut.detail == f"the connection to {node.url} broke before it answered"
    assert isinstance(alive, Response)
    assert (alive.status, alive.body) == (200, b"{}")
    assert isinstance(elsewhere, Response)
    assert (elsewhere.status, elsewhere.headers["location"]) == (307, "/livez")


def test_a_body_is_sent_whole_and_the_token_with_it(perform: Perform) -> None:
    """A body in several pieces is sent as one; a client with a token sends it with each request."""
    request = Request("POST", "/echo", b"a", {"content-type": "x/y"}, rest=[memoryview(b"bc"), memoryview(b"d")])
    (echo,) = perform([request], Credentials())
    (token,) = perform([Request("GET", "/token")], Credentials("secret"))

    assert isinstance(echo, Response)
    assert isinstance(token, Response)
    assert (echo.body, token.body) == (b"abcd", b"Bearer secret")


class Kept:
    """A sink that keeps a body, and refuses one of more than 1,000 bytes."""

    def __init__(self) -> None:
        self.body, self.ended = b"from an earlier attempt", False

    def begin(self) -> None:
        """Start a body."""
        self.body = b""

    def feed(self, data: memoryview) -> None:
        """Take bytes."""
        self.body += data
        if len(self.body) > 1000:
            raise problem("too_large", "more than 1,000 bytes")

    def end(self) -> None:
        """End the body."""
        self.ended = True

    def room(self) -> memoryview:
        """Return no memory."""
        return memoryview(b"")

    def filled(self, size: int) -> None:
        """Take nothing."""


def test_only_the_body_of_a_success_goes_into_a_sink(perform: Perform) -> None:
    """A sink gets the body of a 200 answer; that of any other is in the answer, and a sink's refusal is the outcome."""
    kept, unused, full, cut = Kept(), Kept(), Kept(), Kept()
    good, gone, refused, lost = perform(
        [
            Request("POST", "/echo", b"abc", sink=kept),
            Request("GET", "/gone", sink=unused),
            Request("POST", "/echo", bytes(1001), sink=full),
            Request("GET", "/cut", sink=cut),
        ],
        Credentials(),
    )

    assert isinstance(good, Response)
    assert (good.status, good.body, kept.body, kept.ended) == (200, b"", b"abc", True)
    assert isinstance(gone, Response)
    assert (gone.status, gone.body, unused.body) == (410, b"it is gone", b"from an earlier attempt")
    assert isinstance(refused, ps.RequestError)
    assert (refused.detail, full.ended) == ("more than 1,000 bytes", False)
    assert isinstance(lost, ps.InDoubt)
    assert not cut.ended


def test_the_url_of_a_page_is_no_cluster(node: Node) -> None:
    """`connect` refuses a URL with a path that the node does not have, and names the URL without it."""
    with pytest.raises(ps.RequestError, match=f"'{node.url}/page' is not the URL of a cluster") as refused:
        ps.connect(f"{node.url}/page")
    assert refused.value.hint == f"without its path: {node.url}"


def test_a_page_for_every_path_is_no_cluster(node: Node) -> None:
    """`connect` refuses a URL that answers with a page what a node answers in JSON."""
    with pytest.raises(ps.RequestError, match="Welcome") as refused:
        ps.connect(f"{node.url}/catch-all")
    assert (refused.value.code, refused.value.members["foreign"]) == ("malformed", 200)


@pytest.mark.parametrize("page_first", [True, False])
def test_a_node_is_believed_before_a_stranger(page_first: bool) -> None:
    """Of two URLs, one at a node that knows no leader and one at a page, the node's answer is the outcome."""
    waits = Response(503, {"content-type": "application/problem+json"}, b'{"code":"no_leader"}')
    answers, urls, now = [waits, Response(404, {}, b"<html>")], ["http://a:1", "http://b:1"], Now()
    protocols = Protocols(now)
    for url in urls:
        protocols.learn(url, Response(200, {}), in_time=True)
    sending = _to_given(Addresses(urls), protocols, Request("GET", "/models/m"))
    next(sending)
    first, second = reversed(answers) if page_first else answers
    sending.send(first)
    with pytest.raises(StopIteration) as done:
        sending.send(second)
    assert done.value.value is waits


def test_a_closed_transport_has_hung_up_on_shards() -> None:
    """Closing a transport, blocking or on asyncio, closes its connections to shards, even while it is still held."""
    over = threading.Semaphore(0)

    def serve(connected: socket.socket) -> None:
        peer = Peer(connected)
        peer.send(wire.settings({}))
        peer.send(peer.answer(peer.until(wire.HEADERS), b"{}"))
        while connected.recv(65536):
            pass
        over.release()

    with serving(serve) as url:
        request = [Request("GET", "/livez", to=url)]
        transport = BlockingTransport((url,), Credentials())
        (outcome,) = transport.perform(request)
        assert isinstance(outcome, Response)
        transport.close()
        assert over.acquire(timeout=30.0)

        async def main() -> None:
            transport = AsyncTransport((url,), Credentials())
            (outcome,) = await transport.perform(request)
            assert isinstance(outcome, Response)
            await transport.close()
            assert await asyncio.to_thread(over.acquire, timeout=30.0)

        asyncio.run(main())


def test_a_request_in_flight_is_not_sent_again_by_a_closed_transport() -> None:
    """Requests that the close of a transport on asyncio cuts off end, without another connection."""
    both, connections = threading.Semaphore(0), list[Peer]()

    def serve(connected: socket.socket) -> None:
        connections.append(peer := Peer(connected))
        peer.send(wire.settings({}))
        peer.send(peer.answer(peer.until(wire.HEADERS), b"{}"))
        if len(connections) > 1:
            return
        for _ in range(2):
            peer.until(wire.HEADERS)
        both.release()
        while connected.recv(65536):
            pass

    async def main(url: str) -> list[list[Outcome]]:
        transport = AsyncTransport((url,), Credentials())
        request = Request("POST", "/pull", b"x", to=url)
        await transport.perform([request])
        asking = [asyncio.ensure_future(transport.perform([request])) for _ in range(2)]
        assert await asyncio.to_thread(both.acquire, timeout=30.0)
        await transport.close()
        return await asyncio.gather(*asking)

    with serving(serve) as url:
        outcomes = asyncio.run(main(url))
    assert [str(o).partition(" (")[2][:21] for (o,) in outcomes] == ["this client is closed"] * 2
    assert len(connections) == 1


def test_a_connection_that_is_made_while_its_transport_is_closed_is_closed() -> None:
    """A transport on asyncio that is closed while it connects to a shard hangs up once it has connected."""
    over = threading.Semaphore(0)

    def serve(connected: socket.socket) -> None:
        assert not connected.recv(1)
        over.release()

    async def main(url: str) -> None:
        transport = AsyncTransport((url,), Credentials())
        asking = asyncio.ensure_future(transport.perform([Request("GET", "/livez", to=url, timeout_s=5.0)]))
        await asyncio.sleep(0)
        await transport.close()
        (outcome,) = await asking
        assert isinstance(outcome, ps.Unreachable)
        assert await asyncio.to_thread(over.acquire, timeout=30.0)

    with serving(serve) as url:
        asyncio.run(main(url))


def test_a_closed_transport_tries_no_other_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that a scheduler refuses after its transport on asyncio was closed is not sent to the next one."""
    begun, closed = threading.Semaphore(0), threading.Semaphore(0)

    def serve(connected: socket.socket) -> None:
        assert connected.recv(65536)
        begun.release()
        assert closed.acquire(timeout=30.0)
        body = b'{"code":"no_leader"}'
        head = b"HTTP/1.1 503 -\r\ncontent-type: application/problem+json\r\ncontent-length: %d\r\n\r\n"
        connected.sendall(head % len(body) + body)

    async def main() -> None:
        transport = AsyncTransport(("http://a.test", "http://b.test"), Credentials())
        asking = asyncio.ensure_future(transport.perform([Request("GET", "/models")]))
        assert await asyncio.to_thread(begun.acquire, timeout=30.0)
        await transport.close()
        closed.release()
        (outcome,) = await asking
        assert isinstance(outcome, ps.ConflictError)

    with serving(serve) as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        asyncio.run(main())


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


def test_a_client_whose_close_is_interrupted_is_closed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C while shards take back what they lent leaves no client open, blocking or on asyncio."""

    def interrupted(_: Cluster) -> Call[None]:
        yield Pause(0.0)
        raise KeyboardInterrupt

    async def main() -> None:
        client = ps.AsyncClient(node.url)
        with pytest.raises(KeyboardInterrupt):
            await client.close()
        with pytest.raises(ps.ConflictError, match="this client is closed"):
            await client.models()

    monkeypatch.setattr(Cluster, "leave", interrupted)
    asyncio.run(main())
    client = ps.Client(node.url)
    with pytest.raises(KeyboardInterrupt):
        client.close()
    with pytest.raises(ps.ConflictError, match="this client is closed"):
        client.models()


def test_a_client_that_was_closed_before_its_first_call_is_closed(node: Node) -> None:
    """A client that was closed before its first call refuses that call, blocking or on asyncio."""
    request = [Request("GET", "/livez")]
    blocking = BlockingTransport((node.url,), Credentials())
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
        with ps.connect(f"{url},{node.url}", timeout=2.0) as client:
            assert client.request("GET", "/livez") == {}
        with pytest.raises(ps.Unreachable, match="did not answer within"):
            ps.connect(url, timeout=0.2)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_name_server_that_does_not_answer_takes_no_longer_than_the_timeout(
    blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose URL has a name that is being looked up for long gives up in time, though the look-up goes on."""
    answers, ended = threading.Event(), threading.Event()

    def look_up(*_: object, **__: object) -> None:
        answers.wait(5.0)
        ended.set()
        raise socket.gaierror("Temporary failure in name resolution")

    async def ask() -> None:
        async with ps.AsyncClient("http://ps.test:1", timeout=0.2) as client:
            try:
                await client.request("GET", "/livez")
            finally:
                assert not ended.is_set()
                answers.set()

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    connect = partial(ps.connect, "http://ps.test:1", timeout=0.2) if blocking else lambda: asyncio.run(ask())
    with pytest.raises(ps.Unavailable, match="timed out"):
        connect()
    assert blocking is not ended.is_set()
    answers.set()


def attempts(urls: Sequence[str], timeout_s: float, take: Callable[[Request, Now], Outcome]) -> list[tuple[str, float]]:
    """Return the URLs that a request is sent to, each with the seconds left; `take` moves the clock."""
    now = Now()
    protocols = Protocols(now)
    for url in urls:
        protocols.learn(url, Response(200, {}), in_time=True)
    until, sent = now() + timeout_s, list[tuple[str, float]]()
    sending = _to_given(Addresses(urls), protocols, Request("GET", "/models", timeout_s=timeout_s))
    try:
        _, request, url = next(sending)
        while True:
            assert request.timeout_s == pytest.approx(until - now())
            sent.append((url, round(until - now(), 3)))
            _, request, url = sending.send(take(request, now))
    except StopIteration:
        return sent
    finally:
        sending.close()


def test_all_urls_together_have_the_time_of_the_request() -> None:
    """URLs that cannot be connected to share the timeout of a request, of which the last one has what is left."""

    def silent(request: Request, now: Now) -> Outcome:
        now.s += min(3.0, request.connect_s)
        return problem("unreachable", "timed out")

    urls = [f"http://{name}:1" for name in "abc"]
    assert attempts(urls, 6.0, silent) == [(urls[0], 6.0), (urls[1], 4.0), (urls[2], 2.0)]
    assert attempts(urls, 30.0, silent) == [(urls[0], 30.0), (urls[1], 27.0), (urls[2], 24.0)]
    assert attempts(urls[:1], 6.0, silent) == [(urls[0], 6.0)]


def test_a_url_is_tried_only_while_there_is_time() -> None:
    """After one that took all the time to say that it knows no leader, the next is not tried: it could be in doubt."""

    def slow(request: Request, now: Now) -> Outcome:
        now.s += request.timeout_s
        return Response(503, {}, b"no server")

    assert len(attempts(["http://a:1", "http://b:1"], 6.0, slow)) == 1
