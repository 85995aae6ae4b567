"""The bound on open event streams, and what each costs the scheduler."""

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from starlette.types import ASGIApp, Message

from paramserver.core.scheduler import io
from paramserver.core.scheduler.cluster import Cluster
from paramserver.limits import EVENT_STREAMS_MAX
from paramserver_scheduler.hub import Hub, Published
from paramserver_scheduler.store import StateStore

from .leading import leading


async def events(
    app: ASGIApp,
    begun: "asyncio.Future[int]",
    path: str = "/events",
    query: bytes = b"",
    lines: list[bytes] | None = None,
) -> None:
    """Read a feed for ever; `begun` gets the status of the answer, and `lines` what comes."""

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            begun.set_result(message["status"])
        elif lines is not None:
            lines.append(message["body"])

    scope = {"type": "http", "http_version": "1.1", "method": "GET", "path": path, "query_string": query}
    await app({**scope, "headers": []}, receive, send)


async def test_streams_that_are_opened_together_keep_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests that all wait for the same store, no more become streams than may be open."""

    async def written(*_: Any) -> None:
        pass

    runtime, _, app = leading()
    monkeypatch.setattr(StateStore, "write", written)
    # While its store is pending, what is asked for afterwards waits.
    runtime.send(io.JoinShard(0, "s", ["http://127.0.0.1:3"], "", None, False))
    statuses = [asyncio.get_running_loop().create_future() for _ in range(EVENT_STREAMS_MAX + 3)]
    streams = [asyncio.ensure_future(events(app, status)) for status in statuses]
    async with asyncio.timeout(20):
        while len(runtime._waiters) < len(streams):
            await asyncio.sleep(0)
        streams.append(asyncio.ensure_future(runtime.run()))
        assert Counter(await asyncio.gather(*statuses)) == {200: EVENT_STREAMS_MAX, 429: 3}
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)


async def test_streams_that_begin_with_the_same_state_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole state is collected once for all streams opened until it changes; it is kept no longer than they are."""
    runtime, _, app = leading()
    collected, map_document = 0, Cluster.map_document

    def counted(cluster: Cluster) -> dict[str, Any]:
        nonlocal collected
        collected += 1
        return map_document(cluster)

    monkeypatch.setattr(Cluster, "map_document", counted)
    streams: list[asyncio.Future[None]] = []

    async def opened() -> int:
        status = asyncio.get_running_loop().create_future()
        streams.append(asyncio.ensure_future(events(app, status)))
        assert await status == 200
        return collected

    async with asyncio.timeout(20):
        assert [await opened() for _ in range(4)] == [1] * 4
        runtime.hub.publish({"type": "gone", "model": "m", "generation": 1})
        assert [await opened() for _ in range(4)] == [2] * 4
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        assert await opened() == 3
    streams[-1].cancel()


async def test_feeds_of_shards_that_begin_with_the_same_state_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """When leaders change all shards ask for the state: it is collected and encoded once, and not for a dead one.

    Nor is it shared once its term is that of a leader of before.
    """

    async def written(*_: Any) -> None:
        pass

    runtime, _, app = leading()
    monkeypatch.setattr(StateStore, "write", written)
    streams = [asyncio.ensure_future(runtime.run())]

    async def opened(query: str) -> tuple[int, list[bytes]]:
        status, lines = asyncio.get_running_loop().create_future(), list[bytes]()
        streams.append(asyncio.ensure_future(events(app, status, "/internal/feed", query.encode(), lines)))
        code = await status
        while code == 200 and b'{"type":"ping"}\n' not in lines:
            await asyncio.sleep(0)
        return code, lines

    for name in "ab":
        runtime.send(io.JoinShard(0, name, [f"http://{name}:1"]))
    async with asyncio.timeout(20):
        (_, first), (_, second) = [await opened(f"shard={name}&epoch=1") for name in "ab"]
        assert [json.loads(found)["type"] for found in first] == ["map", "ping"]
        assert [id(found) for found in second] == [id(found) for found in first]
        assert [(await opened(query))[0] for query in ("shard=a&epoch=2", "shard=c&epoch=1")] == [409, 404]
        runtime.core.handle(io.RedisEmptied(2), 0.0)
        assert json.loads((await opened("shard=a&epoch=1"))[1][0])["term"] == 2
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)


async def test_an_event_is_encoded_once_for_all_streams_without_the_upload_token() -> None:
    """All clients get the same bytes of a document, which lack the token that permits one of them to upload values."""
    hub = Hub(lambda _: None)
    model = Published({"type": "model", "name": "m", "upload": {"token": "secret"}})
    feeds = [hub.subscribe([model], public=True) for _ in range(2)]
    hub.publish({"type": "gone", "model": "m", "generation": 1})
    hub.close()
    one, other = [[event async for event in feed.events()] for feed in feeds]
    assert one == [
        b'event: model\ndata: {"type":"model","name":"m"}\n\n',
        b'event: gone\ndata: {"type":"gone","model":"m","generation":1}\n\n',
    ]
    assert [id(event) for event in one] == [id(event) for event in other]
