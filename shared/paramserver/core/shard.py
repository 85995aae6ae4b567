"""The shard's decisions: which partitions it serves, in which order operations run, who is answered what.

`ShardCore.handle(event, now)` changes the state and returns effects; it never waits, reads no clock and touches no
socket.  `now` is monotonic seconds.  The rules are those of `docs/semantics.md`; per partition, operations run in order
of arrival, and what a push may do is decided when it starts, not when it arrives.
"""

from collections.abc import Callable, Iterator
from typing import Any

from paramserver import limits
from paramserver.core import admission
from paramserver.core.line import Lines
from paramserver.core.operation import (
    CommitOperation,
    FlushOperation,
    Operation,
    PushOperation,
    SetOperation,
    SettingsOperation,
)
from paramserver.core.partition import Partition
from paramserver.core.pulls import PullDesk
from paramserver.core.served_model import ServedModel, wrong_owner
from paramserver.core.shard_io import (
    Applied,
    Apply,
    AskWorker,
    CaptureReceived,
    CommitDecided,
    Effect,
    Event,
    LoadFailed,
    LoadPartition,
    MapChanged,
    ModelGone,
    ModelView,
    Outcome,
    PartitionLoaded,
    PartitionState,
    PullReceived,
    PushReceived,
    Reply,
    Report,
    Request,
    RequestGone,
    Resync,
    RosterChanged,
    SetReceived,
    SnapshotFailed,
    SnapshotStored,
    StorageChanged,
    Tick,
    WorkerAnswered,
)
from paramserver.core.snapshot_plan import SnapshotPlan
from paramserver.core.timers import Timers
from paramserver.errors import PsError, problem
from paramserver.types import ModelKey, PartitionKey, Token

_RETRY_S = 1.0


class ShardCore:
    """Owns one shard's partitions.  Mutated only through :meth:`handle`."""

    def __init__(self) -> None:
        self.models: dict[str, ServedModel] = {}
        self.map_epoch = 0
        self.held_bytes = 0
        self.not_finite = 0
        self.plan = SnapshotPlan()
        self._lines = Lines()
        self._jobs: dict[int, Operation] = {}
        self._last_job = 0
        self._asking: dict[Request, PushOperation] = {}
        self._timers = Timers()
        self._pulls = PullDesk(self, self._timers)
        self._open: set[Request] = set()
        self._woken: list[Partition] = []
        self._effects: list[Effect] = []
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            MapChanged: self._map,
            ModelView: self._view,
            RosterChanged: self._roster,
            CommitDecided: self._commit,
            ModelGone: self._gone,
            PartitionLoaded: self._loaded,
            LoadFailed: self._load_failed,
            PushReceived: self._push,
            PullReceived: self._pull,
            SetReceived: self._set,
            CaptureReceived: self._capture,
            RequestGone: self._request_gone,
            WorkerAnswered: self._worker_answered,
            Applied: self._applied,
            SnapshotStored: self._snapshot_done,
            SnapshotFailed: self._snapshot_done,
            Tick: lambda event, now: None,
            StorageChanged: lambda event, now: None,
        }

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event; the effects are to be performed in their order."""
        self._timers.run(now)
        self._handlers[type(event)](event, now)
        self._run(now)
        snapshot = self.plan.next(now)
        if snapshot is not None:
            self._effects.append(snapshot)
        effects, self._effects = self._effects, []
        return effects

    def deadline(self, now: float) -> float | None:
        """When `handle(Tick(), ...)` is due; None while nothing waits for time to pass."""
        return min((at for at in (self.plan.deadline(), self._timers.next) if at is not None), default=None)

    def partitions(self) -> Iterator[tuple[str, int, int, int, int, int]]:
        """(model, generation, index, token, version, durable version) of each partition that is served."""
        for model in self.models.values():
            for p in model.partitions.values():
                if p.state is not None:
                    yield (model.key.name, model.key.generation, p.index, p.token, p.version, p.durable_version)

    def cuts(self) -> Iterator[tuple[str, int, int, int, int]]:
        """(model, generation, index, token, clock) of each partition's newest stored cut."""
        for model in self.models.values():
            for p in model.partitions.values():
                if p.cut_stored is not None:
                    yield (model.key.name, model.key.generation, p.index, p.token, p.cut_stored)

    @property
    def waiting(self) -> int:
        """Requests without an outcome yet."""
        return len(self._open)

    # --- the scheduler's word

    def _map(self, event: MapChanged, now: float) -> None:
        self.map_epoch = event.map_epoch

    def _view(self, view: ModelView, now: float) -> None:
        model = self.models.get(view.model.name)
        if model is None or view.model.generation > model.key.generation:
            old, model = model, ServedModel.of(view)
            self.models[view.model.name] = model
            if old is not None:
                self._drop(old)
        elif (view.model.generation, view.timeline) < (model.key.generation, model.timeline):
            return
        elif view.timeline > model.timeline:
            self._roll_back(model, view)
        elif view.revision < model.revision:
            return
        revision = model.revision
        model.clock = max(model.clock, view.clock)
        model.live_workers, model.workers = view.live_workers, dict(view.workers)
        for commit in view.commits:
            if commit.timeline == model.timeline:
                model.keep(commit)
        model.learn(view.spec, view.revision)
        begins, model.ready = view.ready and not model.ready, view.ready
        self._own(model, view, now)
        for p in model.partitions.values():
            if view.revision > revision:
                self._settle(model, p, revision)
            elif p.spec.consistency.mode != "sync":
                p.live_workers = view.live_workers
            if begins and p.state is not None:
                self.plan.first(p, now)
            self._woken.append(p)
            self._advance(model, p, now)

    def _own(self, model: ServedModel, view: ModelView, now: float) -> None:
        """Take up and give up partitions; an ownership under a newer token begins anew from its source."""
        requests: list[Operation] = []
        for p in list(model.partitions.values()):
            token = view.owned.get(p.index)
            if token is None or token > p.token:
                requests += self._lose(model, p)
        for index, token in view.owned.items():
            if index not in model.partitions:
                key = PartitionKey(model.key, index)
                size, segments = model.layout.partition_size(index), model.layout.segments[index]
                model.partitions[index] = Partition(
                    key, token, size, segments, model.spec, model.revision, model.live_workers, source=view.source
                )
                self._effects.append(LoadPartition(key, token, view.source, model.spec, model.layout))
        for operation in requests:
            self._submit(operation, now)
        if requests or model.parked:
            self._unpark(model, now)

    def _lose(self, model: ServedModel, p: Partition) -> list[Operation]:
        """An ownership has ended; returns the requests that stood in its line."""
        del model.partitions[p.index]
        self.plan.forget(p)
        self.held_bytes -= p.held_bytes
        self._woken.append(p)
        return [op for op in self._lines.withdraw(p) if isinstance(op, PushOperation | SetOperation)]

    def _roll_back(self, model: ServedModel, view: ModelView) -> None:
        model.timeline, model.clock = view.timeline, view.clock
        model.commits.clear()
        for p in model.partitions.values():
            self.held_bytes -= p.drop_staged()
            self.plan.forget(p)

    def _settle(self, model: ServedModel, p: Partition, before: int) -> None:
        """The settings have changed: at once before loading, by commits within sync, else as an operation."""
        if p.state is None:
            p.adopt(model.spec, model.revision, model.live_workers)
        elif p.spec.consistency.mode != "sync" or not model.sync:
            clock = model.clock
            if p.spec.consistency.mode != "sync":
                clock = min((t for t, c in model.commits.items() if c.revision > before), default=clock)
            settings = SettingsOperation(
                model, [p], spec=model.spec, revision=model.revision, live_workers=model.live_workers, clock=clock
            )
            self._lines.add(settings)

    def _roster(self, event: RosterChanged, now: float) -> None:
        model = self._known(event.model)
        if model is None:
            return
        model.workers, model.live_workers = dict(event.workers), event.live_workers
        for p in model.partitions.values():
            if p.spec.consistency.mode != "sync":
                p.live_workers = event.live_workers
            self._drop_ended(model, p)

    def _commit(self, event: CommitDecided, now: float) -> None:
        model = self._known(event.model)
        if model is None or event.timeline != model.timeline:
            return
        model.keep(event)
        for p in model.partitions.values():
            self._advance(model, p, now)

    def _gone(self, event: ModelGone, now: float) -> None:
        model = self._known(event.model)
        if model is not None:
            del self.models[event.model.name]
            self._drop(model)

    def _known(self, key: ModelKey) -> ServedModel | None:
        model = self.models.get(key.name)
        return model if model is not None and model.key == key else None

    def _drop(self, model: ServedModel) -> None:
        """The model is no more, or another has its name."""
        requests = [op for p in list(model.partitions.values()) for op in self._lose(model, p)] + model.parked
        model.parked = []
        for operation in requests:
            operation.refuse(self, self.model_gone(model))

    def model_gone(self, model: ServedModel) -> PsError:
        """What to tell a request for a model that was deleted or created anew."""
        other = self.models.get(model.key.name, model)
        if other is model:
            return problem("unknown_model", f"model '{model.key.name}' was deleted")
        return problem("model_replaced", f"model '{model.key.name}' was created anew", generation=other.key.generation)

    # --- synchronous clocks

    def _advance(self, model: ServedModel, p: Partition, now: float) -> None:
        """Let the partition take its next commit, if that is known."""
        if p.state is None or p.committing or p.spec.consistency.mode != "sync" or not model.sync:
            return
        commit = model.commits.get(p.clock)
        if commit is not None and model.spec_of(commit.revision) is not None:
            p.committing = True
            self._lines.add(CommitOperation(model, [p], commit=commit))
        elif commit is None and model.clock > p.clock and now >= model.resync_at:
            model.resync_at = now + _RETRY_S
            self._effects.append(Resync(model.key))
            self._timers.at(model.resync_at, lambda at: self._advance(model, p, at) if self._owns(model, p) else None)

    def committed(self, model: ServedModel, partition: Partition, now: float) -> None:
        self._advance(model, partition, now)
        self._drop_ended(model, partition)

    def _drop_ended(self, model: ServedModel, p: Partition) -> None:
        if p.clock not in model.commits and not p.committing:
            self.held_bytes -= p.drop_ended(model.live())

    # --- loading

    def _loaded(self, event: PartitionLoaded, now: float) -> None:
        model, p = self._find(event.key, event.token)
        if model is None or p is None or p.state is not None:
            return
        p.load(event.loaded)
        self.held_bytes += p.held_bytes
        cut = isinstance(p.source, int)
        if cut and event.loaded.stored:
            p.cut_stored = p.clock
        elif not cut and p.clock not in model.commits:
            p.clock = model.clock
        if model.ready and not event.loaded.stored:
            self.plan.first(p, now)
        if p.buffered and p.spec.consistency.mode == "buffered":
            p.flush_at = now + p.spec.consistency.interval_ms / 1000.0
            self.flush_by(p, p.flush_at, now)
        elif p.buffered:
            self._lines.add(FlushOperation(model, [p]))
        self._woken.append(p)
        self._unpark(model, now)
        self._advance(model, p, now)
        self._effects.append(Report())

    def _load_failed(self, event: LoadFailed, now: float) -> None:
        model, p = self._find(event.key, event.token)
        if model is None or p is None or p.state is not None:
            return
        for operation in [op for op in model.parked if p in op.partitions]:
            model.parked.remove(operation)
            operation.refuse(self, event.error)
        self._pulls.refuse(p, event.error)

        def again(at: float) -> None:
            if self._owns(model, p) and p.state is None:
                self._effects.append(LoadPartition(p.key, p.token, p.source, model.spec, model.layout))

        self._timers.at(now + _RETRY_S, again)

    def _find(self, key: PartitionKey, token: Token) -> tuple[ServedModel | None, Partition | None]:
        model = self._known(key.model)
        p = None if model is None else model.partitions.get(key.index)
        return model, p if p is not None and p.token == token else None

    def _owns(self, model: ServedModel, p: Partition) -> bool:
        return self.models.get(model.key.name) is model and model.partitions.get(p.index) is p

    # --- requests

    def _push(self, event: PushReceived, now: float) -> None:
        try:
            model = self._model(event.model, event.request)
            model.check(event.generation, event.timeline)
            if not model.ready:
                raise problem("initializing", "the model's initial values are not complete")
            admission.check_push(event, model.spec, model.layout)
            partitions = [model.owned(part.partition, self.map_epoch) for part in event.parts]
        except PsError as error:
            self.reply(event.request, error)
            return
        operation = PushOperation(model, event=event, expires=now + limits.LEASE_S)
        if admission.must_ask(event, model.spec.consistency.mode, model.workers, [p.memory for p in partitions]):
            assert event.push_id is not None
            self._asking[event.request] = operation
            self._effects.append(AskWorker(event.request, model.key, event.push_id.worker))
        else:
            self._submit(operation, now)

    def _worker_answered(self, event: WorkerAnswered, now: float) -> None:
        operation = self._asking.pop(event.request, None)
        if operation is not None:
            operation.answer = event
            self._submit(operation, now)

    def _set(self, event: SetReceived, now: float) -> None:
        try:
            model = self._model(event.model, event.request)
            model.check(event.generation, None)
            admission.check_set(event, model.spec, model.layout)
        except PsError as error:
            self.reply(event.request, error)
            return
        self._submit(SetOperation(model, event=event, expires=now + limits.LEASE_S), now)

    def _model(self, name: str, request: Request) -> ServedModel:
        if len(self._open) >= limits.QUEUED_REQUESTS_MAX:
            raise problem("queue_full", f"{len(self._open)} requests are waiting in this shard")
        model = self.models.get(name)
        if model is None:
            raise problem("unknown_model", f"there is no model '{name}'")
        self._open.add(request)
        return model

    def _submit(self, operation: Operation, now: float) -> None:
        """Put a push or an assignment into the lines, or aside until its partitions are loaded."""
        assert isinstance(operation, PushOperation | SetOperation)
        model = operation.model
        try:
            if self.models.get(model.key.name) is not model:
                raise self.model_gone(model)
            parts = operation.event.parts
            operation.partitions = [model.owned(part.partition, self.map_epoch) for part in parts]
        except PsError as error:
            operation.refuse(self, error)
            return
        if all(p.state is not None for p in operation.partitions):
            self._lines.add(operation)
            return
        model.parked.append(operation)

        def expire(at: float) -> None:
            if operation in model.parked:
                model.parked.remove(operation)
                operation.refuse(self, problem("loading", "a partition is being recovered"))

        self._timers.at(operation.expires, expire)

    def _unpark(self, model: ServedModel, now: float) -> None:
        parked, model.parked = model.parked, []
        for operation in parked:
            self._submit(operation, now)

    def _pull(self, event: PullReceived, now: float) -> None:
        try:
            model = self._model(event.model, event.request)
            if not event.parts:
                raise problem("malformed", "the pull names no partition")
        except PsError as error:
            self.reply(event.request, error)
            return
        self._pulls.take(model, event, now)

    def _request_gone(self, event: RequestGone, now: float) -> None:
        if self._pulls.withdraw(event.request):
            self._open.discard(event.request)

    def _capture(self, event: CaptureReceived, now: float) -> None:
        try:
            model = self._model(event.model, event.request)
            model.check(event.generation, None)
            self.reply(event.request, model.owned(event.partition, self.map_epoch).captured(event.cut))
        except PsError as error:
            self.reply(event.request, error)

    # --- running

    def _run(self, now: float) -> None:
        """Start all that can start, then try the pulls that wait for what has changed."""
        while (operation := self._lines.next()) is not None:
            tasks = operation.start(self, now)
            if tasks:
                operation.running = True
                self._last_job += 1
                self._jobs[self._last_job] = operation
                self._effects.append(Apply(self._last_job, tuple(tasks)))
            else:
                self._lines.release(operation)
        woken, self._woken = self._woken, []
        for partition in woken:
            self._pulls.wake(partition, now)

    def _applied(self, event: Applied, now: float) -> None:
        operation = self._jobs.pop(event.job)
        model = operation.model
        lost = [p.index for p in operation.partitions if not self._owns(model, p)]
        if not lost:
            operation.finish(self, event.results, now)
        elif self.models.get(model.key.name) is model:
            operation.refuse(self, wrong_owner(model.key, lost[0], self.map_epoch))
        else:
            operation.refuse(self, self.model_gone(model))
        self._lines.release(operation)

    def _snapshot_done(self, event: SnapshotStored | SnapshotFailed, now: float) -> None:
        _, partition = self._find(event.key, event.token)
        if self.plan.done(isinstance(event, SnapshotStored), partition, now):
            self._effects.append(Report())

    # --- what operations do (see `operation.Shard`)

    def reply(self, request: Request, outcome: Outcome) -> None:
        self._open.discard(request)
        self._effects.append(Reply(request, outcome))

    def flip(self, partition: Partition, state: PartitionState, now: float) -> None:
        partition.state = state
        partition.version += 1
        self.plan.changed(partition, now)
        if partition.pulls:
            self._woken.append(partition)

    def precede(self, partition: Partition, operation: Operation) -> None:
        self._lines.precede(partition, operation)

    def flush_by(self, partition: Partition, at: float, now: float) -> None:
        self.plan.changed(partition, now)

        def due(now: float) -> None:
            model = self._known(partition.key.model)
            if partition.flush_at == at and model is not None and self._owns(model, partition):
                self._lines.add(FlushOperation(model, [partition]))

        self._timers.at(at, due)

    def cut(self, partition: Partition) -> None:
        self.plan.cut(partition)

    def settings_changed(self, partition: Partition, now: float) -> None:
        if partition.spec.consistency.mode == "sync":
            self.plan.forget(partition, cuts=False)
        else:
            self.plan.changed(partition, now)
