"""Moves that outlast many commits, with the real cores of a scheduler and of two shards."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from paramserver.core.layout import Layout
from paramserver.core.scheduler import io
from paramserver.core.scheduler.core import SchedulerCore
from paramserver.core.shard.effects import Effect, LoadPartition, StoreSnapshot
from paramserver.core.shard.events import CommitDecided, ModelView
from paramserver.core.shard.partition import Partition
from paramserver.core.spec import ModelSpec
from paramserver.testing.shard_driver import InMemoryStore, ShardDriver

SPEC: dict[str, Any] = {
    "name": "m",
    "params": {"backbone": {"shape": [4]}, "head": {"shape": [4]}},
    "optimizer": {"name": "sum"},
    "consistency": {"mode": "sync"},
    "partitions": 2,
}


class Cluster:
    """A scheduler and two shards on one clock, and a worker that has nothing to push to the partition that moves."""

    def __init__(self, **fields: Any) -> None:
        self.now, self.number = 0.0, 0
        self.slow: tuple[type[Effect], ...] = ()
        """Effects that do not come to an end for now."""
        store = InMemoryStore()
        self.shards = {name: ShardDriver(store, eager=False, now=0.0) for name in ("s0", "s1")}
        self.resyncs = dict.fromkeys(self.shards, 0)
        self.scheduler = SchedulerCore.restore({}, 0.0, 1)
        for name in self.shards:
            self.ask(lambda n, name=name: io.JoinShard(n, name, [f"http://{name}:1"]))  # type: ignore[misc]
        self.wait(3.0)
        self.ask(lambda n: io.CreateModel(n, SPEC | fields, ""))
        self.wait(1.0)
        self.worker, self.clock = self.ask(lambda n: io.JoinWorker(n, "m"))["worker"], 0

    def ask(self, make: Callable[[int], io.Event]) -> Any:
        """Send a request; return its reply, None if it comes later."""
        self.number += 1
        number, reply = self.number, None
        for effect in self.scheduler.handle(make(number), self.now):
            if isinstance(effect, io.Publish):
                for name in self.shards:
                    self.tell(name, effect.document)
            elif isinstance(effect, io.Reply) and effect.request == number:
                reply = effect.outcome
        assert not isinstance(reply, Exception), reply
        return reply

    def tell(self, name: str, document: Mapping[str, Any]) -> None:
        """Send a shard a document of the feed."""
        driver = self.shards[name]
        driver.now = self.now
        if document["type"] == "model":
            spec = ModelSpec.parse(document["spec"])
            known = driver.core.models.get("m")
            driver.send(ModelView.from_document(document, name, spec, known.layout if known else Layout(spec)))
        elif document["type"] == "commit":
            driver.send(CommitDecided.from_document(document))

    def wait(self, seconds: float) -> None:
        """Let time pass, with heartbeats and ticks; shards get the whole feed again when they ask for it."""
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            self.ask(lambda n: io.Tick())
            for name, driver in self.shards.items():
                self.work(driver)
                rows = [[list(row) for row in rows()] for rows in (driver.core.partitions, driver.core.released)]
                cuts = [list(row) for row in driver.core.cuts()]
                self.ask(
                    lambda n, name=name, rows=rows, cuts=cuts: io.ShardHeartbeat(  # type: ignore[misc]
                        n, name, 1, partitions=rows[0], cuts=cuts, released=rows[1]
                    )
                )
                if driver.resyncs > self.resyncs[name]:
                    self.resyncs[name] = driver.resyncs
                    for document in self.ask(lambda n: io.OpenFeed(n))["documents"]:
                        self.tell(name, document)
                self.work(driver)

    def work(self, driver: ShardDriver) -> None:
        """Complete what a shard has to do, but for what is `slow`."""
        driver.now = self.now
        driver.advance(0.0)
        while due := [i for i, e in enumerate(driver.pending) if not isinstance(e, self.slow)]:
            driver.complete(due[0])

    def train(self, commits: int, hz: int = 10) -> None:
        """Have the worker finish that many iterations, `hz` a second."""
        for i in range(commits):
            self.clock += 1
            self.ask(lambda n: io.ReportClock(n, "m", self.worker, 1, self.clock, wait_s=0.0))
            if i % (hz // 2) == 0:
                self.wait(0.5)

    def move(self) -> Partition:
        """Move the partition of s0 to s1 during training: it takes 20 s to be stored, and more than 20 s to be loaded.

        Return it as s1 has it.
        """
        self.train(100)
        self.wait(1.0)  # until no cut is being stored
        (index,) = self.shards["s0"].core.models["m"].partitions
        self.slow = (StoreSnapshot,)
        self.ask(lambda n: io.SetShardState(n, "s0", "draining"))
        self.train(200)
        self.slow = (LoadPartition,)
        self.train(200)
        partition = self.shards["s1"].core.models["m"].partitions[index]
        assert partition.state is None
        self.slow = ()
        return partition


@pytest.mark.parametrize("ack", ["applied", "journaled"])
def test_a_partition_whose_move_outlasts_many_commits_takes_them_all(ack: str) -> None:
    """A partition's next owner gets also the commits that it did not keep as its own partitions had taken them."""
    c = Cluster(ack=ack)
    moved = c.move()

    c.wait(4.0)

    assert (moved.clock, moved.version) == (c.clock, c.clock)
    c.train(100)
    c.wait(10.0)
    model = c.scheduler.read.model("m")
    assert model["served"]
    assert model["cut"] == (c.clock if ack == "applied" else None)
    assert len(c.ask(lambda n: io.OpenFeed(n))["documents"][1]["commits"]) <= 301


@pytest.mark.parametrize("ack", ["applied", "journaled"])
def test_a_partition_that_moves_while_sync_ends_takes_the_commits_decided_before(ack: str) -> None:
    """The document by which a partition leaves sync brings all commits that it may lack, however many there are."""
    c = Cluster(ack=ack)
    moved = c.move()

    c.ask(lambda n: io.PatchModel(n, "m", {"consistency": {"mode": "async"}}))
    c.wait(4.0)

    assert (moved.spec.consistency.mode, moved.version) == ("async", c.clock)
    assert c.scheduler.read.model("m")["served"]
