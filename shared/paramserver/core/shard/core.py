"""The shard's decision logic: which partitions it serves, in which order operations run, how it replies.

`ShardCore.handle(event, now)` changes the state and returns effects; it never blocks, reads no clock and does no I/O.
`now` is in monotonic seconds.  The rules are in `docs/semantics.md`.  Operations on a partition run in order of
arrival; a push is checked against the partition's state when it starts, not when it arrives.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paramserver import limits
from paramserver.core.heartbeat_rows import CutRow, LostRow, ReleasedRow, ServedRow
from paramserver.core.partition_state import PartitionState
from paramserver.core.shard.commit_desk import CommitDesk
from paramserver.core.shard.durability import Durability
from paramserver.core.shard.effects import Effect, Outcome, Reply, Report
from paramserver.core.shard.events import (
    Applied,
    CaptureReceived,
    CommitDecided,
    Event,
    Journaled,
    JournalLost,
    JournalRefused,
    LoadFailed,
    MapChanged,
    ModelGone,
    ModelView,
    PartitionLoaded,
    PullReceived,
    PushPart,
    PushReceived,
    Request,
    RequestGone,
    RosterChanged,
    SaveAll,
    SetReceived,
    SnapshotDone,
    StorageChanged,
    Tick,
    WorkerAnswered,
)
from paramserver.core.shard.handover import Handover
from paramserver.core.shard.load_desk import LoadDesk
from paramserver.core.shard.mean_operations import FlushOperation
from paramserver.core.shard.operation import Operation, RequestOperation
from paramserver.core.shard.partition import Partition
from paramserver.core.shard.pull_desk import PullDesk
from paramserver.core.shard.queues import OperationQueues
from paramserver.core.shard.request_desk import RequestDesk
from paramserver.core.shard.served_model import ServedModel, replaced, wrong_owner
from paramserver.core.shard.settings_operation import SettingsOperation
from paramserver.core.shard.snapshot_plan import SnapshotPlan
from paramserver.core.shard.timers import Timers
from paramserver.errors import PsError, problem
from paramserver.types import F32, ModelKey, PartitionKey, Token


class ShardCore:
    """The models and partitions that one shard serves.  Only `handle` changes them."""

    def __init__(
        self,
        check_content: Callable[[PushPart], PushPart] | None = None,
        held_bytes_max: int = limits.STAGED_BYTES_MAX,
    ) -> None:
        """`check_content` returns a part with `crc` and `finite` set; needed if parts arrive without them."""
        self._check_content = check_content
        self.held_bytes_max = held_bytes_max
        self.models: dict[str, ServedModel] = {}
        self.map_epoch = 0
        self.held_bytes = 0
        """Bytes of staged and buffered gradients."""
        self.superseded: list[PartitionState] = []
        """States superseded by the last event: no pull returns them any more."""
        self.plan = SnapshotPlan()
        self._queues = OperationQueues()
        self._timers = Timers()
        self.durability = Durability(self, self._timers)
        self.pulls = PullDesk(self, self._timers)
        self._requests = RequestDesk(self, self._queues, self._timers, self.pulls)
        self._loading = LoadDesk(self, self._timers, self._requests)
        self._handover = Handover(self, self._queues)
        self._commits = CommitDesk(self, self._queues, self._timers)
        self._woken: list[Partition] = []
        self._effects: list[Effect] = []
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            MapChanged: self._map,
            ModelView: self._view,
            RosterChanged: self._roster,
            CommitDecided: self._commits.decided,
            ModelGone: self._gone,
            PartitionLoaded: self._loading.loaded,
            LoadFailed: self._loading.failed,
            PushReceived: self._requests.push,
            PullReceived: self._requests.pull,
            SetReceived: self._requests.set,
            CaptureReceived: self._requests.capture,
            RequestGone: self._requests.gone,
            WorkerAnswered: self._requests.worker_answered,
            Applied: self._applied,
            SnapshotDone: self._snapshot_done,
            Journaled: self._journaled,
            JournalRefused: self._journal_refused,
            JournalLost: self._journal_lost,
            StorageChanged: self._storage_changed,
            SaveAll: self._save_all,
            Tick: lambda event, now: None,
        }

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle one event and return its effects, to be performed in order."""
        self.superseded.clear()
        self._timers.run(now)
        try:
            self._handlers[type(event)](event, now)
        except Exception as error:
            self._requests.failed(event, error)
        self._run(now)
        self._effects += self.durability.effects()
        while (snapshot := self.plan.next(now)) is not None:
            self._effects.append(snapshot)
        effects, self._effects = self._effects, []
        return effects

    def deadline(self) -> float | None:
        """When `handle(Tick(), ...)` is due next; None if nothing is scheduled."""
        snapshot, timer = self.plan.deadline(), self._timers.next
        return timer if snapshot is None else snapshot if timer is None else min(snapshot, timer)

    def partitions(self) -> Iterator[ServedRow]:
        """Yield each partition that is served."""
        for key, p in self._partitions():
            if p.state is not None:
                versions, commits_from = (p.version, p.durable_version), p.durable_clock if p.level else p.clock
                place = key.name, key.generation, p.index, p.token
                yield ServedRow(*place, *versions, p.revision, commits_from, p.from_version, p.from_lsn)

    def cuts(self) -> Iterator[CutRow]:
        """Yield each partition's newest stored cut."""
        for key, p in self._partitions():
            if p.cut_stored is not None:
                yield CutRow(key.name, key.generation, p.index, p.token, p.cut_stored)

    def released(self) -> Iterator[ReleasedRow]:
        """Yield each partition that may be taken over."""
        for key, p in self._partitions():
            if p.released:
                yield ReleasedRow(key.name, key.generation, p.index, p.token, p.version, p.release_number, p.lsn)

    def given_up(self) -> Iterator[LostRow]:
        """Yield each partition that is owned again under a token under which it has been given up."""
        for key, p in self._partitions():
            if p.given_up:
                yield LostRow(key.name, key.generation, p.index, p.token, True)

    def load_trouble(self) -> str:
        """Return why a partition could not be loaded when that was last tried; "" if none waits for another try."""
        return next((str(p.load_error) for _, p in self._partitions() if p.state is None and p.load_error), "")

    def unsaved(self) -> Iterator[Partition]:
        """Yield each partition of which a snapshot, or a cut that has begun, would keep more than Redis holds."""
        return (p for _, p in self._partitions() if p.unsaved or self.plan.cut_waits(p))

    def _partitions(self) -> Iterator[tuple[ModelKey, Partition]]:
        return ((model.key, p) for model in self.models.values() for p in model.partitions.values())

    def owns(self, key: PartitionKey, token: Token) -> bool:
        """Whether this shard has that partition under that token."""
        return self.find(key, token)[1] is not None

    def present(self, key: ModelKey, parts: Sequence[tuple[int, int]]) -> list[F32] | None:
        """Return the values of these (partition, version) if a pull now would return exactly those; else None."""
        model = self.find_model(key)
        held = [None if model is None else model.partitions.get(index) for index, _ in parts]
        out = [
            p.state.values
            for p, (_, version) in zip(held, parts, strict=True)
            if p is not None and p.answers and p.state is not None and p.version == version
        ]
        return out if model is not None and model.ready and len(out) == len(parts) else None

    @property
    def waiting(self) -> int:
        """Number of requests without an outcome yet."""
        return len(self._requests.open)

    # --- documents of the scheduler's feed

    def _map(self, event: MapChanged, now: float) -> None:
        self.map_epoch = event.map_epoch

    def _view(self, view: ModelView, now: float) -> None:
        if (model := self._model_of(view)) is None:
            return
        revision, was_ready = model.revision, model.ready
        model.adopt(view)
        if not model.ready:
            for p in model.partitions.values():
                self.supersede(p)
        self._own(model, view, now)
        for commit in view.commits:  # after `_own`: only commits that a partition here needs are kept
            if commit.timeline == model.timeline:
                model.record_commit(commit)
        for p in model.partitions.values():
            if model.revision > revision:
                self._settle(model, p)
            if p.state is not None:
                if model.ready and not was_ready:
                    self.plan.initialized(p)
                elif model.asks_cut(p) and not self.plan.at_cut(p):
                    self.plan.cut(p)
                if model.view.cut_urgent and self.plan.cut_waits(p):
                    self.plan.urgent(p)
            self._woken.append(p)
            self._commits.advance(model, p, now)
            self._commits.drop_ended(model, p)

    def _model_of(self, view: ModelView) -> ServedModel | None:
        """Return the view's model, begun or rolled back if the view says so; None if a newer view is known."""
        model = self.models.get(view.model.name)
        if model is None or view.model.generation > model.key.generation:
            old, model = model, ServedModel.of(view)
            self.models[view.model.name] = model
            if old is not None:
                self._drop(old)
        elif (view.model.generation, view.timeline) < (model.key.generation, model.timeline):
            return None
        elif view.timeline > model.timeline:
            self._roll_back(model, view)
        elif view.revision < model.revision and view.term == model.view.term:
            return None  # another leader may not know of the newer one, if Redis has lost it
        return model

    def _own(self, model: ServedModel, view: ModelView, now: float) -> None:
        """Take up, give up, suspend and resume partitions as the view says."""
        requests = [op for p in list(model.partitions.values()) for op in self._keep_or_lose(model, view, p)]
        for index, token in view.owned.items():
            if index not in model.partitions:
                self._handover.take_up(model, view, index, token, now)
        model.refused = {i: p for i, p in model.refused.items() if view.owned.get(i) == p.token}
        for p in model.partitions.values():
            self._handover.follow(model, p, view.release.get(p.index, 0), now)
        for operation in requests:
            self._requests.submit(operation)
        if requests or model.parked:
            self._requests.unpark(model)

    def _keep_or_lose(self, model: ServedModel, view: ModelView, p: Partition) -> list[RequestOperation]:
        """Keep a partition that the view gives to this shard; under a newer token only if it renews this ownership.

        Returns the requests that were queued for one that is lost.
        """
        token = view.owned.get(p.index)
        if token is not None and token <= p.token:
            return []
        if token is not None and p.state is not None and view.kept_from.get(p.index, token) <= p.token:
            self.supersede(p)
            self._handover.renew(p, token)
            return []
        return self._lose(model, p)

    def _lose(self, model: ServedModel, p: Partition) -> list[RequestOperation]:
        """End an ownership; return the requests that were queued for the partition."""
        del model.partitions[p.index]
        if p.state is not None:
            model.given_up[p.index] = p.token
        self.durability.refuse(p, self._lost(model, p))
        self.plan.forget(p)
        self._handover.forget(p)
        self.held_bytes -= p.held_bytes
        self._woken.append(p)
        self.supersede(p)
        return self._queues.withdraw(p)

    def _lost(self, model: ServedModel, p: Partition) -> PsError:
        """The error for a request to a partition that is no longer here."""
        if self.models.get(model.key.name) is model:
            return wrong_owner(model.key, p.index, self.map_epoch)
        return self.model_gone(model)

    def _roll_back(self, model: ServedModel, view: ModelView) -> None:
        model.restart(view)
        for p in model.partitions.values():
            self.plan.forget(p)
            self.supersede(p)  # from now on, pulls of the old timeline are refused

    def _settle(self, model: ServedModel, p: Partition) -> None:
        """Apply changed settings: at once before loading, else as an operation, or by commits within sync."""
        if p.state is None:
            p.adopt(model.spec, model.revision, model.live_workers)
        elif not p.suspended:  # else its next owner applies them, or `resume` if the move is withdrawn
            clock = model.view.began if model.sync else model.clock
            settings = SettingsOperation(
                model, [p], spec=model.spec, revision=model.revision, live_workers=model.live_workers, clock=clock
            )
            self._queues.add(settings)

    def _roster(self, event: RosterChanged, now: float) -> None:
        model = self.find_model(event.model)
        if model is None:
            return
        model.set_roster(event.workers)
        for p in model.partitions.values():
            self._commits.drop_ended(model, p)

    def _gone(self, event: ModelGone, now: float) -> None:
        model = self.find_model(event.model)
        if model is not None:
            del self.models[event.model.name]
            self._drop(model)

    def find_model(self, key: ModelKey) -> ServedModel | None:
        """The model of that name and generation, for reading; None if this shard does not know it."""
        model = self.models.get(key.name)
        return model if model is not None and model.key == key else None

    def _drop(self, model: ServedModel) -> None:
        """Give up a deleted or replaced model: end its ownerships and refuse its queued and parked requests."""
        requests = [op for p in list(model.partitions.values()) for op in self._lose(model, p)]
        for operation in requests + self._requests.take_parked(model):
            operation.refuse(self, self.model_gone(model))

    def model_gone(self, model: ServedModel) -> PsError:
        """The error for a request to a model that was deleted or recreated."""
        other = self.models.get(model.key.name, model)
        if other is model:
            return problem("unknown_model", f"model '{model.key.name}' was deleted")
        return replaced(other.key)

    def find(self, key: PartitionKey, token: Token) -> tuple[ServedModel | None, Partition | None]:
        """Return the model, if known, and the partition, if this shard has it under that token."""
        model = self.find_model(key.model)
        p = None if model is None else model.partitions.get(key.index)
        return model, p if p is not None and p.token == token else None

    def has(self, model: ServedModel, p: Partition) -> bool:
        """Whether these very objects are still served here: the model not replaced, the partition not given up."""
        return self.models.get(model.key.name) is model and model.partitions.get(p.index) is p

    # --- running

    def _run(self, now: float) -> None:
        """Start every operation that can start, then retry the pulls that wait for changed partitions."""
        if self._handover.waits:
            for operation in self._handover.suspend_next():
                self._requests.submit(operation)
            self._handover.write()
        due = self._queues.start(self, now)
        if due is not None:
            self._effects.append(due)
        if not self._woken:
            return
        woken, self._woken = self._woken, []
        for partition in woken:
            self.pulls.wake(partition, now)

    def _applied(self, event: Applied, now: float) -> None:
        for operation, results in self._queues.computed(event):
            model = operation.model
            lost = [p for p in operation.partitions if not self.has(model, p)]
            if lost:
                operation.refuse(self, self._lost(model, lost[0]))
            else:
                operation.finish(self, results, now)
            self._queues.release(operation)

    def _snapshot_done(self, event: SnapshotDone, now: float) -> None:
        _, p = self.find(event.key, event.token)
        store = self.plan.done(event.stored, event.urgent, p, now)
        if p is not None and not event.stored:
            self._handover.give_way(p)
        if store is not None and p is not None:
            self.durability.snapshot(p, store.capture, store.fsync)
            whole = not store.cut or p.level > 0  # at `applied` a cut lacks the staged parts, which a move needs
            if (whole and self._handover.stored(p, store.capture.lsn)) or store.cut:
                self._effects.append(Report())

    def _journaled(self, event: Journaled, now: float) -> None:
        _, p = self.find(event.key, event.token)
        if p is not None:
            self.durability.journaled(p, event.lsn)

    def _journal_refused(self, event: JournalRefused, now: float) -> None:
        model, p = self.find(event.key, event.token)
        if model is not None and p is not None:
            model.refused[p.index] = p
            for operation in self._lose(model, p):
                self._requests.submit(operation)
            self._requests.unpark(model)

    def _journal_lost(self, event: JournalLost, now: float) -> None:
        _, p = self.find(event.key, event.token)
        if p is not None and (event.restarted or p.mark.rebase is None):
            if p.by_cuts and p.cut is not None:
                self.plan.store_cut(p, p.cut)
            self.durability.rebase(p)

    def _storage_changed(self, event: StorageChanged, now: float) -> None:
        self.durability.storage, self.durability.fsync_refused = event.reason, event.fsync_refused

    def _save_all(self, event: SaveAll, now: float) -> None:
        for p in self.unsaved():
            self.plan.urgent(p)

    # --- used by operations and desks

    def reply(self, request: Request, outcome: Outcome) -> None:
        """Answer a request."""
        self._requests.open.discard(request)
        self._effects.append(Reply(request, outcome))

    def perform(self, effect: Effect) -> None:
        """Have the runtime perform an effect, after those before it."""
        self._effects.append(effect)

    def check_content(self, part: PushPart) -> PushPart:
        """Return the part with its checksum and whether its elements are finite."""
        assert self._check_content is not None, "parts come with their checksums"
        return self._check_content(part)

    def supersede(self, partition: Partition) -> None:
        """Note that pulls return the partition's current state no more."""
        if partition.state is not None:
            self.superseded.append(partition.state)

    def publish_version(self, partition: Partition, state: PartitionState, now: float) -> None:
        """Make `state` the partition's current version, one higher than the last."""
        self.supersede(partition)
        partition.state = state
        partition.version += 1
        partition.lsn += 1
        self.plan.changed(partition, now)
        if partition.pulls:
            self._woken.append(partition)

    def committed(self, model: ServedModel, partition: Partition, now: float) -> None:
        """Go on after the partition applied a commit, skipped one of an older timeline, or entered a sync phase."""
        self._commits.advance(model, partition, now)
        self._commits.drop_ended(model, partition)

    def resume(self, model: ServedModel, partition: Partition, now: float) -> None:
        """Resume what has waited while the partition was suspended or not loaded."""
        self._woken.append(partition)
        if partition.revision < model.revision:
            self._settle(model, partition)  # before the requests, which were sent under these settings
        self._requests.unpark(model, partition)
        if partition.buffered:
            self._queues.add(FlushOperation(model, [partition]))  # does nothing unless the flush is due
        self.committed(model, partition, now)

    def run_next(self, partition: Partition, operation: Operation) -> None:
        """Run `operation` right after the current one, before everything that waits."""
        self._queues.insert_next(partition, operation)

    def flush_by(self, partition: Partition, at: float, now: float) -> None:
        """Flush the partition's buffer by time `at`; schedule a snapshot too, because snapshots include the buffer."""
        self.plan.changed(partition, now)
        key = partition.key  # the timer must not keep a lost partition's memory alive

        def due(now: float) -> None:
            model = self.find_model(key.model)
            p = None if model is None else model.partitions.get(key.index)
            if model is not None and p is not None and p.flush_at == at and not p.suspended:
                self._queues.add(FlushOperation(model, [p]))

        if partition.flush_timer is not None:
            self._timers.cancel(partition.flush_timer)
        partition.flush_timer = self._timers.at(at, due)

    def settings_changed(self, partition: Partition, now: float) -> None:
        """Retry the pulls that wait for the partition and update its snapshot schedule after a change of settings."""
        self._woken.append(partition)  # outside sync, pulls wait for no clock
        self.plan.settings_changed(partition, now)
