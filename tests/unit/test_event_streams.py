"""The bound on open event streams."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from starlette.types import ASGIApp, Message

from paramserver.core import scheduler_io as io
from paramserver.limits import EVENT_STREAMS_MAX
from paramserver_scheduler.store import StateStore

from .leading import leading


async def events(app: ASGIApp, begun: "asyncio.Future[int]") -> None:
    """Read an event stream for ever; `begun` gets the status of the answer."""

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            begun.set_result(message["status"])

    scope = {"type": "http", "http_version": "1.1", "method": "GET", "path": "/events", "query_string": b""}
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
