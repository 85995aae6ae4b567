"""Training continues and finishes when a shard is killed."""

import threading

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

    def __init__(self, cluster: Cluster) -> None:
        self.client = ps.connect(cluster.url, timeout=60.0)
        consistency = ps.Sync(min_workers=WORKERS)
        self.client.create_model("count", {"w": (1000,)}, optimizer=ps.Sum(), consistency=consistency, partitions=8)
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

    def finish(self, *, more: int) -> None:
        """Let the workers run `more` clocks past the fastest, and stop all at that clock."""
        self.goal = max(self.progress) + more
        for t in self.threads:
            t.join(120)
            assert not t.is_alive(), f"a worker stands still; progress {self.progress}, errors {self.errors}"
        assert not self.errors, self.errors


def test_a_training_survives_the_kill_of_a_shard(own_cluster: Cluster) -> None:
    """A synchronous training by `step` finishes with exact sums though a shard is killed in the middle of it."""
    training = Training(own_cluster)
    training.start()
    eventually(lambda: training.reached(15), what="15 clocks")

    pid = own_cluster.kill("shards")
    eventually(lambda: own_cluster.replaced("shards", 0, pid), what="a new shard")
    training.finish(more=20)

    # The mean of ones is 1 per clock.  A client that is not a worker may pull before the last clock is committed.
    pull = training.client.model("count").pull
    eventually(lambda: set(pull()["w"].tolist()) == {training.goal}, what=f"clock {training.goal} everywhere")
