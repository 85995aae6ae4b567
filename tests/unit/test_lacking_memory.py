"""A shard whose machine has no memory left says so: it is no trouble of Redis, and no bug."""

import asyncio
import errno
import mmap
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace
from tests.refusals import refused_with
from tests.unit.scripted_server import Blocking, Server
from tests.unit.test_peers import PULL, answering

from paramserver.core.layout import Layout
from paramserver.core.partition_state import LoadedState
from paramserver.core.shard.effects import LoadPartition
from paramserver.core.spec import ModelSpec
from paramserver.errors import Unavailable
from paramserver.limits import MIB
from paramserver.net.credentials import Credentials
from paramserver.types import ModelKey, PartitionKey, Token
from paramserver.wire.frame import PushFrame, PushPart, encode_header
from paramserver_node.in_flight import InFlight
from paramserver_shard.buffers import SMALL_BYTES, BufferPool
from paramserver_shard.loading import Loader
from paramserver_shard.peers import PeerClient
from paramserver_shard.receiving import Body, FrameReader


@pytest.fixture(autouse=True)
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives no more memory."""

    def refuse(*args: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)


async def test_a_partition_that_finds_no_memory_is_not_loaded() -> None:
    """It is loaded later, and nobody takes Redis to be away."""

    async def submit(work: Callable[[], LoadedState]) -> LoadedState:
        return await asyncio.to_thread(work)

    spec = ModelSpec.parse({"name": "m", "params": {"w": {"shape": [SMALL_BYTES]}}, "partitions": 1})
    loader = Loader(Mock(), Mock(), BufferPool(), submit, lambda *_: True)
    with refused_with("unavailable", Unavailable, "lacks memory for partition m.1/0"):
        await loader.load(LoadPartition(PartitionKey(ModelKey("m", 1), 0), Token(1), "init", spec, Layout(spec)))


@pytest.mark.parametrize("size_bytes", [SMALL_BYTES, 2 * MIB])
async def test_a_body_that_finds_no_memory_is_refused(size_bytes: int) -> None:
    """A push for which the memory is lacking can be sent again: nothing of it is done, and the rest of it is read."""
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": encode_header(PushFrame("m", [PushPart(0, None, None)])), "more_body": True},
        {"type": "http.request", "body": bytes(size_bytes), "more_body": False},
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def sized(frame: PushFrame) -> tuple[PushFrame, Body]:
        return frame, Body((size_bytes,))

    with InFlight(1 << 30).request("") as account, refused_with("unavailable", Unavailable, "lacks memory"):
        await FrameReader(BufferPool()).read({"state": {"account": account}}, receive, PushFrame, sized)
    assert messages == []


async def test_values_of_another_shard_that_find_no_memory_are_refused() -> None:
    """They are not asked for, or if the pull waits, refused once they come."""
    client = PeerClient(BufferPool(), Credentials())
    with refused_with("unavailable", Unavailable, "lacks memory"):
        await client.pull("http://127.0.0.1:9", PULL, SMALL_BYTES)
    with Server(Blocking, answering(bytes(SMALL_BYTES))) as server:
        with refused_with("unavailable", match="lacks memory"):
            await client.pull(server.url, replace(PULL, wait_s=5.0), SMALL_BYTES)
        await client.aclose()
