"""A scheduler that holds as many requests open as it may."""

import asyncio

import pytest
from tests.refusals import refused_with

from paramserver import limits
from paramserver.core import scheduler_io as io

from .leading import leading


async def test_who_parks_as_many_requests_as_a_scheduler_holds_ends_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the maximum of requests waits, others are refused, but heartbeats are answered: leases go on."""
    monkeypatch.setattr(limits, "WAITERS_MAX", 1)
    runtime, *_ = leading()
    parked = asyncio.ensure_future(runtime.ask(lambda n: io.JoinShard(n, "s0", ["http://s0:1"])))
    await asyncio.sleep(0)

    with refused_with("too_many_requests"):
        await runtime.ask(lambda n: io.JoinShard(n, "s1", ["http://s1:1"]))
    beat = await runtime.ask(lambda n: io.ShardHeartbeat(n, "s0", 1))

    assert beat.body == {"state": "active"}
    assert not parked.done()
    parked.cancel()
