"""The order of snapshots, while changes, cuts, moves, losses and failed writes come in any order.

Three models of one partition each: one is written when it has changed, one at cuts only, one has cuts and a journal.
"""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from paramserver.core.shard.effects import StoreSnapshot
from paramserver.core.shard.events import JournalLost, ModelView, SnapshotDone
from paramserver.core.shard.partition import Partition
from paramserver.testing.shard_driver import ShardDriver
from paramserver.types import PartitionKey, PushId

from .partitions import ROSTER, ones, spec

MODELS: dict[str, dict[str, Any]] = {
    "changed": {"ack": "applied"},
    "cuts": {"ack": "applied", "consistency": {"mode": "sync"}},
    "both": {"ack": "journaled", "consistency": {"mode": "sync"}},
}
models = st.sampled_from(sorted(MODELS))
synced = st.sampled_from(("both", "cuts"))


class Snapshots(RuleBasedStateMachine):
    """Whatever fails, in any order: all that should be stored is stored, and a write that fails holds up no other."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = ShardDriver()
        self.views: dict[str, ModelView] = {}
        for name, fields in MODELS.items():
            self.views[name] = self.driver.serve(spec(**fields, name=name), workers=ROSTER)
        self.driver.advance(10.0)
        self.driver.eager = False
        self.writing: list[StoreSnapshot] = []
        self.void: list[StoreSnapshot] = []
        """Those being written whose partition Redis has lost meanwhile."""
        self.failed_at: dict[PartitionKey, float] = {}
        self.suspended: set[PartitionKey] = set()
        self.unsynced: dict[PartitionKey, int] = {}
        """The lsn up to which each partition is to be on disk, until it is."""
        self.stored = {p.key: p.mark.stored for p in map(self.partition, MODELS)}
        """The lsn of the snapshot stored last."""
        self.owed_cuts: dict[PartitionKey, int] = {}
        """The clock of the newest cut that is to be stored, until it is."""
        self.seq = 0
        self.bad = ""

    # --- what happens

    @initialize(bad=models)
    def choose(self, bad: str) -> None:
        """Choose the partition that cannot be stored in the end."""
        self.bad = bad

    @rule()
    def push(self) -> None:
        """Change a partition."""
        self.pushed()

    @rule()
    def push_to_disk(self) -> None:
        """Change a partition, for a client that waits until this is on disk."""
        p = self.partition("changed")
        if not p.suspended:
            self.unsynced[p.key] = p.lsn + 1
            self.pushed(ack="fsynced")

    def pushed(self, **fields: Any) -> None:
        self.driver.view = self.views["changed"]
        self.driver.submit({0: ones()}, PushId("w", 1, self.seq), **fields)
        self.seq += 1
        self.look()

    @rule(name=synced, cut=st.booleans())
    def commit(self, name: str, cut: bool) -> None:
        """End a clock of a model in sync, perhaps with a cut."""
        clock = self.views[name].clock
        self.driver.view = self.views[name]
        self.driver.commit(clock, cut=cut)
        self.views[name] = replace(self.views[name], clock=clock + 1)
        p = self.partition(name)
        if cut and not p.suspended and p.cut is not None and p.cut.clock == clock + 1:
            self.owed_cuts[p.key] = p.cut.clock
        self.look()

    @rule(name=models)
    def suspend(self, name: str) -> None:
        """Ask for a partition, to move it; or call the move off."""
        self.seq += 1
        self.views[name] = replace(self.views[name], release={} if self.views[name].release else {0: self.seq})
        self.driver.send(self.views[name])
        self.look()

    @rule(name=models)
    def lose(self, name: str) -> None:
        """Notice that Redis was restarted without a partition, perhaps while it is being stored again."""
        p = self.partition(name)
        self.driver.send(JournalLost(p.key, p.token, restarted=True))
        self.stored.pop(p.key, None)
        self.void += [w for w in self.writing if w.capture.key == p.key]
        if p.by_cuts and p.cut is not None and not p.suspended:
            self.owed_cuts[p.key] = p.cut.clock
        self.look()

    @rule(seconds=st.sampled_from((0.1, 0.5, 1.0, 6.0)))
    def pass_time(self, seconds: float) -> None:
        """Let time pass."""
        self.wait(seconds)

    def wait(self, seconds: float) -> None:
        """Advance the time from deadline to deadline."""
        end = self.driver.now + seconds
        while self.driver.now < end:
            at = self.driver.core.deadline()
            self.driver.advance(min(end, end if at is None else max(at, self.driver.now)) - self.driver.now)
            self.look()

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), stored=st.booleans())
    def end(self, data: st.DataObject, stored: bool) -> None:
        """End a write, stored or not."""
        self.ended(data.draw(st.sampled_from(self.writing)), stored)

    def ended(self, store: StoreSnapshot, stored: bool) -> None:
        """End this write."""
        capture = store.capture
        counts = all(store is not v for v in self.void)
        self.writing = [w for w in self.writing if w is not store]
        if stored:
            if counts:
                assert capture.lsn >= self.stored.get(capture.key, 0), "an older state took the place of a newer one"
                self.stored[capture.key] = capture.lsn
                if store.cut and capture.clock >= self.owed_cuts.get(capture.key, 0):
                    self.owed_cuts.pop(capture.key, None)
                if store.fsync and capture.lsn >= self.unsynced.get(capture.key, 0):
                    self.unsynced.pop(capture.key, None)
            for event in self.driver.result(store):
                self.driver.send(event)
        else:
            if counts:
                self.failed_at[capture.key] = self.driver.now
            self.driver.send(SnapshotDone(capture.key, capture.token, False, store.urgent))
        self.look()

    # --- what must hold

    def partition(self, name: str) -> Partition:
        return self.driver.core.models[name].partitions[0]

    def look(self) -> None:
        """Complete all but snapshots, and note the snapshots that have begun."""
        for p in map(self.partition, MODELS):
            if p.suspended != (p.key in self.suspended):  # all that was due is forgotten
                self.suspended ^= {p.key}
                self.failed_at.pop(p.key, None)
                self.owed_cuts.pop(p.key, None)
                if not p.mark.waiting and self.unsynced.pop(p.key, 0):  # but for what is under way
                    under_way = (w.capture for w in self.writing if w.fsync)
                    self.unsynced |= {c.key: c.lsn for c in under_way if c.key == p.key}
        while self.driver.pending:
            store = self.driver.pending[0]
            if not isinstance(store, StoreSnapshot):
                self.driver.complete()
                continue
            key = store.capture.key
            assert self.driver.now >= self.failed_at.get(key, -1.0) + 0.999, "it failed less than a second ago"
            assert all(w.capture.key != key and w.urgent != store.urgent for w in self.writing)
            assert not store.fsync or key in self.unsynced, "nobody asked for it to be on disk"
            self.writing.append(store)
            del self.driver.pending[0]

    @invariant()
    def nothing_is_due_that_is_not_being_written(self) -> None:
        at = self.driver.core.deadline()
        assert at is None or at > self.driver.now

    @invariant()
    def what_may_be_taken_over_is_the_newest_that_is_stored(self) -> None:
        for row in self.driver.core.released():
            p = self.partition(row.model)
            assert self.stored[p.key] == p.lsn

    def teardown(self) -> None:
        """A partition that cannot be stored holds up no other; once it can be, all is stored and nothing is due."""
        self.settle(12.0, self.bad)
        for name in MODELS.keys() - {self.bad}:
            self.assert_settled(self.partition(name))
        self.settle(20.0)
        for name in MODELS:
            self.assert_settled(self.partition(name))
        assert not self.unsynced
        assert self.driver.core.deadline() is None

    def settle(self, seconds: float, bad: str | None = None) -> None:
        """Let time pass while all that is being written is stored at once, except of the `bad` partition."""
        end = self.driver.now + seconds
        while self.driver.now < end:
            for store in list(self.writing):
                self.ended(store, store.capture.key.model.name != bad)
            self.wait(0.1)

    def assert_settled(self, p: Partition) -> None:
        """Assert that all that should be stored of a partition is stored."""
        assert not p.suspended or p.released
        assert p.by_cuts or p.lsn == self.stored.get(p.key, 0)
        assert p.mark.rebase is None
        assert p.key not in self.owed_cuts


TestSnapshots = Snapshots.TestCase
TestSnapshots.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, report_multiple_bugs=False)
