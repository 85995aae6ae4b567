"""Runs a `ShardCore` in memory, with real kernels and a store that outlives it; tests decide when effects complete.

    store = InMemoryStore()
    driver = ShardDriver(store)
    driver.serve(spec)                       # all partitions, version 0
    outcome = driver.push({0: gradient})     # or send(event), then complete(i) in any order
    driver.advance(6.0)                      # advance the clock, with ticks when they are due
    ShardDriver(store)                       # a crash: only the store survives

Loads, jobs, snapshots and journals wait in `pending` until `complete` is called; with `eager` they complete at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from paramserver import kernels
from paramserver.core.commit import Commit, Contribution
from paramserver.core.layout import Layout, Range
from paramserver.core.partition_state import Capture, LoadedState, PartitionState
from paramserver.core.ranges import RangeArray, elements, of_pairs, union
from paramserver.core.settings import model_settings_document
from paramserver.core.shard.core import ShardCore
from paramserver.core.shard.effects import (
    Apply,
    AskWorker,
    AssignTask,
    Effect,
    Journal,
    LoadPartition,
    Outcome,
    PullDone,
    PushDone,
    Reply,
    Report,
    Resync,
    StoreSnapshot,
    Task,
    ValuesKept,
)
from paramserver.core.shard.events import (
    Applied,
    CommitDecided,
    Event,
    Journaled,
    JournalLost,
    JournalRefused,
    ModelView,
    PartitionLoaded,
    PullReceived,
    PushPart,
    PushReceived,
    SnapshotDone,
    TaskResult,
    Tick,
    WorkerAnswered,
)
from paramserver.core.shard.initial import first_state
from paramserver.core.shard.journal import JournalEntry
from paramserver.core.shard.replay import replay
from paramserver.core.shard.retention import KEPT, kept_snapshots
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError
from paramserver.types import F32, AnyArray, DType, ModelKey, PartitionKey, PushId, Token
from paramserver.wire.tensor import slice_crc, to_f32


class InMemoryStore:
    """Redis' contents: per partition the snapshots that are kept (`kept_snapshots`), and the journal."""

    def __init__(self) -> None:
        self.kept: dict[PartitionKey, list[Capture]] = {}
        """Newest first."""
        self.cuts: dict[tuple[PartitionKey, int], Capture] = {}
        """The kept snapshots that are cuts, by clock."""
        self.journals: dict[PartitionKey, list[JournalEntry]] = {}
        """The entries after the oldest of the kept snapshots."""
        self.tokens: dict[PartitionKey, Token] = {}
        """Owner tokens; `ShardDriver` refuses writes under lower ones."""
        self.damaged = False
        """The newest snapshots cannot be read: the previous ones are used."""

    def save(self, effect: StoreSnapshot, pinned: int | None = None) -> None:
        """Keep a capture (its buffers never change) and, with the cut at clock `pinned`, what `kept_snapshots` says."""
        key, before = effect.capture.key, self.kept.get(effect.capture.key, [])
        old_cuts = [c.clock if self.cuts.get((key, c.clock)) is c else None for c in before]
        snapshots, cuts = [effect.capture, *before], [effect.capture.clock if effect.cut else None, *old_cuts]
        kept = self.kept[key] = [snapshots[i] for i in kept_snapshots(cuts, pinned)]
        if len(kept) >= KEPT:
            self.journals[key] = [e for e in self.journals.get(key, ()) if e.lsn > min(k.lsn for k in kept)]
        if effect.cut:
            self.cuts[key, effect.capture.clock] = effect.capture
        for at in [at for at, c in self.cuts.items() if at[0] == key and all(c is not k for k in kept)]:
            del self.cuts[at]

    def append(self, entry: JournalEntry) -> bool:
        """Append one entry to its journal, unless it is already there; return False if earlier ones are missing."""
        last = self.last_lsn(entry.key)
        if entry.lsn == last + 1:
            self.journals.setdefault(entry.key, []).append(entry)
        return entry.lsn <= last + 1

    def last_lsn(self, key: PartitionKey) -> int:
        """Number of the last command that is stored, by snapshot or journal."""
        stored = [*self.journals.get(key, ())[-1:], *self.kept.get(key, ())[:1]]
        return max((s.lsn for s in stored), default=0)

    def load(self, effect: LoadPartition) -> LoadedState:
        """Return the state that a partition starts from; raises KeyError for an unknown cut."""
        if isinstance(effect.source, int):
            return LoadedState.of(self.cuts[effect.key, effect.source])
        known = effect.source == "snapshot" or effect.spec.ack != "applied"
        kept = self.kept.get(effect.key, [])[self.damaged :] if known else []
        base = LoadedState.of(kept[0]) if kept else first_state(effect, lambda n: np.empty(n, np.float32))
        entries = self.journals.get(effect.key, ())
        return replay(effect.key, base, entries, effect.spec, effect.layout, perform) if entries else base


def perform(task: Task) -> TaskResult:
    """Compute one task with the real kernels."""
    state, values = task.state, np.empty_like(task.state.values)
    if isinstance(task, AssignTask):
        part, at = task.part, 0
        values[:] = state.values
        data = to_f32(part.data, part.dtype)
        for start, stop in ((0, values.size),) if part.ranges is None else part.ranges.tolist():
            values[start:stop] = data[at : at + stop - start]
            at += stop - start
        slots = state.slots if part.slots is None else part.slots
        steps = state.steps if part.steps is None else part.steps
        return TaskResult(PartitionState(values, slots, steps) if kernels.all_finite(values) else None)
    gradient, dtype, ranges = *(task.direct or (np.zeros_like(values), "float32")), task.ranges
    if task.direct is None:
        several = [own for *_, own in task.parts if own is not None]
        if len(several) == len(task.parts):
            ranges = union(several)
            gradient = np.zeros(elements(ranges), np.float32)
        kernels.mean(task.parts, task.divisor, gradient, ranges)
    new = tuple(np.empty_like(s) for s in state.slots)
    crc = slice_crc(dtype, ((0, values.size),), gradient) if task.needs_check else None
    step = task.optimizer, task.steps, state.values, state.slots
    if not kernels.apply(*step, gradient, dtype, values, new, ranges=ranges):
        return TaskResult(None, bad_gradient=task.needs_check and not kernels.all_finite(gradient, dtype))
    return TaskResult(PartitionState(values, new, task.counts), crc)


def push_part(
    partition: int,
    data: AnyArray,
    size: int,
    *,
    ranges: tuple[Range, ...] | RangeArray | None = None,
    base: tuple[int, int] | None = None,
    dtype: DType = "float32",
) -> PushPart:
    """Return a part as the service makes it; whole parts of even partitions are unchecked, without a CRC."""
    part = PushPart(partition, data, dtype, None, True, None if ranges is None else of_pairs(ranges), base)
    return checked_part(part, size) if ranges is not None or partition % 2 == 1 else part


def checked_part(part: PushPart, size: int | None = None) -> PushPart:
    """Return the part with `crc` and `finite` set, as the service does; `size` is its partition's, in elements."""
    ranges = ((0, part.data.size if size is None else size),) if part.ranges is None else part.ranges
    crc = slice_crc(part.dtype, ranges, part.data)
    return replace(part, crc=crc, finite=bool(kernels.all_finite(part.data, part.dtype)))


Pullable = dict[PartitionKey, tuple[F32, tuple[int, int, int]]]
"""Partition -> what a pull of it returns: values, (version, incarnation, timeline)."""


def pullable(core: ShardCore) -> Pullable:
    """Return what pulls of all partitions would return now."""
    return {
        p.key: (p.state.values, (p.version, p.token, m.timeline))
        for m in core.models.values()
        if m.ready
        for p in m.partitions.values()
        if p.state is not None
    }


def check_at_once(known: PullDone | None, answers: Sequence[Outcome]) -> None:
    """Assert that `pulls.at_once` returned the pull's immediate answer, None if there is none or it is an error.

    Only if too many requests wait (`queue_full`) may the pull be refused although `at_once` has an answer.
    """
    for answer in answers:
        assert answer == known or (isinstance(answer, PsError) and (known is None or answer.code == "queue_full"))
    assert known is None or answers


def check_superseded(core: ShardCore, before: Pullable) -> None:
    """Assert that the core reports as superseded all that pulls returned `before` and do not return now.

    Clients on the shard's machine would otherwise take it for current.
    """
    now, reported = pullable(core) if before else {}, {id(s.values) for s in core.superseded}
    for key, (values, position) in before.items():
        same = key in now and now[key][0] is values and now[key][1] == position
        assert same or id(values) in reported, f"the core does not report {key} at {position} as superseded"


@dataclass
class ShardDriver:
    """One shard under test: its core, its time, its pending effects and its replies."""

    store: InMemoryStore = field(default_factory=InMemoryStore)
    eager: bool = True
    """Complete every effect immediately."""
    checked: bool = True
    """Run `check_superseded` after every event."""
    core: ShardCore = field(default_factory=lambda: ShardCore(checked_part))
    now: float = 100.0
    pending: list[Effect] = field(default_factory=list)
    """Loads, jobs, snapshots and journals that are not complete."""
    replies: dict[int, Outcome] = field(default_factory=dict)
    asked: list[AskWorker] = field(default_factory=list)
    reports: int = 0
    resyncs: int = 0
    kept: list[PartitionKey] = field(default_factory=list)
    """Partitions that kept their values, as the result of a commit or flush was not finite."""
    view: ModelView | None = None
    """The newest view sent."""
    pinned: int | None = None
    """Clock of the cut that the feed has said to count; its snapshots are kept."""
    roster: Callable[[AskWorker], WorkerAnswered] | None = None
    """Answers questions about workers, in the scheduler's place; if None, they collect in `asked`."""
    _requests: int = 0

    def send(self, event: Event) -> None:
        """Hand an event to the core and process its effects."""
        if isinstance(event, ModelView):
            self.view = event
            for index, token in event.owned.items():  # the leader stores tokens before it announces them
                key = PartitionKey(event.model, index)
                self.store.tokens[key] = max(token, self.store.tokens.get(key, 0))
        events = [event]
        while events:
            event = events.pop(0)
            before = pullable(self.core) if self.checked else {}
            known = self.core.pulls.at_once(event) if isinstance(event, PullReceived) else None
            effects = self.core.handle(event, self.now)
            check_superseded(self.core, before)
            if isinstance(event, PullReceived):
                check_at_once(
                    known, [e.outcome for e in effects if isinstance(e, Reply) and e.request == event.request]
                )
            for effect in effects:
                events.extend(self._take(effect))

    def _take(self, effect: Effect) -> list[Event]:
        match effect:
            case Reply(request, outcome):
                assert request not in self.replies, f"request {request} was answered twice"
                self.replies[request] = outcome
            case AskWorker():
                if self.roster is not None:
                    return [self.roster(effect)]
                self.asked.append(effect)
            case Report():
                self.reports += 1
            case Resync():
                self.resyncs += 1
            case ValuesKept(key):
                self.kept.append(key)
            case _ if self.eager:
                return self.result(effect)
            case _:
                self.pending.append(effect)
        return []

    def result(self, effect: Effect) -> list[Event]:
        """Return the events that tell an effect's outcome: success, a newer owner token, or missing journal entries."""
        match effect:
            case Apply(job, tasks):
                return [Applied(job, tuple(perform(t) for t in tasks))]
            case LoadPartition(key, token):
                return [PartitionLoaded(key, token, self.store.load(effect))]
            case StoreSnapshot(capture) if capture.token < self.store.tokens.get(capture.key, 0):
                return [SnapshotDone(capture.key, capture.token, False, effect.urgent)]
            case StoreSnapshot(capture):
                self.store.save(effect, self.pinned)
                return [SnapshotDone(capture.key, capture.token, True, effect.urgent)]
            case Journal(entries):
                reached: dict[tuple[PartitionKey, Token], Event] = {}
                missed: list[JournalEntry] = []
                for entry in entries:
                    ownership = entry.key, entry.token
                    if entry.token < self.store.tokens.get(entry.key, 0):
                        reached[ownership] = JournalRefused(*ownership)
                    elif self.store.append(entry):
                        reached[ownership] = Journaled(*ownership, entry.lsn)
                    else:
                        reached[ownership] = JournalLost(*ownership)
                        missed.append(entry)
                if missed:
                    self.pending.append(replace(effect, entries=tuple(missed)))
                return list(reached.values())
            case _:
                raise AssertionError(f"{effect} is not completed by an event")

    def complete(self, index: int = 0) -> None:
        """Complete one pending effect; `Journal` effects complete in their order, whichever of them is chosen."""
        if isinstance(self.pending[index], Journal):
            index = next(i for i, e in enumerate(self.pending) if isinstance(e, Journal))
        for event in self.result(self.pending.pop(index)):
            self.send(event)

    def settle(self) -> None:
        """Complete all pending effects, and those that result from them."""
        for _ in range(10_000):
            if not self.pending:
                return
            self.complete()
        raise AssertionError(f"pending effects never end: {self.pending[:3]}")

    def advance(self, seconds: float) -> None:
        """Advance the clock, with ticks at the core's deadlines."""
        end = self.now + seconds
        while (at := self.core.deadline()) is not None and at <= end:
            self.now = max(self.now, at)
            self.send(Tick())
        self.now = end

    # --- shorthands for tests

    def serve(self, spec: ModelSpec, **changes: Any) -> ModelView:
        """Send and return a view in which this shard owns all partitions of a model, with `changes` to its fields."""
        layout = Layout(spec)
        owned = {i: 1 for i in range(spec.partitions)}
        view = ModelView(ModelKey(spec.name, 1), spec, layout, 1, 0, 0, True, owned, "init", {})
        view = replace(view, **changes)
        self.send(view)
        return view

    def patch(self, change: Mapping[str, Any], **changes: Any) -> None:
        """Change the model's settings, by sending the view of the next revision."""
        assert self.view is not None
        spec = self.view.spec.patched(change)
        self.send(replace(self.view, spec=spec, revision=self.view.revision + 1, **changes))

    def request(self) -> int:
        """Return a new request number."""
        self._requests += 1
        return self._requests

    def submit(
        self,
        grads: Mapping[int, AnyArray],
        push_id: PushId | None = None,
        *,
        ranges: Mapping[int, tuple[Range, ...]] | None = None,
        base: tuple[int, int] | None = None,
        **fields: Any,
    ) -> int:
        """Send a push of these partitions; return its request number."""
        assert self.view is not None
        layout, request = self.view.layout, self.request()
        parts = tuple(
            push_part(i, g, layout.partition_size(i), ranges=(ranges or {}).get(i), base=base) for i, g in grads.items()
        )
        self.send(PushReceived(self.view.spec.name, parts, push_id=push_id, request=request, **fields))
        return request

    def push(self, grads: Mapping[int, AnyArray], push_id: PushId | None = None, **fields: Any) -> PushDone:
        """Send a push that completes at once and return its outcome; raises the PsError it was refused with."""
        outcome = self.outcome(self.submit(grads, push_id, **fields))
        assert isinstance(outcome, PushDone)
        return outcome

    def ask(self, parts: tuple[int, ...], **fields: Any) -> int:
        """Send a pull of these partitions; return its request number."""
        assert self.view is not None
        request = self.request()
        self.send(PullReceived(self.view.spec.name, parts, request=request, **fields))
        return request

    def pull(self, *parts: int, **fields: Any) -> PullDone:
        """Send a pull that completes at once and return its outcome; raises the PsError it was refused with."""
        outcome = self.outcome(self.ask(parts, **fields))
        assert isinstance(outcome, PullDone)
        return outcome

    def values(self, partition: int = 0) -> list[float]:
        """Return a partition's current values."""
        return [float(x) for x in self.pull(partition).parts[0].state.values]

    def outcome(self, request: int) -> Outcome:
        """Return the outcome of a request; raises the PsError it was refused with."""
        outcome = self.replies[request]
        if isinstance(outcome, PsError):
            raise outcome
        return outcome

    def commit(
        self, t: int, *contributions: Contribution, cut: bool = False, needs_report: bool = False, **fields: Any
    ) -> None:
        """Send commit `t` with this list of contributions, and with the settings if it names the newest revision."""
        assert self.view is not None
        view = self.view
        settings = model_settings_document(view.spec, view.revision)
        commit = Commit(t, view.timeline, contributions, view.revision, len(view.workers), cut, settings)
        if fields.get("revision", view.revision) != view.revision:
            commit = replace(commit, settings=None)
        self.send(CommitDecided(view.model, replace(commit, **fields), needs_report))
