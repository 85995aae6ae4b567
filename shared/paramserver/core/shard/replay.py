"""Replay of a partition's journal on top of a snapshot; pure, except for the computing of tasks.

Replay uses the numbers stored in the entries, never the time, the roster or the scheduler, and gives the same bytes. An
entry that does not follow from the state before it raises CorruptState; it is never skipped.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from paramserver.core.commit import Contribution
from paramserver.core.layout import Layout
from paramserver.core.partition_state import HeldPart, LoadedState, PartitionState
from paramserver.core.settings import spec_from_document
from paramserver.core.shard.effects import AssignTask, Task
from paramserver.core.shard.events import AssignPart, TaskResult
from paramserver.core.shard.journal import JournalEntry
from paramserver.core.shard.partition import Partition
from paramserver.core.shard.update import mean_task, single_task
from paramserver.core.spec import ModelSpec
from paramserver.errors import CorruptState, PsError, problem
from paramserver.types import PartitionKey, PushId

Compute = Callable[[Task], TaskResult]
"""Computes one task into new buffers."""


class Replay:
    """The replay of one partition, from a snapshot to its last journal entry."""

    def __init__(
        self, key: PartitionKey, loaded: LoadedState, spec: ModelSpec, layout: Layout, compute: Compute
    ) -> None:
        """`loaded`: a snapshot or the initial values; `spec`: any revision, as only what never changes is used."""
        self._p = Partition.of(key, 0, layout, spec, 0)
        self._p.load(loaded)
        self._known = loaded.settings is not None
        self._bytes = 0
        self._compute = compute
        self._steps: dict[str, Callable[[JournalEntry], None]] = {
            "push": self._push,
            "hold": self._hold,
            "commit": self._commit,
            "flush": self._flush,
            "config": self._config,
            "set": self._set,
            "drop": self._drop,
        }

    @property
    def lsn(self) -> int:
        """Number of the last command in the state."""
        return self._p.lsn

    def add(self, entry: JournalEntry) -> None:
        """Execute the next entry again; entries that the snapshot already contains are ignored.

        Raises CorruptState (`corrupt_state`) for a gap, an unknown kind, or contents that do not fit the state.
        """
        p = self._p
        if entry.lsn <= p.lsn:
            return
        if entry.lsn != p.lsn + 1:
            raise self._broken(entry, f"entries {p.lsn + 1} to {entry.lsn - 1} are missing")
        step = self._steps.get(entry.kind)
        if step is None or (not self._known and entry.kind != "config"):
            raise self._broken(entry, f"unexpected kind '{entry.kind}'")
        try:
            step(entry)
        except CorruptState:
            raise
        except (PsError, KeyError, IndexError, TypeError, ValueError) as error:
            raise self._broken(entry, f"{type(error).__name__}: {error}") from error
        p.lsn = entry.lsn
        self._bytes += entry.nbytes
        if p.version != entry.head.get("version"):
            recorded = entry.head.get("version")
            raise self._broken(entry, f"replaying it gives version {p.version}, but it records {recorded}")

    def result(self) -> LoadedState:
        """The partition after the last entry."""
        loaded = replace(LoadedState.of(self._p.capture()), replayed_bytes=self._bytes)
        return loaded if self._known else replace(loaded, stored=False, settings=None)

    def _broken(self, entry: JournalEntry, why: str) -> PsError:
        return problem("corrupt_state", f"journal entry {entry.lsn} of partition {self._p.key}: {why}")

    # --- one per kind of entry, as the operations executed it

    def _remember(self, head: Mapping[str, Any], version: int, late: bool = False) -> None:
        push_id = None if head["id"] is None else PushId(*head["id"])
        self._p.memory.record(push_id, head["key"], head["crc"], version, late)

    def _publish(self, state: PartitionState | None) -> None:
        if state is None:
            raise problem("corrupt_state", f"replay gives a non-finite value in partition {self._p.key}")
        self._p.state = state
        self._p.version += 1

    def _push(self, entry: JournalEntry) -> None:
        head, (data,) = entry.head, entry.arrays
        task = single_task(self._p.update_input(), data, head["dtype"], head["ranges"], head["scale"], head["rate"])
        self._remember(head, self._p.version + 1)
        self._publish(self._compute(task).state)

    def _hold(self, entry: JournalEntry) -> None:
        head, p = entry.head, self._p
        self._remember(head, p.version, head["late"])
        if head["late"]:
            return
        worker, epoch = ("", 0) if head["id"] is None else head["id"][:2]
        base = None if head["base"] is None else (head["base"][0], head["base"][1])
        (data,) = entry.arrays
        held = HeldPart(
            worker, epoch, head["clock"], head["seq"], base, head["scale"], head["ranges"], data, head["dtype"]
        )
        if p.spec.consistency.mode == "sync":
            p.stage(held)
        else:
            p.buffered.append(held)

    def _commit(self, entry: JournalEntry) -> None:
        head, p = entry.head, self._p
        contributions = [Contribution.of(row) for row in head["contributions"]]
        assert p.state is not None
        state: PartitionState | None = p.state
        if head["applied"]:
            state = self._mean(p.listed(contributions), head, len(contributions))
        p.end_clock(contributions, head["t"])
        self._publish(state)

    def _flush(self, entry: JournalEntry) -> None:
        if entry.head["applied"]:
            self._publish(self._mean(self._p.unapplied, entry.head, self._p.contributions))
        self._p.drop_unapplied()

    def _mean(self, held: list[HeldPart], head: Mapping[str, Any], divisor: float) -> PartitionState | None:
        parts = list(zip(held, head["weights"], strict=True))
        return self._compute(mean_task(self._p.update_input(), parts, divisor, head["rate"])).state

    def _config(self, entry: JournalEntry) -> None:
        head, p = entry.head, self._p
        spec, revision = spec_from_document(p.spec, head["settings"], p.segments)
        if head["unstage"]:
            p.drop_staged()
        if not p.adopt(spec, revision, p.live_workers) and head["fresh"]:
            p.fresh_slots()
        p.clock = head["clock"]
        self._known = True

    def _set(self, entry: JournalEntry) -> None:
        head, p = entry.head, self._p
        data, *slots = entry.arrays
        assert p.state is not None
        steps = None if head["steps"] is None else tuple(head["steps"])
        part = AssignPart(p.index, data, head["dtype"], True, head["ranges"], tuple(slots) or None, steps)
        state = self._compute(AssignTask(p.key, p.state, part)).state
        if state is None:
            raise problem("corrupt_state", f"replay gives a non-finite value in partition {p.key}")
        p.state = p.assigned(part, state)
        least = head["least"]
        initial = max(p.version, least)  # while the model lacked initial values
        p.version = initial if head["version"] == initial else max(p.version + 1, least)
        if head["restore"]:
            p.drop_unapplied()

    def _drop(self, entry: JournalEntry) -> None:
        self._p.drop([(worker, epoch, clock) for worker, epoch, clock in entry.head["slots"]])


def replay(
    key: PartitionKey,
    loaded: LoadedState,
    entries: Iterable[JournalEntry],
    spec: ModelSpec,
    layout: Layout,
    compute: Compute,
) -> LoadedState:
    """Return the partition after all these entries; see `Replay`."""
    run = Replay(key, loaded, spec, layout, compute)
    for entry in entries:
        run.add(entry)
    return run.result()
