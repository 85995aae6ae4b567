"""Requests of one worker for tasks: ranges of a dataset, evaluations."""

import logging
import time
from collections.abc import Mapping
from typing import Any, Final

from paramserver.client.cluster import model_path
from paramserver.client.session import Session
from paramserver.client.tasks import Task
from paramserver.client.turns import Held
from paramserver.core.scheduler.series import in_json
from paramserver.errors import PsError, problem
from paramserver.net.calls import ATTEMPT_S, POLL_S, Call, Clock, Deadline, Pause, json_request
from paramserver.net.retry import deliver_json

log = logging.getLogger("paramserver")


class TaskRequests:
    """Leases tasks for one session, and reports those that are done."""

    def __init__(self, session: Session) -> None:
        self._session: Final = session

    def lease(self, dataset: str, clock: Clock = time.monotonic, *, wait: bool = True) -> Call[Task | None]:
        """Lease the next range of a dataset; None when the dataset is finished, or the worker is asked to finish.

        Without `wait`, also None if no range is free now.  Raises ConflictError (`conflict`) if the caller would wait
        for a range that it is working on itself, in a loop around this one.
        """
        s = self._session
        while s.status not in ("draining", "stop"):
            yield from s.while_paused()
            held = Held()
            try:
                if not s.holding.begin(dataset, held):
                    yield Pause(0.05)
                    continue
                doc = yield from self._lease(dataset, clock, wait)
                task = s.holding.take(dataset, doc) if doc is not None else None
            finally:
                held.over = True
            if task is not None:
                return task
            if doc is not None and (doc.get("finished") or not wait):
                return None
            if doc is not None and s.holding.nested(dataset):
                detail = f"a loop over '{dataset}' inside another one of this worker would wait for the other's range"
                raise problem("conflict", detail, hint="leave the outer loop first, or use one thread for each")
        return None

    def _lease(self, dataset: str, clock: Clock, wait: bool) -> Call[Any]:
        """Send one request for a task and return the answer; None as in `Session.ask`."""
        s = self._session
        epoch, timeline = s.numbers.epoch, s.timeline
        body = {"dataset": dataset, "holding": s.holding.ids(dataset)}
        path = model_path(s.model, "tasks", "lease")
        doc = yield from s.ask(path, body, epoch, timeline, POLL_S if wait else 0.0, clock)
        if doc:  # no barrier waits for a worker that waits for a task, so the model may have gone on meanwhile
            s.catch_up(int(doc.get("clock") or 0), epoch, timeline)
        return doc

    def done(self, task: Task, deadline: Deadline, metrics: Mapping[str, float] | None = None) -> Call[None]:
        """Report a task as done."""
        s = self._session
        body: dict[str, Any] = {"worker": s.worker, "epoch": s.numbers.epoch, "generation": s.generation}
        if metrics:
            body["metrics"] = in_json(metrics)
        path = model_path(s.model, "tasks", task.id, "done")
        try:
            yield from deliver_json(json_request("POST", path, body, timeout_s=ATTEMPT_S), deadline)
        except PsError as e:
            if e.code not in ("fenced", "model_replaced", "unknown_worker", "unknown_task"):
                raise
            deleted = e.code == "unknown_task"
            what = "its dataset was deleted" if deleted else "it will be processed again"
            log.warning("task.lost worker=%s task=%s: %s", s.worker, task.id, what)
        s.holding.done(task)
