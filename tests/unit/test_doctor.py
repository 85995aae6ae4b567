"""What `psctl doctor` finds at a shard."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest

import paramserver as ps
from paramserver_cli.doctor import _measure

from .http_server import answering


class Busy(BaseHTTPRequestHandler):
    """A shard that is up and serves nobody."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        self.send_response(503)
        self.end_headers()
        self.wfile.write(b"no contact")

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def busy() -> Iterator[str]:
    """The address of a shard that refuses pulls."""
    with answering(Busy) as address:
        yield address


def test_a_shard_that_refuses_is_not_called_out_of_reach(busy: str) -> None:
    """What a shard answers is told as its answer: to open ports would not help."""
    with ps.Client("http://127.0.0.1:9") as client:
        finding = _measure(client, "shard-0", [busy], {}, 4)
        away = _measure(client, "shard-0", ["http://127.0.0.1:9"], {}, 4)

    assert (finding.result, finding.detail) == ("warning", f"{busy} answered 503: no contact")
    assert "psctl status" in finding.remedy
    assert "cannot be reached" in away.detail
