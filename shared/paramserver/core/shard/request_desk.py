"""Incoming requests: checked, their worker asked about if needed, then queued or parked."""

from typing import TYPE_CHECKING, TypeAlias

from paramserver import limits
from paramserver.core.shard import admission
from paramserver.core.shard.effects import AskWorker
from paramserver.core.shard.events import (
    CaptureReceived,
    Event,
    PullReceived,
    PushReceived,
    Request,
    RequestGone,
    SetReceived,
    WorkerAnswered,
)
from paramserver.core.shard.operation import RequestOperation
from paramserver.core.shard.partition import Partition
from paramserver.core.shard.pull_desk import PullDesk
from paramserver.core.shard.push_operation import PushOperation
from paramserver.core.shard.queues import OperationQueues
from paramserver.core.shard.served_model import Parked, ServedModel, no_values_yet
from paramserver.core.shard.set_operation import SetOperation
from paramserver.core.shard.timers import Timers
from paramserver.errors import PsError, as_problem, problem
from paramserver.types import LEVELS

if TYPE_CHECKING:
    from paramserver.core.shard.core import ShardCore


AnyRequest: TypeAlias = PushReceived | PullReceived | SetReceived | CaptureReceived
"""The events that get a `Reply`."""


class RequestDesk:
    """All requests that have no outcome yet.

    Handlers raise PsError for what they refuse, and `ShardCore.handle` passes it to `failed`.
    """

    def __init__(self, shard: "ShardCore", queues: OperationQueues, timers: Timers, pulls: PullDesk) -> None:
        self.open: set[Request] = set()
        self._shard = shard
        self._queues = queues
        self._timers = timers
        self._pulls = pulls
        self._asking: dict[Request, PushOperation] = {}

    # --- handlers by kind of event

    def push(self, event: PushReceived, now: float) -> None:
        model = self._opened(event)
        model.check(event.generation, event.timeline)
        if not model.ready:
            raise no_values_yet()
        admission.check_push(event, model.layout)
        for part in event.parts:
            model.owned(part.partition, self._shard.map_epoch)
        level = max(model.level, LEVELS[event.ack or "applied"])
        operation = PushOperation(model, event=event, expires=now + limits.LEASE_S, level=level)
        if event.push_id is not None and admission.must_ask(event, event.push_id, model):
            self._asking[event.request] = operation
            self._shard.perform(AskWorker(event.request, model.key, event.push_id.worker))
        else:
            self.submit(operation)

    def worker_answered(self, event: WorkerAnswered, now: float) -> None:
        operation = self._asking.pop(event.request, None)
        if operation is not None:
            operation.answer = event
            self.submit(operation)

    def set(self, event: SetReceived, now: float) -> None:
        model = self._opened(event)
        model.check(event.generation, event.timeline)
        admission.check_set(event, model.layout)
        self.submit(SetOperation(model, event=event, expires=now + limits.LEASE_S))

    def pull(self, event: PullReceived, now: float) -> None:
        model = self._opened(event)
        if not event.parts:
            raise problem("malformed", "the pull names no partition")
        self._pulls.take(model, event, now)

    def capture(self, event: CaptureReceived, now: float) -> None:
        model = self._opened(event)
        model.check(event.generation, None)
        captured = model.owned(event.partition, self._shard.map_epoch).capture_at(event.cut)
        self._shard.reply(event.request, captured)

    def gone(self, event: RequestGone, now: float) -> None:
        if self._pulls.withdraw(event.request):
            self.open.discard(event.request)

    def failed(self, event: Event, error: Exception) -> None:
        """Refuse a request whose handler raised the error, which may be a bug, unless it has been answered before.

        A request changes nothing before it is queued, so the shard can go on.  For other events, raise it again.
        """
        if not isinstance(event, AnyRequest):
            raise error
        self._pulls.withdraw(event.request)
        if event.request in self.open:
            self._shard.reply(event.request, as_problem(error))

    def _opened(self, event: AnyRequest) -> ServedModel:
        """Count the request as open and return its model; raises `queue_full` or `unknown_model`."""
        waiting = len(self.open)
        self.open.add(event.request)
        if waiting >= limits.QUEUED_REQUESTS_MAX:
            raise problem("queue_full", f"{waiting} requests are waiting in this shard")
        model = self._shard.models.get(event.model)
        if model is None:
            raise problem("unknown_model", f"there is no model '{event.model}'")
        return model

    # --- queuing

    def submit(self, operation: RequestOperation) -> None:
        """Queue a push or an assignment, or park it until its partitions are loaded and not suspended."""
        model, shard = operation.model, self._shard
        try:
            if shard.models.get(model.key.name) is not model:
                raise shard.model_gone(model)
            parts = operation.event.parts
            operation.partitions = [model.owned(part.partition, shard.map_epoch) for part in parts]
        except PsError as error:
            self._leave(operation)
            operation.refuse(shard, error)
            return
        missing = next((p for p in reversed(operation.partitions) if not p.ready), None)
        if missing is None:
            self._leave(operation)
            self._queues.add(operation)
        elif operation in model.parked:
            model.parked[operation].at = missing
        else:
            timer = self._timers.at(operation.expires, lambda at: self._expire(operation))
            model.parked[operation] = Parked(missing, timer)

    def unpark(self, model: ServedModel, partition: Partition | None = None) -> None:
        """Submit parked operations again: all of them, or those that wait for `partition`.

        Each waits for the last of its partitions that is not ready, as pulls do (`pull_desk`), and keeps its place
        until all are ready.
        """
        for operation in [op for op, parked in model.parked.items() if partition is None or parked.at is partition]:
            self.submit(operation)

    def take_parked(self, model: ServedModel) -> list[RequestOperation]:
        """Remove and return all parked operations."""
        parked = list(model.parked)
        for operation in parked:
            self._leave(operation)
        return parked

    def refuse(self, model: ServedModel, partition: Partition, error: PsError) -> None:
        """Fail all parked operations that touch the partition, and the pulls that wait for it."""
        for operation in [op for op in model.parked if partition in op.partitions]:
            self._leave(operation)
            operation.refuse(self._shard, error)
        self._pulls.refuse(partition, error)

    def _expire(self, operation: RequestOperation) -> None:
        self._leave(operation)
        operation.refuse(self._shard, problem("loading", "a partition is being recovered or moved"))

    def _leave(self, operation: RequestOperation) -> None:
        parked = operation.model.parked.pop(operation, None)
        if parked is not None:
            self._timers.cancel(parked.timer)
