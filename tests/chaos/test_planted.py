"""The chaos load and checkers detect each bug planted in a real shard."""

import signal
import threading
from collections.abc import Iterator

import pytest
from tests.waiting import eventually

import paramserver as ps

from . import load
from .checkers import Verdict, judge
from .cluster import ChaosCluster, chaos_cluster
from .history import AFTER_ALL
from .keeper import Plan
from .load import Job
from .planted import BUGS

pytestmark = [pytest.mark.process, pytest.mark.slow]

WORKERS = 3
"""Two workers push all the time; the third number belongs to the stale client in `provoke`."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    """A cluster of two shards; the bugs are planted in the first."""
    with chaos_cluster(tmp_path_factory.mktemp("planted"), Plan(shards=2)) as running:
        yield running


def verdict(cluster: ChaosCluster, model: str) -> Verdict:
    """Stop the load and return the checkers' verdict."""
    cluster.stop_load()
    cluster.look(Job(model, -1, WORKERS), AFTER_ALL)
    return judge(cluster.history().of(model), mode="async", durable=True)


def begin(cluster: ChaosCluster, model: str, bug: str | None) -> None:
    """Restart the first shard with the bug and put a new model under load, with each push delivered twice."""
    cluster.kill("shard-0", bug=bug)
    eventually(cluster.healthy, within_s=60.0, what="the restart")
    load.create(cluster.client, model, workers=WORKERS, mode="async", ack="journaled")
    pushers = range(WORKERS - 1)
    cluster.load([Job(model, i, WORKERS, joined=False, pause_s=0.01, deliveries=2) for i in pushers])
    cluster.until_progress(15)


def provoke(cluster: ChaosCluster, model: str, bug: str) -> None:
    """Inject the fault that exposes the bug, if it needs one."""
    if bug == "acknowledge_early":
        cluster.kill("shard-0")
        eventually(cluster.healthy, within_s=60.0, what="the recovery")
    elif bug == "skip_the_token":
        with ps.connect(cluster.url, timeout=30.0) as client:
            # A client with a stale map, which keeps pushing to the old owner.
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
    """Return the shards that serve a model's partitions; `nobody` for a partition that is not served."""
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
    """Each planted bug is reported by the checkers as the violation it causes."""
    begin(cluster, bug, bug)
    provoke(cluster, bug, bug)

    found = verdict(cluster, bug)

    assert getattr(found, SHOWS[bug]), f"nobody noticed: {found}"
    cluster.client.model(bug).delete()


def test_without_a_bug_the_same_stays_green(cluster: ChaosCluster) -> None:
    """A shard without a bug passes the checkers under the same load and faults."""
    begin(cluster, "fine", None)
    for bug in sorted(BUGS):
        provoke(cluster, "fine", bug)

    assert verdict(cluster, "fine").wrong == []
