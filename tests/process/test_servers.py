"""The HTTP server and request forwarding, with each node in its own process."""

import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from pyreqwest.client import SyncClientBuilder
from tests.servers import free_port
from tests.waiting import eventually

from paramserver.errors import from_document

pytestmark = pytest.mark.process

APP = Path(__file__).with_name("node_app.py")


class Node:
    """A running `node_app.py` process."""

    def __init__(self, *args: str, files_max: int | None = None) -> None:
        limited = [] if files_max is None else ["sh", "-c", f'ulimit -n {files_max}; exec "$@"', "sh"]
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=20.0)
        self.process = subprocess.Popen(
            [*limited, sys.executable, "-P", str(APP), str(self.port), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def listens(self) -> bool:
        """Return True once the node accepts connections; raise OSError until then."""
        assert self.process.poll() is None, f"exited with {self.process.returncode}"
        socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
        return True

    def stop(self) -> tuple[int, str]:
        """Send SIGTERM, and return exit status and output."""
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=20)
        return self.process.returncode, out


@contextmanager
def node(*args: str, files_max: int | None = None) -> Iterator[Node]:
    running = Node(*args, files_max=files_max)
    try:
        eventually(running.listens, what="it to listen")
        yield running
    finally:
        running.http.close()
        running.process.kill()
        running.process.communicate()


@pytest.fixture(scope="module")
def upstream() -> Iterator[Node]:
    """A node without upstreams."""
    with node() as running:
        yield running


@pytest.fixture(scope="module")
def front(upstream: Node) -> Iterator[Node]:
    """A node that forwards to an address where nothing listens, then to `upstream`."""
    with node(f"http://127.0.0.1:1,{upstream.url}") as running:
        yield running


def test_a_request_in_flight_is_finished_before_the_process_ends() -> None:
    """After SIGTERM a node finishes the request in flight, does not wait for an idle connection, and exits with 0."""
    with node() as running, httpx.Client(base_url=running.url, timeout=20.0) as idle:
        assert idle.get("/listening").json() == 0  # leaves an idle keep-alive connection
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(running.http.get("/slow?seconds=1")))
        asking.start()
        eventually(lambda: running.http.get("/begun").json() == 1)
        code, out = running.stop()
        asking.join()

    assert [a.status_code for a in answers] == [200]
    assert code == 0
    assert "stopped in order" in out.splitlines()


def test_an_endless_answer_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGTERM an endless response is cut off, and the node exits with 0."""
    monkeypatch.setenv("GRACE_S", "0.5")
    with node() as running, running.http.stream("GET", "/events") as events:
        pieces = events.iter_raw()
        next(pieces)
        code, out = running.stop()

    assert code == 0
    assert "stopped in order" in out.splitlines()


def test_a_node_that_stops_ends_what_it_only_passes_on(upstream: Node) -> None:
    """After SIGTERM a node ends the streams and the long polls that another node answers, and then exits at once."""
    answers: list[httpx.Response] = []
    with node(upstream.url) as front, front.http.stream("GET", "/events") as events:
        pieces = events.iter_raw()
        next(pieces)
        before = upstream.http.get("/begun").json()
        asking = threading.Thread(target=lambda: answers.append(front.http.get("/slow?seconds=15")))
        asking.start()
        eventually(lambda: upstream.http.get("/begun").json() == before + 1)
        code, out = front.stop()
        assert b"".join(pieces).replace(b"data: tick\n\n", b"") == b""  # the stream ends like any other
        asking.join()

    assert [(a.status_code, a.json()["code"]) for a in answers] == [(503, "no_leader")]
    assert (code, out.splitlines()) == (0, ["stopped in order"])


def test_a_taken_port_is_an_error() -> None:
    """A second node on a port in use exits with an error, and the first one keeps serving."""
    with node() as running:
        second = subprocess.run(
            [sys.executable, "-P", str(APP), str(running.port)], capture_output=True, text=True, timeout=30
        )

        assert second.returncode != 0
        assert "OSError" in second.stderr or "in use" in second.stderr
        assert running.http.get("/listening").status_code == 200


def test_a_node_without_free_files_says_so_once() -> None:
    """A node that must reset connections, for want of free file descriptors, logs this once, with the remedy."""
    with node(files_max=64) as running:
        clients = [socket.create_connection(("127.0.0.1", running.port), timeout=20.0) for _ in range(80)]
        with suppress(ConnectionResetError):
            clients[-1].recv(1)
        for client in clients:
            client.close()
        code, out = running.stop()
    assert code == 0
    (line,) = [line for line in out.splitlines() if "ulimit -n" in line]
    assert "of the 64 files" in line


def test_a_misspelled_variable_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node warns of a PARAMSERVER_ variable that is no setting, as the default is in effect instead.

    The time of a line is in UTC, and says so.
    """
    monkeypatch.setenv("PARAMSERVER_STOPS", "300")
    with node() as running:
        status, out = running.stop()

    assert status == 0
    assert re.search(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING paramserver\.settings ", out, re.MULTILINE)
    assert "PARAMSERVER_STOPS (did you mean PARAMSERVER_STOP_S?)" in out


def test_invalid_requests_are_not_logged() -> None:
    """A client that sends invalid HTTP/1.1 is told so; nothing is logged, as anyone could fill the disk with it."""
    with node() as running:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", running.port), timeout=20.0) as client:
                client.sendall(b"GET / HTTP/1.1\r\n: x\r\n\r\n")
                assert client.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
        code, out = running.stop()
    assert (code, out.splitlines()) == (0, ["stopped in order"])


def test_one_port_speaks_both_versions_of_http(upstream: Node) -> None:
    """A node serves HTTP/1.1 and HTTP/2 with prior knowledge on one port, with large bodies in both directions."""
    client = SyncClientBuilder().http2_prior_knowledge().http2_max_frame_size(1 << 20).build()
    with client:
        pushed = client.post(f"{upstream.url}/push").body_bytes(bytes(3_000_000)).build().send()
        pulled = client.get(f"{upstream.url}/pull").build().send()
        ignored = client.post(f"{upstream.url}/ignore").body_bytes(bytes(3_000_000)).build().send()

        assert pushed.version == "HTTP/2.0"
        assert pushed.json()["size"] == 3_000_000
        assert len(pulled.bytes()) == 5_000_000
        assert ignored.json() == {"ok": True}
    assert upstream.http.post("/push", content=b"abc").json()["size"] == 3


def test_a_request_is_handed_on_whole(front: Node) -> None:
    """A forwarded request keeps its body, query and end-to-end headers, loses hop-by-hop ones, and is marked."""
    headers = {"x-kept": "1", "x-dropped": "1", "connection": "x-dropped", "x-request-id": "r-1"}
    answer = front.http.post("/push?a=%C3%A9&b=1", content=bytes(2_000_000), headers=headers)

    assert answer.headers["x-request-id"] == "r-1"
    assert answer.headers.get_list("x-request-id") == ["r-1"]
    assert answer.json() == {
        "size": 2_000_000, "query": "a=%C3%A9&b=1", "content-length": "2000000", "x-kept": "1", "x-dropped": None,
        "x-request-id": "r-1", "x-paramserver-forwarded": "1",
    }  # fmt: skip


def test_a_body_without_a_length_is_handed_on(front: Node) -> None:
    """A chunked request body is forwarded whole and without a content-length."""
    answer = front.http.post("/push", content=iter([b"ab", b"c" * 100_000]))

    assert (answer.json()["size"], answer.json()["content-length"]) == (100_002, None)


def test_an_answer_is_handed_on_whole(front: Node, upstream: Node) -> None:
    """Status, headers and a large body of a forwarded response are those that the other node sent."""
    there, here = upstream.http.get("/pull"), front.http.get("/pull")

    assert here.content == there.content
    assert (here.headers["etag"], here.headers["content-length"]) == ('"v7"', "5000000")
    assert front.http.get("/nothing").status_code == 404
    assert from_document(front.http.get("/nothing").json()).code == "not_found"


@pytest.mark.parametrize("raw", ["a%2Fb", "a/../b", "a/./..", "%C3%A9%7C%5C", "a%25b", "a%2F..%2Fc", "a//b", "a+b%20c"])
def test_names_survive_being_handed_on(front: Node, upstream: Node, raw: str) -> None:
    """A name in a forwarded path stays the same, even with encoded slashes, dots or special characters."""

    def ask(port: int) -> str:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as s:
            s.sendall(f"GET /names/{raw} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            data = b"".join(iter(lambda: s.recv(65536), b""))
        assert data.startswith(b"HTTP/1.1 200"), data
        return data.partition(b"\r\n\r\n")[2].decode()

    assert ask(front.port) == ask(upstream.port)


def test_events_flow_and_end_with_the_client(front: Node, upstream: Node) -> None:
    """Server-sent events are forwarded as they arrive, and the other node's stream ends when the client disconnects."""
    with front.http.stream("GET", "/events") as events:
        pieces = events.iter_raw()  # needs a name: garbage-collected, it would close the connection
        assert next(pieces).startswith(b"data: tick")
        eventually(lambda: upstream.http.get("/listening").json() == 1)

    eventually(lambda: upstream.http.get("/listening").json() == 0, what="the other node to be let go")


@pytest.mark.parametrize("request_line", ["GET /wait", "PUT /wait", "POST /pull"])
def test_a_client_that_hangs_up_waits_nowhere(front: Node, upstream: Node, request_line: str) -> None:
    """When the client of a forwarded long poll disconnects, the other node stops waiting, whatever was asked."""
    with socket.create_connection(("127.0.0.1", front.port)) as client:
        client.sendall(f"{request_line} HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{{}}".encode())
        eventually(lambda: upstream.http.get("/waiting").json() == 1)

    eventually(lambda: upstream.http.get("/waiting").json() == 0, what="the other node to be let go")


def test_a_client_that_hangs_up_in_its_body_is_no_error_of_ours(upstream: Node) -> None:
    """A client that disconnects in the middle of its request body leaves no `request.failed` in the log."""
    with node(upstream.url) as front:
        with socket.create_connection(("127.0.0.1", front.port)) as client:
            client.sendall(b"POST /push HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhalf")
            for _ in range(20):  # while these are answered, the partial request above is read and forwarded
                assert front.http.get("/listening").is_success
        assert front.http.get("/listening").is_success
        _, out = front.stop()

    assert "request.failed" not in out, out


def test_an_answer_does_not_wait_for_an_empty_last_frame(upstream: Node) -> None:
    """A request body that ends with an empty DATA frame after its announced length is answered every time."""
    with SyncClientBuilder().http2_prior_knowledge().build() as client:
        for size in [1, 100_000, 3_000_000] * 5:
            half = bytes(size - size // 2)
            body = iter([half, bytes(size // 2)])
            request = client.post(upstream.url + "/push").header("content-length", str(size)).body_stream(body)
            answer = request.build().send()
            assert (answer.status, answer.json()["size"]) == (200, size)


def test_a_node_that_dies_in_the_middle_cuts_the_answer_off() -> None:
    """If the other node dies in the middle of a response, the client sees it cut off; the next request gets 503."""
    with node() as dying, node(dying.url) as front:
        with pytest.raises(httpx.RemoteProtocolError):
            front.http.get("/die")
        answer = front.http.get("/slow?seconds=0")

    assert (answer.status_code, answer.json()["code"]) == (503, "no_leader")
    assert answer.headers["retry-after"] == "1"


def test_who_may_send_again_what_was_not_answered() -> None:
    """A forwarded request that was not answered is `retryable` only if it cannot count twice when it is sent again."""
    key = {"idempotency-key": "k"}

    def hang_up(listener: socket.socket) -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                return
            with connected:
                connected.recv(1 << 16)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = threading.Thread(target=hang_up, args=(listener,))
        silent.start()
        with node(f"http://127.0.0.1:{listener.getsockname()[1]}") as front:
            for method, path, headers, code, retryable in (
                ("POST", "/push", {}, "in_doubt", False),
                ("POST", "/push", key, "in_doubt", True),
                ("POST", "/pushpull", key, "in_doubt", True),
                ("PUT", "/models/m/params/w", {}, "in_doubt", True),
                ("POST", "/runs", key, "in_doubt", False),
                ("POST", "/pull", {}, "no_leader", True),
            ):
                document = front.http.request(method, path, headers=headers, json={}).json()
                assert (document["code"], document["retryable"]) == (code, retryable), (method, path, document)
        listener.shutdown(socket.SHUT_RDWR)
        silent.join()
