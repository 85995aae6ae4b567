"""Checkpoints of models: requested by users or by rule, written one at a time, and the surplus removed."""

from typing import Any, Final

from paramserver.core.fields import check_name
from paramserver.core.scheduler.checkpoints import ALIASES, IDLE_S, PendingCheckpoint, Record, no_checkpoint
from paramserver.core.scheduler.cluster import Cluster
from paramserver.core.scheduler.io import (
    CheckpointFailed,
    CheckpointRead,
    CheckpointWritten,
    DeleteCheckpoint,
    RemoveCheckpoint,
    RequestCheckpoint,
    WriteCheckpoint,
)
from paramserver.core.scheduler.models import Model
from paramserver.core.scheduler.run_desk import RunDesk
from paramserver.errors import PsError, problem

PENDING_MAX: Final = 64
EVALUATION_TAKEN_S: Final = 3.0
"""How long a checkpoint by rule waits for a worker to take an evaluation; without an evaluator nobody ever does."""
EVALUATION_DONE_S: Final = 60.0
"""How long it waits for the result of one that a worker has taken."""


class CheckpointDesk:
    """Handles checkpoint events."""

    def __init__(self, cluster: Cluster, runs: RunDesk) -> None:
        self.c = cluster
        self.runs = runs

    def request(self, e: RequestCheckpoint, now: float) -> None:
        model = self.c.model(e.model, e.generation)
        if e.name is not None:
            check_name(e.name, " for a checkpoint")
        if e.name in ALIASES:
            what = "the newest checkpoint" if e.name == "latest" else "the checkpoint whose metric was best"
            raise problem(
                "invalid_field", f"name: '{e.name}' stands for {what}", hint="choose another name", where="name"
            )
        if not model.ready:
            raise problem("initializing", f"model '{model.name}' has no values yet")
        pending = model.checkpoints.pending
        if e.name in model.checkpoints.records:
            raise problem("conflict", f"checkpoint '{e.name}' exists", hint="choose another name, or delete it first")
        if e.name is not None and any(w.name == e.name for w in pending):
            hint = "the list of checkpoints has it once it is complete"
            raise problem("conflict", f"checkpoint '{e.name}' is being written", hint=hint)
        if len(pending) >= PENDING_MAX:
            raise problem("too_many_requests", f"{PENDING_MAX} checkpoints are already pending")
        pending.append(PendingCheckpoint(now, e.name, [e.request], clock=model.gate.clock))
        self.c.mark_dirty(model)

    def delete(self, e: DeleteCheckpoint, now: float) -> None:
        model = self.c.model(e.model)
        if model.checkpoints.records.pop(e.name, None) is None:
            raise no_checkpoint(e.model, e.name)
        self.c.drop(f"checkpoint:{model.name}:{e.name}")
        self.c.answer(e.request, None, 204)

    def advance(self, model: Model, now: float) -> None:
        """Queue a checkpoint if the rule requires one, and begin the first in the queue if that is possible now."""
        points, cuts = model.checkpoints, model.cuts
        points.waiting = False
        if not model.ready or model.restoring:
            return
        run = self.runs.of_model(model)
        every = (run.checkpoint_every if run else 0) or model.spec.checkpoint.every_clocks
        clock = model.gate.clock
        due = points.due(model.spec.checkpoint, every, clock, lambda: model.version, now)
        if not (due or points.pending) or not model.served:  # it may have thousands of partitions
            return
        if due:
            points.last_clock, points.last_version, points.last_s = clock, model.version, now
            points.pending.append(PendingCheckpoint(now, clock=clock))
        if points.writing or _awaits_evaluation(model, now) or self._must_wait(model):
            return
        if not model.gate.sync:
            self._begin(model, None, clock, now)
        elif model.moving:
            points.waiting = True
        elif cuts.newest == clock:
            self._begin(model, cuts.newest, clock, now)
        elif cuts.pending is not None:
            points.waiting = True
        else:
            since = max(model.last_commit_s, points.pending[0].since_s)
            if now - since >= IDLE_S:
                points.reading_current = True
                self._begin(model, None, clock, now)
            elif cuts.newest is None or cuts.moved or cuts.newest < min(points.pending[0].clock, clock):
                points.waiting = cuts.wanted = True
            else:
                # The cut made for it is complete; training has moved on a little since.
                self._begin(model, cuts.newest, cuts.newest, now)

    def _must_wait(self, model: Model) -> bool:
        """Whether another model's checkpoint is to be written before this one, for which nobody waits.

        The leader has all of a model in memory while it writes it, and by rule many may be due at the same time.
        """
        return not model.checkpoints.asked and any(m.checkpoints.writing for m in self.c.models.values())

    def _begin(self, model: Model, cut: int | None, clock: int, now: float) -> None:
        points = model.checkpoints
        pending = points.pending[0]
        points.number += 1
        points.last_clock, points.last_version = max(points.last_clock, clock), model.version
        points.last_s = now
        name = pending.name or f"{points.number:06d}-clock-{clock}"
        while pending.name is None and name in points.records:
            points.number += 1
            name = f"{points.number:06d}-clock-{clock}"
        pending.written, pending.clock = name, clock
        value = model.series.latest(model.spec.checkpoint.metric)
        pending.metric = None if value is None else (model.spec.checkpoint.metric, value)
        document: dict[str, Any] = {
            "name": name,
            "model": model.name,
            "generation": model.generation,
            "creation": model.creation,
            "revision": model.revision,
            "timeline": model.timeline,
            "clock": clock,
            "spec": model.spec.document(),
            "metric": {"name": pending.metric[0], "value": pending.metric[1]} if pending.metric else None,
            "created_s": points.created_s(now + self.c.wall_offset_s),
            "workers": {
                w.name: {"rank": w.rank, "clock": w.done, "state": w.state}
                for w in model.roster
                if w.alive or w.state is not None
            },
        }
        self.c.save_clock(model)
        self.c.perform(WriteCheckpoint(model.key, name, cut, document))

    def read(self, e: CheckpointRead, now: float) -> None:
        """Let commits, cuts and moves go on while the files are written."""
        model = self.c.of_key(e.model)
        if model is not None and model.checkpoints.reading and model.checkpoints.pending[0].written == e.name:
            model.checkpoints.pending[0].read, model.checkpoints.reading_current = True, False
            self.c.unbalanced = True
            self.c.mark_dirty(model)

    def written(self, e: CheckpointWritten, now: float) -> None:
        model = self.c.of_key(e.model)
        pending = self._finish(model, e.name, now) if model is not None else None
        if model is None or pending is None or pending.void:
            self.c.perform(RemoveCheckpoint(e.model.name, e.name, e.creation))
            for request in pending.requests if pending is not None else ():
                self.c.answer(request, _went_back(e.model.name))
            return
        record = Record(
            e.name,
            model.checkpoints.number,
            pending.clock,
            model.checkpoints.created_s(now + self.c.wall_offset_s),
            e.bytes,
            tuple(e.versions),
            pending.metric,
            pending.name is not None,
            e.path,
            e.scheduler,
        )
        model.checkpoints.records[e.name], model.checkpoints.error = record, ""
        self.c.save(f"checkpoint:{model.name}:{e.name}", record.document)
        for old in model.checkpoints.surplus(model.spec.checkpoint):
            del model.checkpoints.records[old.name]
            self.c.drop(f"checkpoint:{model.name}:{old.name}")
            self.c.perform(RemoveCheckpoint(model.name, old.name, model.creation))
        for request in pending.requests:
            self.c.answer(request, record.document(), 201)

    def failed(self, e: CheckpointFailed, now: float) -> None:
        model = self.c.of_key(e.model)
        pending = self._finish(model, e.name, now) if model is not None else None
        if e.taken and model is not None and pending is not None and pending.name is None:
            pending.written, pending.void = None, False
            model.checkpoints.pending.insert(0, pending)  # start over with the next number
            return
        if model is not None:
            model.checkpoints.last_version = -1  # due again after `every_minutes`, also if nothing changes any more
            if not e.taken:  # a name in use is a mistake of who asked, not a fault of the cluster
                model.checkpoints.error = str(e.error)
        for request in pending.requests if pending is not None else ():
            self.c.answer(request, e.error)

    def _finish(self, model: Model, name: str, now: float) -> PendingCheckpoint | None:
        points, done = model.checkpoints, None
        if points.pending and points.pending[0].written == name:
            points.reading_current, done = False, points.pending.pop(0)
            points.next_s = now + (now - points.last_s)
        waiting = [m for m in self.c.models.values() if m.checkpoints.pending]
        for next_one in [*sorted(waiting, key=lambda m: m.checkpoints.pending[0].since_s), model]:
            self.c.mark_dirty(next_one)  # in this order they are advanced
        return done

    def forget(self, request: int) -> None:
        """Drop a request whose client is gone; its checkpoint is still written."""
        for model in self.c.models.values():
            for pending in model.checkpoints.pending:
                if request in pending.requests:
                    pending.requests.remove(request)


def _awaits_evaluation(model: Model, now: float) -> bool:
    """Whether nobody waits for a checkpoint and an evaluation is open, whose result is to be the next one's metric."""
    if not model.evaluations or model.checkpoints.asked:
        return False
    taken = any(v.leased is not None for v in model.evaluations)
    return now - model.checkpoints.pending[0].since_s < (EVALUATION_DONE_S if taken else EVALUATION_TAKEN_S)


def _went_back(model: str) -> PsError:
    return problem(
        "conflict",
        f"model '{model}' went back to an earlier clock, or left sync, while it was read",
        hint="ask for another checkpoint",
    )
