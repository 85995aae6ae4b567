"""Bugs planted in a real shard: the load and the checkers of this folder notice each of them."""

import signal
import threading
from collections.abc import Iterator

import pytest

import paramserver as ps

from . import load
from .checkers import Verdict, judge
from .cluster import ChaosCluster, chaos_cluster, eventually
from .history import AFTER_ALL
from .keeper import Plan
from .load import Job
from .planted import BUGS

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(120)]

WORKERS = 3
"""The last one is kept for who comes late."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    """Two shards, the first of which gets the bugs."""
    with chaos_cluster(tmp_path_factory.mktemp("planted"), Plan(shards=2)) as running:
        yield running


def verdict(cluster: ChaosCluster, model: str) -> Verdict:
    """What the checkers say once the load has ended."""
    cluster.stop_load()
    cluster.look(Job(model, -1, WORKERS), AFTER_ALL)
    return judge(cluster.history().of(model), mode="async", durable=True)


def begin(cluster: ChaosCluster, model: str, bug: str | None) -> None:
    """Load on a new model of a cluster whose first shard has the bug; each push comes twice."""
    cluster.kill("shard-0", bug=bug)
    eventually(cluster.healthy, within_s=60.0, what="the restart")
    load.create(cluster.client, model, workers=WORKERS, mode="async", ack="journaled")
    pushers = range(WORKERS - 1)
    cluster.load([Job(model, i, WORKERS, joined=False, pause_s=0.01, deliveries=2) for i in pushers])
    cluster.until_progress(15)


def provoke(cluster: ChaosCluster, model: str, bug: str) -> None:
    """The fault at which the bug does its harm, if it needs one."""
    if bug == "acknowledge_early":
        cluster.kill("shard-0")
        eventually(cluster.healthy, within_s=60.0, what="the recovery")
    elif bug == "skip_the_token":
        with ps.connect(cluster.url, timeout=30.0) as client:
            # Somebody who has not heard of the new owner, and asks the old one.
            late = load.Load(Job(model, WORKERS - 1, WORKERS), cluster.url, cluster.recorder, threading.Event())
            late.prepare(client)
            assert late.push(client.model(model)) == "ok"
            cluster.signal("shard-0", signal.SIGSTOP)
            eventually(lambda: owners(cluster, model) == {"shard-1"}, what="the fencing of the paused shard")
            cluster.signal("shard-0", signal.SIGCONT)
            for _ in range(3):
                assert late.push(client.model(model)) == "ok"
        cluster.kill("shard-0")
        eventually(cluster.healthy, within_s=60.0, what="the recovery")


def owners(cluster: ChaosCluster, model: str) -> set[str]:
    """The shards that serve a model's partitions."""
    return {p["shard"] if p["served"] else "nobody" for p in cluster.get(f"/models/{model}")["partitions"]}


SHOWS = {
    "skip_the_window": "doubled",
    "apply_twice": "doubled",
    "tear": "torn",
    "acknowledge_early": "lost",
    "skip_the_token": "lost",
}


@pytest.mark.parametrize("bug", sorted(BUGS))
def test_a_planted_bug_turns_the_checkers_red(cluster: ChaosCluster, bug: str) -> None:
    """Each bug shows as what it does to the clients."""
    begin(cluster, bug, bug)
    provoke(cluster, bug, bug)

    found = verdict(cluster, bug)

    assert getattr(found, SHOWS[bug]), f"nobody noticed: {found}"
    cluster.client.model(bug).delete()


def test_without_a_bug_the_same_stays_green(cluster: ChaosCluster) -> None:
    """What the bugs were noticed by says nothing of a shard that has none."""
    begin(cluster, "fine", None)
    for bug in sorted(BUGS):
        provoke(cluster, "fine", bug)

    assert verdict(cluster, "fine").wrong == []
