"""A cluster that is begun anew at the address of an earlier one, whose workers and readers live on."""

import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tests.waiting import eventually

import paramserver as ps

from .cluster import Cluster, cluster, get, ones

pytestmark = pytest.mark.process

STEPS = 3


def created(running: Cluster, value: float, consistency: ps.Consistency) -> ps.Model:
    """Create a model that begins with this value and to which gradients are added."""
    first = {"w": np.full(4, value, np.float32)}
    return ps.connect(running.url).create_model("rec", first, optimizer=ps.Sum(), consistency=consistency)


@pytest.mark.parametrize(("consistency", "port"), [(ps.Async(), 31_800), (ps.Sync(), 31_900)], ids=["async", "sync"])
def test_a_worker_outlives_a_wiped_cluster(tmp_path: Path, consistency: ps.Consistency, port: int) -> None:
    """What a worker of the old cluster pushes and says is not taken for that of the new one's worker of the same id.

    Each push of that one counts, and it stays a member when the old one leaves.  A reader's ETag is stale.
    """
    state, at = tmp_path / "cluster", ("--port", str(port))  # the last blocks: others take the first that is free
    with cluster(state, shards=1, args=at) as running:
        old = created(running, 0.0, consistency).worker()
        old.__enter__()
        for _ in range(STEPS):
            old.pull()
            old.step(ones(4))
        tag = get(f"{running.url}/pull/rec/w").headers["etag"]
    shutil.rmtree(state)

    with cluster(state, shards=1, args=at) as running:
        model = created(running, 100.0, consistency)
        with model.worker(name="w0") as new:  # the old one may have joined first
            assert new.name == old.name
            for _ in range(STEPS):
                new.pull()
                new.step(ones(4))
            answer = get(f"{running.url}/pull/rec/w", {"if-none-match": tag})
            assert answer.status_code == 200
            for _ in range(STEPS):
                with suppress(ps.FencedError):  # once it has been told
                    old.pull()
                with pytest.raises(ps.FencedError):
                    old.step(ones(4))
                new.pull()
                assert not new.step(ones(4)).duplicate
            eventually(lambda: old.draining, what="the end of the old worker")
            old.__exit__(None, None, None)
            assert new.step(ones(4)).state != "dropped"
            assert new.pull()["w"].tolist() == [100.0 + 2 * STEPS + 1] * 4
            assert [(w["worker"], w["state"]) for w in model.workers()] == [("rec/w0", "active")]
