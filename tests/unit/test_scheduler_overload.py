"""A scheduler that holds as many requests open, or has as many shards, as it may."""

import asyncio

import pytest
from tests.refusals import refused_with

from paramserver import limits
from paramserver.core.scheduler import io

from .leading import leading
from .scheduling import Driver


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


def test_a_shard_beyond_the_limit_is_refused_until_another_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many live shards as a cluster may have, one that is live may join again, and no other."""
    monkeypatch.setattr(limits, "SHARDS_MAX", 2)
    d = Driver("s0", "s1")
    with refused_with("too_many_requests", match="the cluster has 2 shards, which is the limit"):
        d.shard("s2")
    d.shard("s1")
    d.ask(lambda n: io.LeaveShard(n, "s1", d.shards.pop("s1")))
    d.shard("s2")
    with refused_with("too_many_requests"):
        d.shard("s1")
