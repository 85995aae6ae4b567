"""Pulls that wait at another shard than the one that was asked: what they cost other requests, and for how long."""

import asyncio
import os
import socket
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.waiting import eventually

from paramserver.net.credentials import Credentials
from paramserver.wire.frame import PullFrame
from paramserver_shard.buffers import BufferPool
from paramserver_shard.peers import PeerClient

from .processes import Nodes, unique

pytestmark = pytest.mark.process

NEVER = 10**6
"""A version that no test reaches."""


def model_of(cluster: Nodes) -> tuple[str, str, str]:
    """Create a model of one partition; return its name, the URL of the shard that owns it, and that of the other."""
    name = unique("m")
    cluster.post("/models", {"name": name, "params": {"w": {"shape": [4]}}, "partitions": 1}, status=201)
    owner = cluster.http.get(f"/models/{name}").json()["partitions"][0]["shard"]
    own, other = (f"http://127.0.0.1:{cluster.shard_ports[n]}" for n in sorted(cluster.shard_ports, key=owner.__ne__))
    return name, own, other


async def test_polls_that_wait_at_a_shard_hold_nothing_up(cluster: Nodes) -> None:
    """More pulls than a connection carries may wait at another shard; what does not wait is answered at once."""
    name, owner, _ = model_of(cluster)
    client = PeerClient(BufferPool(), Credentials.found(None, None, os.environ))
    poll = PullFrame([(0, None)], model=name, forwarded=True, min_version=NEVER, wait_s=60.0)
    polls = [asyncio.create_task(client.pull(owner, poll, 16)) for _ in range(300)]
    await asyncio.to_thread(eventually, lambda: in_flight(owner) > 200, what="polls at the owner")

    async with asyncio.timeout(25.0):
        await client.pull(owner, PullFrame([(0, None)], model=name, forwarded=True), 16)

    for task in polls:
        task.cancel()
    await asyncio.gather(*polls, return_exceptions=True)
    await client.aclose()


def test_a_poll_that_was_passed_on_ends_soon_after_its_client_has_gone(cluster: Nodes) -> None:
    """A client that goes away leaves nothing waiting at the owner of what it asked for."""
    name, owner, other = model_of(cluster)
    poll = cluster.http.build_request("POST", f"{other}/pull", json={"model": name, "min_version": NEVER, "wait_s": 60})
    head = "".join(f"{key}: {value}\r\n" for key, value in poll.headers.items())
    eventually(lambda: in_flight(owner) == 1, what="an idle owner")  # the request for its metrics

    with socket.create_connection((poll.url.host, poll.url.port or 0)) as client:
        client.sendall(f"POST /pull HTTP/1.1\r\n{head}\r\n".encode() + poll.content)
        eventually(lambda: in_flight(owner) == 2, what="the poll at the owner")

    eventually(lambda: in_flight(owner) == 1, what="the end of the poll")


def test_a_poll_that_was_passed_on_waits_as_long_as_it_asks(cluster: Nodes) -> None:
    """It is answered once the version is there, or when its own time is over."""
    name, owner, other = model_of(cluster)
    wait_s = 2.0
    began = time.monotonic()

    late = cluster.http.post(f"{other}/pull", json={"model": name, "min_version": NEVER, "wait_s": wait_s})

    assert (late.status_code, late.json()["code"]) == (412, "version_not_reached")
    assert time.monotonic() - began >= wait_s
    assert cluster.http.post(f"{owner}/push", json={"model": name, "grads": {"w": [1, 1, 1, 1]}}).status_code == 200
    poll = {"model": name, "min_version": 1, "wait_s": wait_s}
    assert cluster.http.post(f"{other}/pull", json=poll).json()["version"] == 1


def in_flight(url: str) -> float:
    """The number of requests that this node is answering, the one that asks included."""
    headers = Credentials.found(None, None, os.environ).headers
    text = httpx.get(f"{url}/metrics", headers=headers, timeout=30.0).text
    found = {f.name: f.samples for f in text_string_to_metric_families(text)}
    return found["paramserver_http_requests_in_flight"][0].value
