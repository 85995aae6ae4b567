"""Processes are killed, paused and restarted under load: nothing acknowledged is lost, and no push counts twice.

At `journaled` no acknowledged push is lost whatever dies; at `applied` none as long as no shard dies.  Nothing is
doubled at any level, no client sees an error, and no gradient is dropped but by a return to an earlier clock.
"""

import signal
from collections.abc import Callable

import pytest
from tests.waiting import eventually

from .busy import KINDS, Busy
from .checkers import stale
from .keeper import Plan

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]

Start = Callable[..., Busy]


def test_ten_shard_kills(start: Start) -> None:
    """Ten shard kills, some while another shard recovers and one shard twice in a row, break no promise."""
    run = start(Plan(shards=3))
    for victim, wait in zip((0, 1, 2, 0, 0, 1, 2, 1, 0, 2), (1, 1, 0, 1, 0, 1, 0, 1, 0, 1), strict=True):
        run.cluster.kill(f"shard-{victim}")
        if wait:
            run.cluster.until_healthy()
    run.finish()
    run.assert_kept(shards_died=True)


def test_five_scheduler_kills_and_five_redis_restarts(start: Start) -> None:
    """Kills of the leader and kills or stops of Redis, singly and both at once, lose nothing at any level."""
    run = start(Plan(shards=2, schedulers=2))
    c = run.cluster
    for i in range(5):
        c.kill(run.cluster.leader())
        if i < 3:
            c.until_healthy()
        c.signal("redis", signal.SIGTERM if i == 1 else signal.SIGKILL)
        c.until_healthy()
    run.finish()
    run.assert_kept(shards_died=False)


def test_ten_pauses(start: Start) -> None:
    """Pauses of shards, leader and Redis, short or beyond the lease, lose nothing; replaced shards answer no pull."""
    run = start(Plan(shards=3, schedulers=2))
    c = run.cluster
    stopped = ("shard-1", "shard-2")
    for shard in stopped:
        assert c.owned(shard)
        c.signal(shard, signal.SIGSTOP)
    eventually(lambda: not any(map(c.owned, stopped)), within_s=40.0, what="the fencing of both shards")
    c.until_progress()
    for shard in stopped:
        c.signal(shard, signal.SIGCONT)
    c.until_healthy()
    for who, seconds in (("shard-0", 1), ("shard-1", 2), ("redis", 2), ("leader", 2), ("leader", 5)):
        run.pause(c.leader() if who == "leader" else who, seconds)
        c.until_healthy()
    for who in ("shard-0", "shard-1", "redis"):
        run.pause(who, 0.5)
    c.until_healthy()
    run.finish()
    run.assert_kept(shards_died=True)
    for kind in KINDS:
        # Once a successor had answered, the paused shard answered no pull.
        assert stale(c.history().of(kind.name)) == []


def test_a_rolling_restart(start: Start) -> None:
    """Each process that is told to stop exits with status 0 within 25 s, and no level loses anything."""
    run = start(Plan(shards=2, schedulers=2))
    c = run.cluster
    for who in ("shard-0", "shard-1", "scheduler-0", "scheduler-1", "redis"):
        before = len(c.process(who)["deaths"])
        c.signal(who, signal.SIGTERM)
        ended = c.end_of(who, before, within_s=25.0)
        assert ended == 0, f"{who} did not end by itself, but with {ended}"
        c.until_healthy()
    run.finish()
    run.assert_kept(shards_died=False)


def test_anything_killed_twice_in_a_row(start: Start) -> None:
    """Killing a scheduler, Redis, a worker or a shard again as soon as it has restarted breaks no promise."""
    run = start(Plan(shards=2))
    c = run.cluster
    for name in ("scheduler-0", "redis", "worker", "shard-0"):
        for _ in range(2):
            if name == "worker":
                c.kill_load(1)
                c.load(run.jobs[1])
            else:
                c.kill(name)
                eventually(lambda n=name: c.process(n)["pid"], what=f"the restart of {name}")  # type: ignore[misc]
        c.until_healthy()
    run.finish()
    run.assert_kept(shards_died=True)
