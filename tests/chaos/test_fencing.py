"""A shard that was given up for dead, or is cut off, changes nothing behind its successor's back."""

import signal
import time
from collections.abc import Callable

import pytest

from .busy import JOURNALED, KINDS, Busy
from .checkers import stale
from .cluster import ChaosCluster, eventually
from .keeper import Plan

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(200)]

Start = Callable[..., Busy]


def owned(cluster: ChaosCluster, shard: str) -> list[tuple[str, int]]:
    """The partitions that the scheduler says this shard has."""
    out = []
    for name in cluster.client.models(timeout=10.0):
        out += [(name, p["index"]) for p in cluster.get(f"/models/{name}")["partitions"] if p["shard"] == shard]
    return out


def test_a_shard_paused_beyond_its_lease_is_fenced(start: Start) -> None:
    """While it stands still others take its partitions; awake again it serves none of them before it has asked."""
    run = start(Plan(shards=3))
    c = run.cluster
    assert owned(c, "shard-1")
    for _ in range(2):
        c.signal("shard-1", signal.SIGSTOP)
        eventually(lambda: not owned(c, "shard-1"), within_s=30.0, what="the fencing of the paused shard")
        c.until_progress()
        c.signal("shard-1", signal.SIGCONT)
        c.until_progress()
        c.until_healthy()
    run.finish()
    run.assert_kept(shards_died=True)
    for kind in KINDS:
        # Its successors had answered; not one pull after that came from it.
        assert stale(c.history().of(kind.name)) == []


@pytest.mark.parametrize(("link", "way"), [("redis", "there"), ("redis", "back"), ("scheduler-0", "there")])
def test_a_shard_cut_off_from_one_side(start: Start, link: str, way: str) -> None:
    """Without Redis it waits to acknowledge, without the scheduler another takes over; nothing is lost or doubled."""
    run = start(Plan(shards=2, proxied=True), JOURNALED)
    c = run.cluster
    c.cut(f"shard-0>{link}", way)  # type: ignore[arg-type]
    if link == "redis":
        before = c.progress()
        time.sleep(6.0)
        assert owned(c, "shard-0"), "a shard that the scheduler hears of keeps what it has"
        after = c.progress()
        # What needs its journal stands still, without an error and without an acknowledgement.
        assert all(after[k] - before[k] <= 3 for k in after), (before, after)
    else:
        eventually(lambda: not owned(c, "shard-0"), within_s=30.0, what="the fencing of the shard that is cut off")
        c.until_progress()
    c.heal()
    c.until_healthy()
    run.finish()
    run.assert_kept(shards_died=True)


def test_a_scheduler_cut_off_from_redis_decides_nothing(start: Start) -> None:
    """The leader behind a cut stands back, another leads, and healed there is still one."""
    run = start(Plan(shards=2, schedulers=2, proxied=True), JOURNALED)
    c = run.cluster
    leader = run.cluster.leader()
    c.cut(f"{leader}>redis")
    eventually(lambda: run.cluster.leader() != leader, within_s=15.0, what="another leader")
    c.until_progress()
    c.heal()
    c.until_healthy()
    assert run.cluster.leader() != leader
    run.finish()
    run.assert_kept(shards_died=True)
