"""Which snapshots of a partition the store of tests and of the simulation keeps, by the rule of the real one."""

import numpy as np

from paramserver.core.layout import Layout
from paramserver.core.partition_state import Capture, PartitionState
from paramserver.core.shard.effects import LoadPartition, StoreSnapshot
from paramserver.core.shard.journal import JournalEntry
from paramserver.testing.shard_driver import InMemoryStore
from paramserver.types import ModelKey, PartitionKey

from .partitions import spec

KEY = PartitionKey(ModelKey("m", 1), 0)


def save(store: InMemoryStore, clock: int, *, cut: bool, pinned: int | None) -> None:
    """Store the state at a clock, after as many commands."""
    state = PartitionState(np.full(4, clock, np.float32), (), (clock,))
    store.append(JournalEntry(KEY, 1, clock, "commit", {}))
    store.save(StoreSnapshot(Capture(state, clock, clock, lsn=clock, key=KEY, token=1), cut), pinned)


def test_a_whole_state_displaces_no_cut_that_may_count() -> None:
    """Beside a whole state the pinned cut and another one can be loaded, until another cut is stored.

    The journal begins after the oldest of them.
    """
    store, model = InMemoryStore(), spec()
    save(store, 1, cut=True, pinned=None)
    save(store, 2, cut=True, pinned=1)
    for clock in (3, 4):
        save(store, clock, cut=False, pinned=1)

        assert [c.clock for c in store.kept[KEY]] == [clock, 2, 1]
        for at in (2, 1):
            assert store.load(LoadPartition(KEY, 2, at, model, Layout(model))).clock == at
        assert [e.lsn for e in store.journals[KEY]] == [*range(2, clock + 1)]

    save(store, 5, cut=True, pinned=2)
    assert [c.clock for c in store.kept[KEY]] == [5, 2]
    assert sorted(store.cuts) == [(KEY, 2), (KEY, 5)]
    assert [e.lsn for e in store.journals[KEY]] == [3, 4, 5]


def test_a_cut_that_is_stored_again_displaces_no_older_one() -> None:
    """If Redis has lost the pinned cut, it may have lost that it counts, so that the one before is gone back to."""
    store = InMemoryStore()
    save(store, 1, cut=True, pinned=None)
    save(store, 2, cut=True, pinned=1)
    save(store, 2, cut=True, pinned=2)
    assert [c.clock for c in store.kept[KEY]] == [2, 1]
    for clock in (3, 4):
        save(store, clock, cut=False, pinned=2)
        assert [c.clock for c in store.kept[KEY]] == [clock, 2, 1]
    save(store, 5, cut=True, pinned=2)
    assert [c.clock for c in store.kept[KEY]] == [5, 2]
