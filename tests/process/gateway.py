"""A reverse proxy for tests: forwards to one node, hides the shards' addresses and drops responses on demand."""

import http.client
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Gateway(ThreadingHTTPServer):
    """A proxy on a free local port; with `lose_every` = n, it drops the node's response to each n-th push.

    It also drops the next response to each `METHOD PATH` in `lose_next`, and keeps the next one to that in `hold_next`
    back, from when it sets `held` until `release` is set.
    """

    daemon_threads = True

    def __init__(self, node: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.node = urlsplit(node).netloc
        self.lose_every = 0
        self.lose_next = set[str]()
        self.hold_next = ""
        self.held, self.release = threading.Event(), threading.Event()
        self.pushes = 0
        self.lost = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that close their connection."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Gateway

    def hand_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        node = http.client.HTTPConnection(self.server.node, timeout=60)
        kept = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection", "content-length")}
        node.request(self.command, self.path, body=body, headers=kept)
        answer = node.getresponse()
        data = answer.read()
        node.close()
        if self.path == "/push":
            with self.server.lock:
                self.server.pushes += 1
                lose = self.server.lose_every and self.server.pushes % self.server.lose_every == 0
                self.server.lost += bool(lose)
            if lose:
                self.close_connection = True
                return
        request = f"{self.command} {self.path}"
        if request == self.server.hold_next:
            self.server.hold_next = ""
            self.server.held.set()
            self.server.release.wait(60)
        if request in self.server.lose_next:
            self.server.lose_next.remove(request)
            self.close_connection = True
            return
        if re.match("/(internal/)?models", self.path) and "json" in answer.headers.get("content-type", ""):
            # Unreachable addresses: 192.0.2.0/24 is reserved for documentation.
            data = re.sub(rb'("addresses":\s*\[)[^\]]*\]', rb'\1"http://127.0.0.1:9","http://192.0.2.1:8701"]', data)
        self.send_response(answer.status)
        for name in ("content-type", "retry-after"):
            if answer.headers.get(name):
                self.send_header(name, answer.headers[name])
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = hand_on

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def gateway(node: str) -> Iterator[Gateway]:
    """Run a gateway in front of `node`."""
    with Gateway(node) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
