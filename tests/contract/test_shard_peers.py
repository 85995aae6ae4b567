"""Requests from one shard to another: their timeout allows for their size and the owner's wait, and no more."""

import os
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.chaos.proxy import Link
from tests.refusals import refused_with

from paramserver.errors import InDoubt, Unavailable
from paramserver.limits import MIB
from paramserver.net.credentials import Credentials
from paramserver.wire.frame import PullFrame, PushFrame, PushPart
from paramserver_shard import peers
from paramserver_shard.buffers import BufferPool
from paramserver_shard.peers import PeerClient

from .processes import Nodes, unique

pytestmark = pytest.mark.process

SIZE = MIB // 2
"""Number of elements in 2 MiB."""


@pytest.fixture
async def client() -> AsyncIterator[PeerClient]:
    """What a shard calls others with."""
    client = PeerClient(BufferPool(), Credentials.found(None, None, os.environ))
    yield client
    await client.aclose()


@pytest.fixture
async def link(lone: Nodes) -> AsyncIterator[Link]:
    """A proxy in front of the shard that can delay and cut connections."""
    link = Link("shard", lone.shard_ports["shard-0"])
    await link.start()
    yield link
    await link.stop()


async def test_what_is_large_has_the_time_that_it_takes(
    lone: Nodes, link: Link, client: PeerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a slow link a large part may take longer than the base timeout; a silent owner is given up."""
    monkeypatch.setattr(peers, "REQUEST_BASE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(peers, "PACE_BYTES_PER_S", MIB // 4)
    name = unique("m")
    spec: dict[str, Any] = {"name": name, "params": {"w": {"shape": [SIZE]}}, "optimizer": {"name": "sum"}}
    lone.post("/models", spec | {"partitions": 1}, status=201)
    push = PushFrame(name, [PushPart(0, None, None)], forwarded=True)
    pull = PullFrame([(0, None)], model=name, forwarded=True)
    url = f"http://127.0.0.1:{link.port}"
    link.delay_s = 0.03  # per 64 KiB: about 1 s in all, more than the base timeout of 0.5 s

    began = time.monotonic()
    reply = await client.push(url, "/push", push, [np.ones(SIZE, np.float32)])
    sent = time.monotonic()
    _, values = await client.pull(url, pull, 4 * SIZE)

    assert reply.version == 1
    assert np.array_equal(values.view(np.float32), np.ones(SIZE, np.float32))
    assert min(sent - began, time.monotonic() - sent) > 0.5, "the way was not slow"
    link.cut()
    with pytest.raises(Unavailable, match="does not answer"):
        await client.pull(url, replace(pull, wait_s=0.1), 0)


async def test_a_push_whose_answer_is_lost_is_in_doubt(
    lone: Nodes, link: Link, client: PeerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forwarded push whose answer is lost is `InDoubt`; a lost pull or an unreachable owner `Unavailable`."""
    name = unique("m")
    lone.post("/models", {"name": name, "params": {"w": {"shape": [4]}}, "optimizer": {"name": "sum"}}, status=201)
    push = PushFrame(name, [PushPart(0, None, None)], forwarded=True)
    pull = PullFrame([(0, None)], model=name, forwarded=True)
    url, ones = f"http://127.0.0.1:{link.port}", [np.ones(4, np.float32)]
    await client.push(url, "/push", push, ones)

    monkeypatch.setattr(peers, "REQUEST_BASE_TIMEOUT_S", 1.0)
    link.cut("back")
    with pytest.raises(InDoubt):
        await client.push(url, "/push", push, ones)
    with refused_with("unavailable", Unavailable):
        await client.pull(url, pull, 16)
    with refused_with("unavailable", Unavailable):
        await client.push("http://127.0.0.1:9", "/push", push, ones)
    answer = lone.http.post(f"http://127.0.0.1:{lone.shard_ports['shard-0']}/pull", json={"model": name})
    assert answer.json()["params"] == {"w": [2.0] * 4}
