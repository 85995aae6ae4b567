"""A real process is killed at each named step of shard and scheduler, under load; afterwards every promise holds."""

from collections.abc import Callable, Iterator

import pytest

from paramserver_node.crash import POINTS, VARIABLE

from .busy import KINDS, Busy
from .cluster import chaos_cluster
from .keeper import Plan

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    """One cluster for all points: what a crash leaves behind is there for the next one."""
    with chaos_cluster(tmp_path_factory.mktemp("crashes"), Plan(shards=2)) as cluster:
        yield Busy(cluster, KINDS)


def drain(run: Busy) -> None:
    """Make the first shard give up what it has."""
    run.cluster.http.put(run.cluster.url + "/shards/shard-0", json={"state": "draining"}).raise_for_status()


def kill_the_other_shard(run: Busy) -> None:
    """Make the scheduler give partitions to somebody else."""
    run.cluster.kill("shard-1")


PROVOKED: dict[str, Callable[[Busy], None]] = {
    "shard.release_stored": drain,
    "scheduler.after_tokens": kill_the_other_shard,
}
"""What has to happen before a process comes by some points; the load alone leads to the others."""


@pytest.mark.parametrize("point", sorted(POINTS))
def test_a_process_dies_at(run: Busy, point: str) -> None:
    """The process kills itself there, is started again, and nothing acknowledged is lost or counts twice."""
    c = run.cluster
    victim = "shard-0" if point.startswith("shard.") else "scheduler-0"
    before = len(c.process(victim)["deaths"])
    provoke = PROVOKED.get(point)

    c.kill(victim, env={VARIABLE: point})
    if provoke is not None:
        c.until_healthy()
        provoke(run)
    c.end_of(victim, before + 1, within_s=60.0)
    log = (c.folder / "nodes" / f"{victim}.log").read_text()
    assert log.count(f"crash point {point}:") == 1, "it died of something else"

    if point == "shard.release_stored":
        c.http.put(c.url + "/shards/shard-0", json={"state": "active"}).raise_for_status()
    c.until_healthy()
    run.look()
    run.assert_kept(shards_died=True, acknowledged=1)
