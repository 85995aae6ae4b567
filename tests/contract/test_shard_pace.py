"""Slow clients: the memory that they hold is bounded, they are cut off in time, and others are served."""

import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from tests.servers import free_port
from tests.waiting import eventually

from paramserver.limits import MIB
from paramserver.wire import http2
from paramserver.wire.frame import MEDIA_TYPE, PullFrame, PushFrame, PushPart, encode_header

from . import impatient
from .impatient import PATIENCE_S
from .processes import START_S, Nodes, nodes, unique

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
ELEMENTS = 16 * MIB
GREETING = (
    http2.PREFACE
    + http2.settings({http2.INITIAL_WINDOW_SIZE: http2.WINDOW_MAX})
    + http2.u32_frame(0, http2.WINDOW_UPDATE, http2.WINDOW_MAX - http2.WINDOW_BYTES)
)
"""First bytes of an HTTP/2 client whose flow-control windows are as large as possible."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """One shard, which is less patient than others."""
    with pytest.MonkeyPatch.context() as patch, nodes(tmp_path_factory.mktemp("nodes"), shards=0) as running:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        running.shard_ports["shard-0"] = free_port()
        running.start_shard("shard-0", impatient.__name__)
        eventually(
            lambda: running.get("/map")["shards"]["shard-0"]["alive"], within_s=START_S, what="the shard's joining"
        )
        yield running


@pytest.fixture
def model(cluster: Nodes) -> str:
    """A model of 64 MiB."""
    name = unique("slow")
    w = {"w": {"shape": [ELEMENTS]}}
    cluster.post("/models", {"name": name, "params": w, "optimizer": {"name": "sum"}, "partitions": 4}, status=201)
    return name


def begun(cluster: Nodes, sent: bytes, receive_bytes: int | None = None) -> socket.socket:
    """Open a connection and send that; `receive_bytes` is the size of its receive buffer."""
    s = socket.socket()
    if receive_bytes is not None:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    s.settimeout(60)
    s.connect(("127.0.0.1", cluster.shard_ports["shard-0"]))
    s.sendall(sent)
    return s


def connect(cluster: Nodes, head: str, content: bytes = b"", receive_bytes: int | None = None) -> socket.socket:
    """Begin an HTTP/1.1 request on a new connection."""
    return begun(cluster, f"{head}\r\nhost: x\r\n".encode() + content, receive_bytes)


def requested(method: str, path: str) -> bytes:
    """The header block of a request."""
    head = [
        (":method", method),
        (":scheme", "http"),
        (":authority", "x"),
        (":path", path),
        ("content-type", MEDIA_TYPE),
    ]
    return http2.encoded([(k.encode(), v.encode()) for k, v in head])


def connect2(
    cluster: Nodes, method: str, path: str, body: bytes = b"", receive_bytes: int | None = None
) -> socket.socket:
    """Begin an HTTP/2 request on a new connection."""
    block = requested(method, path)
    ends = 0 if body else http2.END_STREAM
    return begun(
        cluster,
        GREETING
        + http2.frame(http2.HEADERS, http2.END_HEADERS | ends, 1, block)
        + (http2.frame(http2.DATA, 0, 1, body) if body else b""),
        receive_bytes,
    )


def gauge(cluster: Nodes, name: str) -> float:
    """The value of one of the shard's metrics."""
    text = httpx.get(f"http://127.0.0.1:{cluster.shard_ports['shard-0']}/metrics", timeout=30).text
    return float(next(x for x in text.splitlines() if x.startswith(f"{name} ")).split()[1])


def test_who_sends_a_byte_a_second_or_does_not_read_is_cut_off(cluster: Nodes, model: str) -> None:
    """Clients that stall, trickle a body or do not read are cut off in time, while others are served."""
    url = f"http://127.0.0.1:{cluster.shard_ports['shard-0']}"
    frame = encode_header(PushFrame(model, [PushPart(i, None, None) for i in range(4)]))
    framed = f"content-type: {MEDIA_TYPE}\r\ncontent-length: {len(frame) + ELEMENTS * 4}\r\n\r\n".encode() + frame
    typed = b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n"
    before = gauge(cluster, "paramserver_buffer_lent_bytes")
    began = time.monotonic()
    with ExitStack() as stack:
        stalled, trickled, json = (
            stack.enter_context(closing(connect(cluster, "POST /push HTTP/1.1", sent)))
            for sent in (framed, framed, typed)
        )
        reader = stack.enter_context(closing(connect(cluster, f"GET /pull/{model}/w HTTP/1.1", b"\r\n", 64 << 10)))
        waiting, served = [stalled, trickled, json], 0
        with httpx.Client(timeout=30) as http:
            while waiting and time.monotonic() < began + 60.0:
                answered, _, _ = select.select(waiting, [], [], 0.2)
                for s in answered:
                    with suppress(ConnectionError):  # cut off while it was still sending
                        assert s.recv(4096)[:12] in (b"HTTP/1.1 408", b""), "refused, or cut off"
                    assert time.monotonic() - began > PATIENCE_S - 2
                    waiting.remove(s)
                for s in {trickled, json} & set(waiting):
                    with suppress(ConnectionError):
                        s.sendall(b" ")
                other = http.post(f"{url}/pull", json={"model": model, "ranges": {"w": [[0, 4]]}})
                # A shard that got no CPU time for 3 s is 503 until it is confirmed again.
                if other.status_code != 503:
                    assert other.json()["params"]["w"] == [0.0] * 4
                    served += 1
        assert not waiting, "all were cut off"
        assert served > 5
        others = "paramserver_http_requests_in_flight"
        eventually(lambda: gauge(cluster, others) == 1, what="the end of all requests but the one that asks")
        assert read_of(reader) < ELEMENTS * 4, "the reader was cut off too"
    eventually(lambda: gauge(cluster, "paramserver_buffer_lent_bytes") <= before, what="their memory, free again")
    assert cluster.post(f"{url}/pull", {"model": model, "ranges": {"w": [[0, 1]]}})["version"] == 0


def read_of(reader: socket.socket, until: bytes | None = None) -> int:
    """Return how many bytes arrive until the connection ends, or these come."""
    read, last = 0, b""
    try:
        while chunk := reader.recv(1 << 20):
            read += len(chunk)
            last = last[-64:] + chunk
            if until is not None and until in last:
                break
    except ConnectionError:
        pass
    return read


def test_over_http2_they_are_cut_off_too(cluster: Nodes, model: str) -> None:
    """Over HTTP/2 a stalled body gets `too_slow`, what is not read is reset within its answer, and memory is freed.

    The connection goes on, as others of its streams may be in use.
    """
    frame = encode_header(PushFrame(model, [PushPart(i, None, None) for i in range(4)]))
    before = gauge(cluster, "paramserver_buffer_lent_bytes")
    with (
        closing(connect2(cluster, "POST", "/push", frame + bytes(100_000))) as stalled,
        closing(connect2(cluster, "GET", f"/pull/{model}/w", receive_bytes=64 << 10)) as reader,
    ):
        eventually(lambda: gauge(cluster, "paramserver_http_requests_in_flight") == 3, what="both to begin")
        others = "paramserver_http_requests_in_flight"
        eventually(lambda: gauge(cluster, others) == 1, within_s=60.0, what="both to be cut off")
        told = b""
        while b"too_slow" not in told:
            told += stalled.recv(4096)
        assert read_of(reader, until=http2.u32_frame(1, http2.RST_STREAM, http2.INTERNAL_ERROR)) < ELEMENTS * 4
    eventually(lambda: gauge(cluster, "paramserver_buffer_lent_bytes") <= before, what="their memory, free again")


def test_a_body_may_be_slow_but_not_too_slow(cluster: Nodes, model: str) -> None:
    """A body that pauses for a third of the limit and then continues is accepted."""
    body = np.ones(ELEMENTS, np.float32).tobytes()
    frame = encode_header(PushFrame(model, [PushPart(i, None, None) for i in range(4)]))
    head = f"content-type: {MEDIA_TYPE}\r\ncontent-length: {len(frame) + len(body)}\r\n\r\n".encode()

    def accepted() -> bool:
        with closing(connect(cluster, "POST /push HTTP/1.1", head + frame + body[:100])) as s:
            readable, _, _ = select.select([s], [], [], PATIENCE_S / 3)
            assert not readable
            s.sendall(body[100:])
            return s.recv(4096).startswith(b"HTTP/1.1 200 ")

    eventually(accepted, what="the push, which a machine that stands still makes too slow")


def test_values_are_converted_as_they_are_read_not_before(cluster: Nodes, model: str) -> None:
    """Ten pulls with a dtype conversion that nobody reads do not each hold a copy of the model."""
    frame = encode_header(PullFrame(parts=[(i, None) for i in range(4)], dtype="float64", model=model))
    pulls = b"".join(
        http2.frame(http2.HEADERS, http2.END_HEADERS, n, requested("POST", "/pull"))
        + http2.frame(http2.DATA, http2.END_STREAM, n, frame)
        for n in range(1, 21, 2)
    )
    shard = psutil.Process(cluster.processes["shard-0"].pid)
    before = shard.memory_info().rss
    with closing(begun(cluster, GREETING + pulls, receive_bytes=64 << 10)):
        eventually(lambda: gauge(cluster, "paramserver_http_requests_in_flight") == 11, what="all to begin")
        assert shard.memory_info().rss - before < ELEMENTS * 8
