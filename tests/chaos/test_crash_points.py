"""Real processes are killed at each crash point of shard and scheduler, under load; every promise holds.

One shard and the scheduler die repeatedly, each time at the next point of their list, while the other shard and the
load continue.  Each crash starts from the state that the previous one left behind.
"""

from collections.abc import Iterator

import pytest
from tests.waiting import eventually

from paramserver_node.crash import POINTS, VARIABLE

from .busy import KINDS, Busy
from .cluster import ChaosCluster, chaos_cluster
from .keeper import Plan

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]

DRAINED = "shard.release_stored"
"""The crash point that a shard reaches only when it hands over partitions."""
CRASH_S = 30.0
"""Longest time until a process reaches its next crash point."""


def hits(cluster: ChaosCluster, victim: str) -> list[str]:
    """Return the crash points at which a process has died, in order."""
    log = (cluster.folder / "nodes" / f"{victim}.log").read_text()
    return [line.split("crash point ")[1].split(":")[0] for line in log.splitlines() if "crash point " in line]


def crash(cluster: ChaosCluster, points: dict[str, list[str]]) -> None:
    """Make each process die at its points, one after the other, and wait until all have been hit."""
    for victim, names in points.items():
        cluster.kill(victim, env=[{VARIABLE: name} for name in names])
    within_s = CRASH_S * max(map(len, points.values()))
    wanted = {victim: set(names) for victim, names in points.items()}
    eventually(
        lambda: all(wanted[victim] <= set(hits(cluster, victim)) for victim in points),
        within_s=within_s,
        what=f"the crashes at {points}",
    )


def drain(cluster: ChaosCluster, state: str) -> bool:
    """Set the first shard's state (`draining` or `active`); return whether the scheduler accepted it."""
    return cluster.http.put(cluster.url + "/shards/shard-0", json={"state": state}, timeout=10.0).is_success


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    """Yield a cluster that has recovered from a crash at every point, with its load stopped."""
    with chaos_cluster(tmp_path_factory.mktemp("crashes"), Plan(shards=2)) as cluster:
        run = Busy(cluster, KINDS)
        ordinary = sorted(POINTS - {DRAINED})
        try:
            crash(
                cluster,
                {
                    "shard-0": [p for p in ordinary if p.startswith("shard.")],
                    "scheduler-0": [p for p in ordinary if p.startswith("scheduler.")],
                },
            )
        finally:
            print("reached:", hits(cluster, "shard-0"), hits(cluster, "scheduler-0"))
        cluster.until_healthy()
        cluster.kill("shard-0", env=[{VARIABLE: DRAINED}])
        cluster.until_healthy()
        eventually(
            # Moves after the restart may have reached the point already.
            lambda: DRAINED in hits(cluster, "shard-0") or (drain(cluster, "draining") and False),
            within_s=CRASH_S,
            what=f"the crash at {DRAINED}",
        )
        cluster.until_progress()
        eventually(lambda: drain(cluster, "active"), what="the shard's return")
        cluster.until_healthy()
        run.finish()
        yield run


@pytest.mark.parametrize("point", sorted(POINTS))
def test_a_process_has_died_at(crashed: Busy, point: str) -> None:
    """The process has killed itself exactly once at this crash point."""
    victim = "shard-0" if point.startswith("shard.") else "scheduler-0"
    assert hits(crashed.cluster, victim).count(point) == 1


def test_nothing_was_lost_or_doubled(crashed: Busy) -> None:
    """After a crash at every point, each acknowledged push counts once at the levels that promise it."""
    crashed.assert_kept(shards_died=True)
