"""If a client floods a shard, its excess is refused and other clients are served."""

import json
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
from msgspec.structs import replace
from tests.refusals import refused_with
from tests.waiting import eventually

from paramserver.codecs.stage import pack
from paramserver.core.ranges import of_pairs
from paramserver.errors import Unavailable
from paramserver.limits import CLIENT_REQUESTS_MAX, MIB
from paramserver.wire import http2
from paramserver.wire.frame import MEDIA_TYPE, PullFrame, PullSpec, PushFrame, PushPart, encode_header
from paramserver_node.in_flight import InFlight
from paramserver_shard.accounts import MEMORY_SHARE, bytes_max

from .processes import Nodes, nodes, summing_model, unique

FLOODER = "127.0.0.2"
"""Another address of this machine, which makes the flooder another client."""
MEMORY = 512 * MIB
STOOD_STILL = ("unavailable", "in_doubt")
"""What a shard answers that got no CPU time for 3 s: to a request, and to a push that it had accepted before."""


def test_requests_are_bounded_in_all_and_for_each_client() -> None:
    """Requests beyond a client's limit are 429, beyond the total limit 503; finished ones make room."""
    in_flight = InFlight(bytes_max(MEMORY))
    with ExitStack() as flood:
        for _ in range(CLIENT_REQUESTS_MAX):
            flood.enter_context(in_flight.request("a"))
        with pytest.raises(Unavailable) as mine, in_flight.request("a"):
            pass
        assert (mine.value.code, mine.value.status) == ("too_many_requests", 429)
        for client in "bcd":
            for _ in range(CLIENT_REQUESTS_MAX):
                flood.enter_context(in_flight.request(client))
        with pytest.raises(Unavailable) as all_of_it, in_flight.request("e"):
            pass
        assert (all_of_it.value.code, all_of_it.value.status) == ("queue_full", 503)
        assert mine.value.retry_after_s
        assert all_of_it.value.retry_after_s
    assert in_flight.requests == 0
    with in_flight.request("a"):
        pass


def test_bytes_are_bounded_by_the_memory_there_is() -> None:
    """Bodies are limited to a quarter of memory, and half of that per client; a single one may be larger."""
    in_flight = InFlight(bytes_max(MEMORY))
    assert in_flight.bytes_max == MEMORY // MEMORY_SHARE
    with in_flight.request("a") as one, in_flight.request("a") as two, in_flight.request("b") as other:
        one.grow(in_flight.client_bytes_max)
        with refused_with("too_many_requests", Unavailable):
            two.grow(1)
        other.grow(in_flight.bytes_max // 2)
        with in_flight.request("c") as third:
            with refused_with("queue_full", Unavailable):
                third.grow(1)
    assert in_flight.size_bytes == 0
    with in_flight.request("a") as alone:
        alone.grow(4 * in_flight.bytes_max)


def test_a_body_that_grows_is_taken_alone_and_refused_beside_others() -> None:
    """A lone request may grow beyond the limit, and another request beside it is refused."""
    in_flight = InFlight(bytes_max(MEMORY))
    with in_flight.request("a") as one, in_flight.request("a") as two:
        for _ in range(3):
            one.grow(in_flight.bytes_max)
        with pytest.raises(Unavailable):
            two.grow(1)
    assert in_flight.size_bytes == 0


def test_a_client_that_always_has_a_request_open_gets_its_bytes_back() -> None:
    """Bytes of a request that has ended no longer count for its client, and a client without requests is forgotten."""
    in_flight = InFlight(bytes_max(MEMORY))
    with in_flight.request("a") as poll:
        with in_flight.request("a") as push:
            push.grow(in_flight.client_bytes_max)
        poll.grow(1)
        with in_flight.request("a") as push:
            push.grow(in_flight.client_bytes_max - 1)
    assert not in_flight.clients


def test_what_is_counted_elsewhere_by_now_makes_room() -> None:
    """A request in flight that has given its bytes back counts none at its end, and may take others meanwhile."""
    in_flight = InFlight(bytes_max(MEMORY))
    with in_flight.request("a") as waiting, in_flight.request("a") as other:
        waiting.grow(in_flight.client_bytes_max)
        waiting.release()
        other.grow(in_flight.client_bytes_max - 1)
        waiting.grow(1)
        assert in_flight.size_bytes == in_flight.client_bytes_max
    assert in_flight.size_bytes == 0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """One shard with a memory limit of 512 MiB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAMSERVER_MEMORY_LIMIT", f"{MEMORY // MIB}MiB")
        with nodes(tmp_path_factory.mktemp("nodes"), shards=1) as running:
            yield running


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two such shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAMSERVER_MEMORY_LIMIT", f"{MEMORY // MIB}MiB")
        with nodes(tmp_path_factory.mktemp("pair"), shards=2) as running:
            yield running


def made(cluster: Nodes, elements: int = 10, **spec: Any) -> str:
    """Create a model that adds up what is pushed, once there is memory: what a test needed is kept for a minute."""
    return summing_model(cluster, "async", elements, **spec)


def connection(cluster: Nodes, sent: bytes, address: str = FLOODER) -> socket.socket:
    """Open a connection from that address and send that, as far as it is taken: a refusal may come before its end."""
    s = socket.create_connection(("127.0.0.1", cluster.shard_ports["shard-0"]), 30, (address, 0))
    with suppress(ConnectionError):
        s.sendall(sent)
    return s


def flooding(cluster: Nodes, content: bytes, kind: str, length: int | None = None) -> socket.socket:
    """Begin a request of `length` bytes (default: all of `content`) on a new connection of the flooder."""
    path = "/push" if kind == MEDIA_TYPE else "/pull"
    size = len(content) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {kind}\r\ncontent-length: {size}\r\n\r\n"
    return connection(cluster, head.encode() + content)


class Flood:
    """Requests that are never finished."""

    def __init__(self, count: int, begin: Callable[[], socket.socket]) -> None:
        self._count, self._begin = count, begin
        self._open: list[socket.socket] = []

    def __enter__(self) -> "Flood":
        return self

    def __exit__(self, *_: object) -> None:
        for s in self._open:
            s.close()

    def rise(self) -> None:
        """Begin all requests, and those again that were answered: with 503 for want of CPU time, as in `served`."""
        answered, _, _ = select.select(self._open, [], [], 0)
        for s in answered:
            self._open.remove(s)
            s.close()
        while len(self._open) < self._count:
            self._open.append(self._begin())


def answer_of(cluster: Nodes, request: bytes, address: str, stack: ExitStack) -> bytes:
    """Send a request from that address, again if it is 503 for want of CPU time, and read its answer's beginning."""
    while True:
        s = stack.enter_context(closing(connection(cluster, request, address)))
        answer = s.recv(1024)
        if not answer.startswith(b"HTTP/1.1 503 ") or b"queue_full" in answer:
            return answer


def served(cluster: Nodes, name: str, count: int) -> None:
    """Push and pull as another client; fail if a request is refused because of the flood."""
    url = f"http://127.0.0.1:{cluster.shard_ports['shard-0']}"
    refused: list[str] = []
    pause = threading.Event()
    with httpx.Client(timeout=30.0) as http:

        def asked(path: str, body: dict[str, object]) -> Any:
            key = {"idempotency-key": unique("push")} if path == "/push" else {}
            while True:
                answer = http.post(f"{url}{path}", json={"model": name, **body}, headers=key)
                if answer.status_code == 200:
                    return answer.json()
                refused.append(answer.json()["code"])
                # A shard that got no CPU time for 3 s is 503 until it is confirmed again, also on a busy machine.
                assert refused[-1] in STOOD_STILL, answer.text
                assert len(refused) < 300
                pause.wait(0.1)

        version = asked("/pull", {})["version"]
        for _ in range(count):
            asked("/push", {"grads": {"w": [1.0] * 10}})
        assert asked("/pull", {})["version"] == version + count


@pytest.mark.process
def test_a_flood_of_requests_leaves_room_for_others(cluster: Nodes) -> None:
    """Of 1,200 long polls of one address the excess gets 429 with Retry-After, and others are served."""
    name = made(cluster)
    asked = {"model": name, "min_version": 1 << 40}
    poll, at_once = (json.dumps({**asked, "wait_s": wait_s}).encode() for wait_s in (60, 0))
    with ExitStack() as stack:

        def begun() -> socket.socket:
            s = stack.enter_context(closing(flooding(cluster, poll, "application/json")))
            s.setblocking(False)
            return s

        waiting = [begun() for _ in range(1200)]
        served(cluster, name, 20)
        answers: list[bytes] = []

        def refused() -> bool:
            for s in [*waiting]:
                try:
                    answer = s.recv(4096)
                except BlockingIOError:
                    continue
                waiting.remove(s)
                if answer.startswith(b"HTTP/1.1 503 "):  # for want of CPU time, as in `served`: it is asked again
                    waiting.append(begun())
                else:
                    answers.append(answer)
            return len(answers) == 1200 - CLIENT_REQUESTS_MAX

        eventually(refused, within_s=60, what="the refusal of what is too much")
        assert all(a.startswith(b"HTTP/1.1 429 ") and b"retry-after: " in a for a in answers)
        assert httpx.get(f"http://127.0.0.1:{cluster.shard_ports['shard-0']}/livez", timeout=30).status_code == 200
        served(cluster, name, 20)
    eventually(lambda: _answer(cluster, at_once).startswith(b"HTTP/1.1 412"), what="its own turn")


def _answer(cluster: Nodes, content: bytes) -> bytes:
    with closing(flooding(cluster, content, "application/json")) as s:
        return s.recv(65536)


@pytest.mark.process
@pytest.mark.parametrize("packed", [False, True])
def test_a_flood_of_bodies_leaves_room_for_others(cluster: Nodes, packed: bool) -> None:
    """Large pushes that an address never finishes only take its share of memory, and others are served.

    Small ones that unpack to large ones take as much.
    """
    elements = 4 * MIB  # 16 MiB each; its share is 64 MiB
    name, big = made(cluster), made(cluster, elements, partitions=1)
    frame = PushFrame(big, [PushPart(0, None, None)])
    plain = np.ones(elements, np.float32).view(np.uint8)
    body = pack("zstd", plain).tobytes() if packed else plain.tobytes()
    if packed:
        frame = replace(frame, encoding="fp32+zstd", sizes=[(len(body), plain.size)])
    head = encode_header(frame)
    begun = head + body[: min(1 << 20, len(body) - 1)]
    with Flood(4, lambda: flooding(cluster, begun, MEDIA_TYPE, len(head) + len(body))) as flood:

        def refused() -> bool:
            flood.rise()
            with closing(flooding(cluster, head + body, MEDIA_TYPE)) as s:
                return s.recv(4096).startswith(b"HTTP/1.1 429 ")

        eventually(refused, within_s=60, what="the refusal of what is too much")
        served(cluster, name, 20)
        url, kind = f"http://127.0.0.1:{cluster.shard_ports['shard-0']}/push", {"content-type": MEDIA_TYPE}
        while (pushed := httpx.post(url, content=head + body, headers=kind, timeout=60)).status_code == 503:
            assert pushed.json()["code"] in STOOD_STILL  # as in `served`
        assert pushed.status_code == 200, "a big push of another client has room"

    def taken() -> bool:
        with closing(flooding(cluster, head + body, MEDIA_TYPE)) as s:
            return s.recv(4096).startswith(b"HTTP/1.1 200 ")

    eventually(taken, within_s=60, what="its own turn, when what it had begun is gone")
    cluster.call("DELETE", f"/models/{big}")


@pytest.mark.process
@pytest.mark.parametrize("request_line", ["POST /pull", "PUT /models/{name}/params/w"])
def test_a_flood_of_bodies_of_unknown_length_leaves_room_for_others(cluster: Nodes, request_line: str) -> None:
    """Unfinished chunked bodies count as they arrive: the address gets 429, and others are served."""
    name = made(cluster)
    kind = "content-type: application/msgpack\r\ntransfer-encoding: chunked\r\n\r\n"
    head = f"{request_line.format(name=name)} HTTP/1.1\r\nhost: x\r\n{kind}".encode()
    chunk = b"100000\r\n" + b" " * MIB + b"\r\n"

    with Flood(2, lambda: connection(cluster, head + 31 * chunk)) as flood:

        def refused() -> bool:
            flood.rise()
            with closing(connection(cluster, head + 8 * chunk + b"0\r\n\r\n")) as s:
                return s.recv(4096).startswith(b"HTTP/1.1 429 ")

        eventually(refused, within_s=60, what="the refusal of what is too much")
        served(cluster, name, 20)


def assert_shared(cluster: Nodes, name: str, begun: Callable[[str, ExitStack], bytes]) -> None:
    """Begin large pulls: two at once are too many for one address, and leave room for others' until they end."""
    with ExitStack() as stack:
        assert begun(FLOODER, stack).startswith(b"HTTP/1.1 200 ")
        assert begun(FLOODER, stack).startswith(b"HTTP/1.1 429 ")
        assert begun("127.0.0.3", stack).startswith(b"HTTP/1.1 200 "), "a large pull of another client has room"
        served(cluster, name, 20)
    with ExitStack() as stack:
        eventually(lambda: begun(FLOODER, stack).startswith(b"HTTP/1.1 200 "), within_s=60, what="its own turn")


@pytest.mark.process
@pytest.mark.parametrize("by_path", [True, False])
def test_a_flood_of_pulls_by_name_leaves_room_for_others(cluster: Nodes, by_path: bool) -> None:
    """Large answers that an address does not read take its share of memory only: it gets 429, and others are served."""
    name, big = made(cluster), made(cluster, 9 * MIB)  # 36 MiB; its share is 64 MiB
    body, asked = b"", f"GET /pull/{big}/w"
    if not by_path:
        body, asked = json.dumps({"model": big}).encode(), "POST /pull"
    kinds = "content-type: application/json\r\naccept: application/x-npy, application/msgpack"
    head = f"{asked} HTTP/1.1\r\nhost: x\r\n{kinds}\r\ncontent-length: {len(body)}\r\n\r\n"
    assert_shared(cluster, name, partial(answer_of, cluster, head.encode() + body))
    cluster.call("DELETE", f"/models/{big}")


@pytest.mark.process
@pytest.mark.parametrize("wait_s", [0.0, 5.0])
def test_a_flood_of_pulls_from_other_shards_leaves_room_for_others(pair: Nodes, wait_s: float) -> None:
    """Values that a shard collects from another one for an address, which does not read them, take only its share."""
    # 36 MiB in each of the shards; the share of an address is 64 MiB.
    name, big = made(pair), made(pair, 18 * MIB, partitions=2)
    frame = encode_header(PullFrame([(0, None), (1, None)], model=big, wait_s=wait_s))
    head = f"POST /pull HTTP/1.1\r\nhost: x\r\ncontent-type: {MEDIA_TYPE}\r\ncontent-length: {len(frame)}\r\n\r\n"
    assert_shared(pair, name, partial(answer_of, pair, head.encode() + frame))
    pair.call("DELETE", f"/models/{big}")


@pytest.mark.process
def test_pushes_that_wait_for_their_commit_leave_room_for_the_one_it_needs(pair: Nodes) -> None:
    """Four workers of one address end an iteration with 24 MiB each, although its share is 64 MiB.

    Once staged, their pushes count as that; those that waited kept the last one out until they gave up.
    """
    workers, elements = 4, 6 * MIB
    name = made(pair, elements, partitions=1, consistency={"mode": "sync", "min_workers": workers})
    join = {"lease_s": 120}  # nobody sends heartbeats
    joined = [pair.post(f"/models/{name}/workers", {**join, "name": f"w{i}", "rank": i}) for i in range(workers)]
    frame = PushFrame(name, [PushPart(0, None, None)], clock=0, ends=(1, 60.0))
    (owner,) = {p["shard"] for p in pair.get(f"/models/{name}")["partitions"]}
    url = f"http://127.0.0.1:{pair.shard_ports[owner]}"
    staged = f'paramserver_pushes_total{{model="{name}",state="staged"}}'

    def pushed(worker: dict[str, Any]) -> httpx.Response:
        head = encode_header(replace(frame, worker=worker["worker"], epoch=worker["epoch"], seq=1))
        body = head + np.ones(elements, np.float32).tobytes()
        while True:
            answer = httpx.post(f"{url}/push", content=body, headers={"content-type": MEDIA_TYPE}, timeout=90)
            if answer.status_code != 503:  # for want of CPU time, as in `served`
                return answer

    with ThreadPoolExecutor(workers) as pool:
        answers = []
        for count, worker in enumerate(joined, 1):
            answers.append(pool.submit(pushed, worker))

            def taken(count: int = count) -> bool:
                return answers[-1].done() or f"{staged} {count}.0" in httpx.get(f"{url}/metrics").text

            eventually(taken, what="the push")
        assert [a.result().status_code for a in answers] == [200] * workers
    pair.call("DELETE", f"/models/{name}")


@pytest.mark.process
def test_pulls_that_nobody_reads_keep_few_versions(cluster: Nodes) -> None:
    """Versions that an address's unread answers by frame keep take its share of memory: then it gets 429.

    Pulls and pushpulls of others go on, and once the answers are gone, so do its own.
    """
    size = 16 * MIB
    name, big = made(cluster), made(cluster, size // 4, partitions=1)
    url = f"http://127.0.0.1:{cluster.shard_ports['shard-0']}"
    wanted = [(0, of_pairs([(0, MIB // 4)]))]
    frame = encode_header(PullFrame(wanted, model=big))
    both = encode_header(PushFrame(big, [PushPart(0, None, of_pairs([(0, 1)]))], pull=PullSpec(wanted))) + bytes(4)
    kind = {"content-type": MEDIA_TYPE}
    head = [(":method", "POST"), (":scheme", "http"), (":authority", "x"), (":path", "/pull"), *kind.items()]
    block = http2.encoded([(k.encode(), v.encode()) for k, v in head])
    lent, most = "paramserver_buffer_lent_bytes", MEMORY // 4 + 8 * size

    def asked(path: str, content: bytes, address: str = "127.0.0.1") -> httpx.Response:
        with httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=60) as http:
            while (answer := http.post(f"{url}{path}", content=content, headers=kind)).status_code == 503:
                if answer.json()["code"] not in STOOD_STILL:  # as in `served`
                    break
            return answer

    def replaced() -> None:
        assert asked("/pushpull", both).status_code == 200

    def gauge(metric: str) -> float:
        text = httpx.get(f"{url}/metrics", timeout=60).text
        return float(next(line for line in text.splitlines() if line.startswith(f"{metric} ")).split()[1])

    replaced()
    hello = http2.PREFACE + http2.settings({http2.INITIAL_WINDOW_SIZE: 0})
    with closing(connection(cluster, hello)) as unread:
        for stream in range(1, 2 * 200, 2):
            unread.sendall(
                http2.frame(http2.HEADERS, http2.END_HEADERS, stream, block)
                + http2.frame(http2.DATA, http2.END_STREAM, stream, frame)
            )
            replaced()
            if (answer := asked("/pull", frame, FLOODER)).status_code == 429:
                break
        assert answer.status_code == 429, "what is unread takes ever more memory"
        assert answer.json()["code"] == "too_many_requests"
        assert "retry-after" in answer.headers
        assert asked("/pull", frame).status_code == 200
        assert asked("/pushpull", both, FLOODER).status_code == 429
        for _ in range(20):
            replaced()
        assert gauge(lent) < most
        served(cluster, name, 20)
    own_turn = partial(asked, "/pull", frame, FLOODER)
    eventually(lambda: own_turn().status_code == 200, within_s=60, what="pulls, once the answers are gone")
    cluster.call("DELETE", f"/models/{big}")
