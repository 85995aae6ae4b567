"""The scheduler's bounds on large bodies, apart from those that its routes' tests check."""

import asyncio
import threading

from paramserver_scheduler.large_bodies import SMALL_BYTES, LargeBodies


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
