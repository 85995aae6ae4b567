"""The scheduler's bounds on large bodies, apart from those that its routes' tests check."""

import asyncio
import json
import threading

from starlette.types import Message

from paramserver.limits import CONTROL_BODY_BYTES_MAX, SHARD_HEARTBEAT_BYTES_MAX
from paramserver_scheduler.large_bodies import SMALL_BYTES, LargeBodies

from .leading import leading


async def test_large_bodies_are_parsed_one_by_one_beside_the_event_loop() -> None:
    """While a large body is parsed, the event loop parses small ones, and other large ones wait."""
    large_bodies, may_end = LargeBodies(), threading.Event()
    running: set[bytes] = set()
    began: list[int] = []

    def slowly(body: bytes) -> int:
        running.add(body)
        began.append(len(running))
        assert may_end.wait(20)
        running.remove(body)
        return len(body)

    large = [bytes([i]) * (SMALL_BYTES + 1) for i in range(3)]
    tasks = [asyncio.ensure_future(large_bodies.parsed(body, slowly)) for body in large]
    async with asyncio.timeout(20):
        while not began:
            await asyncio.sleep(0)
        assert await large_bodies.parsed(b"[]", len) == 2
        may_end.set()
        assert await asyncio.gather(*tasks) == [SMALL_BYTES + 1] * 3

    assert began == [1, 1, 1]


async def test_a_heartbeat_of_a_shard_may_be_larger_than_what_clients_send() -> None:
    """A shard lists all its partitions each second, and would be taken for dead if they did not fit the request."""

    async def sent(path: str, size: int) -> tuple[int, str]:
        body = b'{"epoch": 1}'.ljust(size)
        pieces, answer = [body], list[Message]()

        async def receive() -> Message:
            if pieces:
                return {"type": "http.request", "body": pieces.pop()}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            answer.append(message)

        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        scope = {"type": "http", "http_version": "1.1", "method": "PUT", "path": path, "query_string": b""}
        await app({**scope, "headers": headers}, receive, send)
        return answer[0]["status"], json.loads(answer[1]["body"])["code"]

    _, _, app = leading()
    async with asyncio.timeout(20):
        assert await sent("/internal/shards/s0", CONTROL_BODY_BYTES_MAX + 1) == (404, "unknown_node")
        assert await sent("/internal/shards/s0", SHARD_HEARTBEAT_BYTES_MAX + 1) == (413, "too_large")
        assert await sent("/models/m/workers/m/a", CONTROL_BODY_BYTES_MAX + 1) == (413, "too_large")
