"""What `psctl doctor` finds at a shard and at Redis."""

import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import paramserver as ps
from paramserver.errors import problem
from paramserver.limits import MIB
from paramserver.net.calls import json_bytes
from paramserver.wire import http2 as wire
from paramserver_cli.doctor import _measure, _shared_memory_of, machine

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


@pytest.mark.parametrize(
    ("told", "detail", "remedy"),
    [
        ("role:master", "noeviction", ""),
        ("role:slave", "replica", "primary"),
        ("loading:1", "loading", "wait"),
        ("aof_last_write_status:err", "append-only file", "disk"),
    ],
)
def test_a_redis_that_refuses_writes_is_not_in_order(told: str, detail: str, remedy: str) -> None:
    """A replica, one that still loads, and one that cannot write its file are called failed, though they answer."""
    lines = ["redis_version:8.0.0", "aof_enabled:1", "maxmemory:100", "used_memory:1", "maxmemory_policy:noeviction"]
    text = "\r\n".join([*lines, told]).encode()

    def redis(connected: socket.socket) -> None:
        while asked := connected.recv(1 << 16):
            connected.sendall(b"+OK\r\n" * asked.count(b"\r\nCLIENT\r\n"))
            if b"\r\nINFO\r\n" in asked:
                connected.sendall(b"$%d\r\n%s\r\n" % (len(text), text))

    with serving(redis) as url:
        (found,) = [f for f in machine(url.replace("http", "redis") + "/0?protocol=2") if f.check == "Redis"]

    assert found.result == ("failed" if remedy else "ok"), found
    assert detail in found.detail
    assert remedy in found.remedy


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memory that clients map")
def test_the_folder_of_shared_memory_is_the_one_that_shards_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the one that is set, and of a cluster on this machine the one that its shards have told."""
    full = SimpleNamespace(free=MIB)
    monkeypatch.setenv("PARAMSERVER_SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: {str(tmp_path): full}[folder])
    (found,) = [f for f in machine(None) if f.check == str(tmp_path)]
    assert (found.result, found.detail) == ("warning", "1 MiB free")

    monkeypatch.setenv("PARAMSERVER_SHARED_MEMORY", "")
    assert "turned off" in [f.detail for f in machine(None)]

    here = tmp_path / "paramserver-0" / "shard-0-1f" / "requests"
    here.parent.mkdir(parents=True)
    here.touch()
    shards = [{"addresses": ["http://a:1", f"unix://{path}"]} for path in (here, here, "/elsewhere/p/s/requests")]
    assert _shared_memory_of(shards) == [str(tmp_path)]
