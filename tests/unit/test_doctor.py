"""What `psctl doctor` finds at a shard."""

import socket

import paramserver as ps
from paramserver.errors import problem
from paramserver.net.calls import json_bytes
from paramserver.wire import http2 as wire
from paramserver_cli.doctor import _measure

from .scripted_server import Peer, serving

REFUSED = wire.encoded([(b":status", b"503")])
DOCUMENT = problem("unavailable", "no contact").document()


def busy(connected: socket.socket) -> None:
    """Be a shard that is up and serves nobody."""
    peer = Peer(connected)
    peer.send(wire.settings({}))
    for _ in range(2):
        peer.send(peer.answer(peer.until(wire.HEADERS), b""))
    stream = peer.until(wire.HEADERS)
    peer.send(wire.frame(wire.HEADERS, wire.END_HEADERS, stream, REFUSED))
    peer.send(wire.frame(wire.DATA, wire.END_STREAM, stream, json_bytes(DOCUMENT)))


def test_a_shard_that_refuses_is_not_called_out_of_reach() -> None:
    """What a shard answers is told as its answer: to open ports would not help."""
    with serving(busy) as url, ps.Client("http://127.0.0.1:9") as client:
        finding = _measure(client, "shard-0", [url], {}, 4)
        away = _measure(client, "shard-0", ["http://127.0.0.1:9"], {}, 4)

    assert (finding.result, finding.detail) == ("warning", f"{url} answered 503: no contact")
    assert "psctl status" in finding.remedy
    assert away.detail.startswith("cannot reach the shard at http://127.0.0.1:9 (")
    assert "--advertise" in away.remedy
