"""Training continues and finishes when any single server process is killed."""

import threading
from typing import Any

import numpy as np
import pytest
from tests.waiting import eventually

import paramserver as ps

from .cluster import Cluster

pytestmark = [pytest.mark.process, pytest.mark.slow]

WORKERS = 2
ENDLESS = 1 << 40


class Training:
    """Worker threads that push ones until clock `goal`, so that the values count the updates."""

    def __init__(self, cluster: Cluster, consistency: Any) -> None:
        self.client = ps.connect(cluster.url, timeout=60.0)
        self.model = self.client.create_model(
            "count", {"w": np.zeros(1000, np.float32)}, optimizer=ps.Sum(), consistency=consistency, partitions=8
        )
        self.goal = ENDLESS
        self.progress = [0] * WORKERS
        self.errors: list[BaseException] = []
        self.threads = [threading.Thread(target=self._work, args=(i,), daemon=True) for i in range(WORKERS)]

    def _work(self, index: int) -> None:
        try:
            with self.client.model("count").worker() as w:
                while w.clock_number < self.goal:
                    w.pull()
                    w.step({"w": np.ones(1000, np.float32)})
                    self.progress[index] = w.clock_number
        except BaseException as e:  # raised by the assertions below
            self.errors.append(e)

    def start(self) -> None:
        for t in self.threads:
            t.start()

    def reached(self, clock: int) -> bool:
        assert not self.errors, self.errors
        return min(self.progress) >= clock

    def finish(self, *, more: int) -> np.ndarray[Any, Any]:
        """Let the workers run `more` clocks past the fastest, stop all at that clock, and return the values."""
        self.goal = max(self.progress) + more
        for t in self.threads:
            t.join(120)
            assert not t.is_alive(), f"a worker stands still; progress {self.progress}, errors {self.errors}"
        assert not self.errors, self.errors
        return self.client.model("count").pull()["w"]


@pytest.mark.parametrize("victim", ["scheduler", "shards", "redis"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_training_survives_the_kill_of_any_process(own_cluster: Cluster, victim: str, mode: str) -> None:
    """Training finishes with exact sums though the scheduler, a shard or Redis is killed in the middle of it.

    In async mode, a killed shard may lose the updates since its last snapshot.
    """
    training = Training(own_cluster, ps.Sync(min_workers=WORKERS) if mode == "sync" else ps.Async())
    training.start()
    eventually(lambda: training.reached(15), what="15 clocks")

    pid = own_cluster.kill(victim)
    eventually(lambda: own_cluster.replaced(victim, 0, pid), what=f"a new {victim}")
    values = training.finish(more=20)

    if mode == "sync":
        # The mean of ones is 1 per clock.  A client that is not a worker may pull before the last clock is committed.
        pull = training.client.model("count").pull
        eventually(lambda: set(pull()["w"].tolist()) == {training.goal}, what=f"clock {training.goal} everywhere")
    elif victim == "shards":
        # With ack `applied`, a dead shard's partitions fall back to their last snapshot: at most what was pushed.
        assert 0 < values.min() <= values.max() <= training.goal * WORKERS
    else:
        assert values.min() == values.max() == training.goal * WORKERS
