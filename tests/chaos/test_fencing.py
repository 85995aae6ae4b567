"""A shard or leader that is cut off, or was replaced, loses nothing and does not interfere with its successor."""

import time
from collections.abc import Callable

import pytest
from tests.waiting import eventually

from .busy import JOURNALED, Busy
from .keeper import Plan
from .proxy import Way

pytestmark = [pytest.mark.process, pytest.mark.slow]

Start = Callable[..., Busy]


def test_one_way_cuts(start: Start) -> None:
    """A shard without Redis waits, one whose heartbeats are cut is replaced, one whose replies are cut serves on."""
    run = start(Plan(shards=2, proxied=True), JOURNALED)
    c = run.cluster
    ways: tuple[Way, ...] = ("there", "back")
    for way in ways:
        c.cut("shard-0>redis", way)
        time.sleep(0.5)  # lets operations in flight finish
        before = c.progress()
        time.sleep(5.5)
        after = c.progress()
        assert c.owned("shard-0"), "a shard that the scheduler hears of keeps what it has"
        # Pushes that need the journal wait, without an error; at most one per worker was still in flight.
        assert all(after[k] - before[k] <= 1 for k in after), (before, after)
        c.heal()
        c.until_healthy()
    c.cut("shard-0>scheduler-0", "there")
    eventually(lambda: not c.owned("shard-0"), what="the fencing of the shard that is cut off")
    c.until_progress()
    c.heal()
    c.until_healthy()
    c.cut("shard-0>scheduler-0", "back")
    time.sleep(6.0)
    c.until_progress(mode="async")  # commits, which the scheduler tells it of, wait
    assert c.owned("shard-0"), "it is heard, so it is alive"
    c.heal()
    c.until_healthy()
    run.finish()
    run.assert_kept(shards_died=True, acknowledged=20)


def test_connections_to_redis_that_are_reset(start: Start) -> None:
    """A network that resets all connections to Redis, idle ones too, ends no process and costs no one an error."""
    run = start(Plan(shards=2, schedulers=2, proxied=True), JOURNALED)
    c = run.cluster
    for _ in range(5):
        for link in c.links("redis"):
            c.reset(link)
        c.until_healthy()
    assert not any(c.process(name)["deaths"] for name in ("scheduler-0", "scheduler-1", "shard-0", "shard-1"))
    run.finish()
    run.assert_kept(shards_died=False, acknowledged=10)


def test_a_leader_cut_off_from_redis(start: Start) -> None:
    """A leader that is cut off from Redis is succeeded by another, which still leads after the link has healed."""
    run = start(Plan(shards=2, schedulers=2, proxied=True), JOURNALED)
    c = run.cluster
    leader = c.leader()
    c.cut(f"{leader}>redis")
    eventually(lambda: c.leader() != leader, what="another leader")
    c.until_progress()
    c.heal()
    c.until_healthy()
    assert c.leader() != leader
    run.finish()
    run.assert_kept(shards_died=True, acknowledged=10)


def test_a_shard_cut_off_from_the_leader_alone(start: Start) -> None:
    """A shard that reaches only a standby scheduler takes part in everything through it, in synchronous commits too."""
    run = start(Plan(shards=2, schedulers=2, proxied=True), JOURNALED)
    c = run.cluster
    ways: tuple[Way, ...] = ("there", "back", "both")
    for way in ways:
        c.cut(f"shard-0>{c.leader()}", way)
        c.until_progress(more=20)
        c.heal()
        c.until_healthy()
    run.finish()
    run.assert_kept(shards_died=False, acknowledged=60)


def test_connections_that_are_lost_without_a_word(start: Start) -> None:
    """If the network forgets a shard's connections to the only scheduler, steps are soon as fast as before.

    Without the shard's reports each synchronous step would take the two seconds after which its worker reports itself.
    """
    run = start(Plan(shards=2, proxied=True), JOURNALED)
    c = run.cluster
    for shard in ("shard-0", "shard-1"):
        c.lose(f"{shard}>scheduler-0")
        c.until_progress(more=25, mode="sync", within_s=40.0)
    run.finish()
    run.assert_kept(shards_died=False, acknowledged=60)


def test_a_leader_that_reaches_only_redis(start: Start) -> None:
    """A leader that no shard reaches, and a standby neither, is succeeded by the standby that shards do reach."""
    run = start(Plan(shards=2, schedulers=2, proxied=True), JOURNALED)
    c = run.cluster
    leader = c.leader()
    for source in ("shard-0", "shard-1", "any"):
        c.cut(f"{source}>{leader}")
    eventually(lambda: c.leader() != leader, what="another leader")
    c.until_progress()
    c.heal()
    c.until_healthy()
    assert c.leader() != leader
    run.finish()
    run.assert_kept(shards_died=False, acknowledged=10)
