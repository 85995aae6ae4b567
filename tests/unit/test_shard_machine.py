"""The shard's core against a sequential model, with duplicates, reordering and crashes while jobs are in flight.

Every push adds its own power of two, so a value shows which pushes it contains and that none counts twice.
"""

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from paramserver.core.commit import Contribution
from paramserver.core.shard.effects import LoadPartition, PullDone, PushDone
from paramserver.core.shard.events import ModelView, StorageChanged
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError
from paramserver.testing.shard_driver import InMemoryStore, ShardDriver
from paramserver.types import F32, PushId

PARTITIONS = 3
PUSHES = 20  # sums of distinct powers of two up to 2^20 are exact in float32
WORKERS = ("a", "b")
parts_of_a_push = st.sets(st.integers(0, PARTITIONS - 1), min_size=1)


def model(ack: str) -> ModelSpec:
    return ModelSpec.parse(
        {
            "name": "m",
            "params": {"w": {"shape": [PARTITIONS]}},
            "optimizer": {"name": "sum"},
            "partitions": PARTITIONS,
            "ack": ack,
        }
    )


class AsyncShard(RuleBasedStateMachine):
    """Level `applied`: pushes in any order and number; jobs complete in any order, or die with the process."""

    ACK = "applied"
    REFUSALS: frozenset[str] = frozenset(("wrong_owner", "loading"))
    """Codes of allowed refusals: the partition has another owner, or takes too long to move."""

    def __init__(self) -> None:
        super().__init__()
        self.store = InMemoryStore()
        self.token = 1
        self.sent: list[tuple[PushId, frozenset[int]]] = []
        self.open: dict[int, int] = {}
        """Request -> index into `sent`."""
        self.acked: list[dict[int, int]] = [{} for _ in range(PARTITIONS)]
        """For each partition: push -> version it was answered with, in this incarnation."""
        self.versions = [0] * PARTITIONS
        self.release_number = 0
        self.unseeded: set[int] = set()
        """Partitions that may not have been stored again since Redis was emptied."""
        self.start()

    def start(self) -> None:
        self.driver = ShardDriver(self.store)
        owned = {i: self.token for i in range(PARTITIONS)}
        self.driver.serve(model(self.ACK), owned=owned, source="init" if self.token == 1 else "snapshot")
        self.driver.eager = False
        self.open.clear()
        self.versions = [self.driver.pull(i).version for i in range(PARTITIONS)]

    @initialize()
    def begin(self) -> None:
        """Send a first push, so that every rule can run."""
        self.new_push("a", {0})

    @precondition(lambda self: len(self.sent) < PUSHES)
    @rule(worker=st.sampled_from(WORKERS), parts=parts_of_a_push)
    def new_push(self, worker: str, parts: set[int]) -> None:
        """Send a new push."""
        self.sent.append((PushId(worker, 1, len(self.sent)), frozenset(parts)))
        self.deliver(len(self.sent) - 1)

    @rule(data=st.data())
    def again(self, data: st.DataObject) -> None:
        """Deliver an earlier push once more."""
        self.deliver(data.draw(st.integers(0, len(self.sent) - 1)))

    def deliver(self, index: int) -> None:
        push_id, parts = self.sent[index]
        grads = {i: np.full(1, 2.0**index, np.float32) for i in sorted(parts)}
        self.open[self.driver.submit(grads, push_id)] = index
        self.collect()

    @precondition(lambda self: self.driver.pending)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        """Complete one pending effect, in any order."""
        self.driver.complete(data.draw(st.integers(0, len(self.driver.pending) - 1)))
        self.collect()

    @rule()
    def pass_time(self) -> None:
        """Let snapshots become due."""
        self.driver.advance(6.0)
        self.collect()

    @rule()
    def crash(self) -> None:
        """Kill the process with everything in flight; another continues from the stored snapshots."""
        self.token += 1
        stored = self.stored()
        self.start()
        for i in range(PARTITIONS):
            self.recovered(i, stored)

    def stored(self) -> set[int]:
        """Return the partitions of which Redis has a snapshot."""
        return {key.index for key in self.store.kept}

    def recovered(self, index: int, stored: set[int]) -> None:
        """Forget acknowledged pushes that a reloaded partition lacks; at this level those in no snapshot are lost."""
        held = self.holds(index)
        self.acked[index] = {k: v for k, v in self.acked[index].items() if k in held}

    @rule(index=st.integers(0, PARTITIONS - 1))
    def lose_and_regain(self, index: int) -> None:
        """Lose one partition, and load it again from its snapshot under a newer token."""
        stored = self.stored()
        self.tell(owned={k: v for k, v in self.view.owned.items() if k != index})
        self.regain(index)
        self.recovered(index, stored)
        self.collect()

    @property
    def view(self) -> ModelView:
        assert self.driver.view is not None
        return self.driver.view

    def tell(self, **changes: Any) -> None:
        """Send the shard a changed document of the model."""
        self.driver.send(replace(self.view, **changes))

    def regain(self, index: int) -> None:
        """Own the partition under a new token, and load it."""
        self.token += 1
        release, renewed = (
            {k: v for k, v in m.items() if k != index} for m in (self.view.release, self.view.kept_from)
        )
        owned = dict(self.view.owned) | {index: self.token}
        self.tell(owned=owned, source="snapshot", release=release, kept_from=renewed)
        loads = [i for i, e in enumerate(self.driver.pending) if isinstance(e, LoadPartition)]
        self.driver.complete(loads[-1])
        self.versions[index] = self.driver.pull(index).version

    @rule(index=st.integers(0, PARTITIONS - 1))
    def ask_release(self, index: int) -> None:
        """Request that a partition be handed over."""
        self.release_number += 1
        self.tell(release=dict(self.view.release) | {index: self.release_number})
        self.collect()

    @precondition(lambda self: self.view.release)
    @rule(data=st.data())
    def call_off(self, data: st.DataObject) -> None:
        """Call off a requested handover."""
        index = data.draw(st.sampled_from(sorted(self.view.release)))
        self.tell(release={k: v for k, v in self.view.release.items() if k != index})
        self.collect()

    @precondition(lambda self: any(self.driver.core.released()))
    @rule()
    def hand_over(self) -> None:
        """Give released partitions to their next owner, which must have every acknowledged push, at any level."""
        for row in list(self.driver.core.released()):
            assert (row.token, row.release) == (self.view.owned[row.partition], self.view.release[row.partition])
            self.regain(row.partition)
            assert self.versions[row.partition] == row.version
            assert set(self.acked[row.partition]) <= self.holds(row.partition)
        self.collect()

    @rule()
    def redis_is_emptied(self) -> None:
        """Empty Redis: owners keep their state under new tokens and store it again; writes in flight are refused."""
        self.driver.store = self.store = InMemoryStore()
        self.token += 1
        self.tell(owned=dict.fromkeys(self.view.owned, self.token), kept_from=dict(self.view.owned), source="snapshot")
        self.unseeded = set(range(PARTITIONS))
        self.collect()

    def holds(self, partition: int) -> set[int]:
        """Return the pushes contained in the partition's value; a push applied twice would read as another push."""
        value = int(self.driver.values(partition)[0])
        return {k for k in range(PUSHES) if value >> k & 1}

    def collect(self) -> None:
        """Compare every new answer with earlier answers to the same push."""
        for request, index in list(self.open.items()):
            outcome = self.driver.replies.get(request)
            if outcome is None:
                continue
            del self.open[request]
            if isinstance(outcome, PsError):
                assert outcome.code in self.REFUSALS, outcome
                continue
            assert isinstance(outcome, PushDone)
            assert outcome.version == min(p.version for p in outcome.parts)
            for part in outcome.parts:
                first = self.acked[part.partition].setdefault(index, part.version)
                assert part.version == first, "a duplicate was answered with another version"

    @invariant()
    def values_hold_what_was_acknowledged(self) -> None:
        """The value contains every acknowledged push of this incarnation, and the version counts the pushes in it."""
        for i in range(PARTITIONS):
            if self.driver.core.models["m"].partitions[i].released:
                continue  # no pull is answered
            pulled = self.driver.pull(i)
            assert isinstance(pulled, PullDone)
            held = self.holds(i)
            assert set(self.acked[i]) <= held
            assert all(i in self.sent[k][1] for k in held)
            assert pulled.version == len(held)
            assert pulled.version >= self.versions[i]
            self.versions[i] = pulled.version

    def teardown(self) -> None:
        """Once all effects have completed, no request, held part or queued journal byte is left."""
        self.tell(release={})
        for _ in range(2):
            self.driver.settle()
            self.driver.advance(1.0)
        self.collect()
        assert not self.open
        assert self.driver.core.waiting == 0
        assert self.driver.core.held_bytes == 0
        assert self.driver.core.durability.queued_bytes == 0


class JournaledShard(AsyncShard):
    """Level `journaled`: whatever dies, no acknowledged push is lost and none is applied twice."""

    ACK = "journaled"
    REFUSALS = AsyncShard.REFUSALS | {"storage_unavailable"}

    def recovered(self, index: int, stored: set[int]) -> None:
        """Require every acknowledged push, unless Redis was emptied and the partition not yet stored again."""
        if index in self.unseeded - stored:
            super().recovered(index, stored)
        self.unseeded.discard(index)
        assert set(self.acked[index]) <= self.holds(index)

    @rule(reason=st.sampled_from(("", "Redis does not answer")))
    def storage(self, reason: str) -> None:
        """Redis goes away, or comes back."""
        self.driver.send(StorageChanged(reason))


class SyncShard(RuleBasedStateMachine):
    """Pushes and commits of four clocks in any order and number give the same bytes as without reordering."""

    CLOCKS = 4

    def __init__(self) -> None:
        super().__init__()
        spec = ModelSpec.parse(
            {
                "name": "m",
                "params": {"w": {"shape": [2]}},
                "optimizer": {"name": "adam", "lr": 0.1},
                "consistency": {"mode": "sync"},
                "partitions": 1,
            }
        )
        self.roster = {f"r/{w}": 1 for w in WORKERS}
        self.driver = ShardDriver()
        self.driver.serve(spec, workers=self.roster)
        self.straight = ShardDriver()
        self.straight.serve(spec, workers=self.roster)
        self.committed = 0
        self.decided = 0
        self.delivered: set[tuple[str, int, int]] = set()

    def gradient(self, worker: str, clock: int, seq: int) -> F32:
        rng = np.random.default_rng([ord(worker[-1]), clock, seq])
        return rng.standard_normal(2).astype(np.float32)

    def push(self, driver: ShardDriver, worker: str, clock: int, k: int) -> PushDone:
        push_id = PushId(worker, 1, clock * 2 + k)
        return driver.push({0: self.gradient(worker, clock, k)}, push_id, clock=clock)

    @rule(worker=st.sampled_from(WORKERS), ahead=st.integers(0, 1), k=st.integers(0, 1))
    def deliver(self, worker: str, ahead: int, k: int) -> None:
        """Deliver one of a worker's two pushes of the open or the next clock, perhaps not for the first time."""
        item = (f"r/{worker}", self.decided + ahead, k)
        done = self.push(self.driver, *item)
        assert done.duplicate == (item in self.delivered)
        self.delivered.add(item)

    @precondition(lambda self: self.decided < SyncShard.CLOCKS)
    @rule()
    def decide(self) -> None:
        """Decide a commit of the workers whose two pushes were delivered, and apply it on the reference shard."""
        t = self.decided
        ready = [w for w in self.roster if {(w, t, 0), (w, t, 1)} <= self.delivered]
        for worker in ready:
            for k in (0, 1):
                self.push(self.straight, worker, t, k)
        contributions = tuple(Contribution(w, 1, i, t) for i, w in enumerate(self.roster) if w in ready)
        self.straight.commit(t, *contributions)
        self.lists = {**getattr(self, "lists", {}), t: contributions}
        self.decided += 1

    @precondition(lambda self: self.decided > 0)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """Deliver any decided commit: early, late or once more."""
        t = data.draw(st.integers(0, self.decided - 1))
        self.driver.commit(t, *reversed(self.lists[t]))

    def teardown(self) -> None:
        """Once all commits have arrived, both shards have the same bytes."""
        for t in range(self.decided):
            self.driver.commit(t, *self.lists[t])
        ours, theirs = (d.pull(0).parts[0] for d in (self.driver, self.straight))
        assert ours.version == theirs.version == self.decided
        assert ours.state.values.tobytes() == theirs.state.values.tobytes()
        assert [s.tobytes() for s in ours.state.slots] == [s.tobytes() for s in theirs.state.slots]
        assert ours.state.steps == theirs.state.steps


TestAsyncShard = AsyncShard.TestCase
TestAsyncShard.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestJournaledShard = JournaledShard.TestCase
TestJournaledShard.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestSyncShard = SyncShard.TestCase
TestSyncShard.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
