"""Client and server one minor version apart: what the newer one adds to its messages is ignored by the older one."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import msgpack
import numpy as np
import pytest

import paramserver as ps
from paramserver.wire.frame import MEDIA_TYPE, PREFIX_BYTES, encode_header, header_end

from .cluster import Cluster

pytestmark = pytest.mark.process

NEWS = {"from_the_future": {"color": "blue", "parts": [[1, None]], "more": 7.5}}
"""Unknown members, as a later version may add them to any map."""


def newer_frame(frame: bytes) -> bytes:
    """The frame as a later minor version may send it: with a flag set, and with unknown keys in its header."""
    offset, end = header_end(frame), PREFIX_BYTES + int.from_bytes(frame[4:8], "little")
    header = msgpack.unpackb(frame[PREFIX_BYTES:end])
    pull = header.get("pull")
    if isinstance(pull, dict):
        header["pull"] = pull | NEWS
    head = bytearray(encode_header(header | NEWS))
    head[3] = 1
    return bytes(head) + frame[offset:]


def newer_json(value: Any) -> Any:
    """The document with unknown members in each object, but not in the values of the keys in `chosen`."""
    if isinstance(value, list):
        return [newer_json(v) for v in value]
    if not isinstance(value, dict):
        return value
    chosen = ("shards", "params", "workers", "metrics", "optimizer", "consistency", "init", "spec")
    return {k: v if k in chosen else newer_json(v) for k, v in value.items()} | NEWS


class Between(ThreadingHTTPServer):
    """A reverse proxy that makes one side look a minor version newer, by rewriting its `requests` or `answers`."""

    daemon_threads = True

    def __init__(self, node: str, newer: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.node = urlsplit(node).netloc
        self.newer = newer
        self.changed: set[str] = set()
        """What was rewritten: `frame` and the first segment of the path, or `json`."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that close their connection."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Between

    def hand_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.server.newer == "requests":
            body = self._newer(body, self.headers.get("content-type", ""), json_too=False)
        node = http.client.HTTPConnection(self.server.node, timeout=60)
        kept = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection", "content-length")}
        node.request(self.command, self.path, body=body, headers=kept)
        answer = node.getresponse()
        data = answer.read()
        node.close()
        if self.path.startswith("/models") and b'"addresses"' in data:
            document = json.loads(data)
            for shard in document.get("shards", {}).values():
                shard["addresses"] = ["http://127.0.0.1:9"]  # unreachable, so that all requests come through this proxy
            data = json.dumps(document).encode()
        if self.server.newer == "answers":
            data = self._newer(data, answer.headers.get("content-type", ""), json_too=True)
        self.send_response(answer.status)
        for name in ("content-type", "retry-after"):
            if answer.headers.get(name):
                self.send_header(name, answer.headers[name])
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _newer(self, data: bytes, kind: str, *, json_too: bool) -> bytes:
        if data and kind.startswith(MEDIA_TYPE):
            self.server.changed.add(f"frame {self.path.split('/')[1]}")
            return newer_frame(data)
        if data and json_too and "json" in kind:
            self.server.changed.add("json")
            return json.dumps(newer_json(json.loads(data))).encode()
        return data

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = hand_on

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def between(node: str, newer: str) -> Iterator[Between]:
    """Run such a proxy in front of `node`."""
    with Between(node, newer) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("newer", ["requests", "answers"])
def test_training_works_a_minor_version_apart(shared_cluster: Cluster, newer: str) -> None:
    """A client one minor version newer than the servers, or one older, can create a model, join and train."""
    with between(shared_cluster.url, newer) as middle, ps.connect(middle.url) as client:
        params = {"w": np.zeros((3, 2), np.float32), "b": np.zeros(5, np.float32)}
        model = client.create_model(f"minor-{newer}", params, optimizer=ps.Sum(), consistency=ps.Sync())
        with model.worker() as worker:
            for _ in range(3):
                worker.pull()
                worker.step({"w": np.ones((3, 2), np.float32), "b": np.full(5, 2.0, np.float32)}, loss=0.5)
            pulled = worker.pull()
        assert np.array_equal(pulled["w"], np.full((3, 2), 3.0))
        assert np.array_equal(pulled["b"], np.full(5, 6.0))
        assert any(c.startswith("frame push") for c in middle.changed), middle.changed
        assert "frame pull" in middle.changed
        assert "json" in middle.changed or newer == "requests"
