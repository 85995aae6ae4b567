"""Checkpoints of models: requested by users or by rule, written one at a time, and the surplus removed."""

from typing import Any

from paramserver.core.checkpoints import ALIASES, IDLE_S, Record, Wanted
from paramserver.core.cluster import Cluster
from paramserver.core.fields import MODEL_NAME
from paramserver.core.models import FORMAT, Model
from paramserver.core.run_desk import RunDesk
from paramserver.core.scheduler_io import (
    CheckpointFailed,
    CheckpointWritten,
    RemoveCheckpoint,
    RequestCheckpoint,
    WriteCheckpoint,
)
from paramserver.errors import PsError, problem

WANTED_MAX = 64


class CheckpointDesk:
    """Handles checkpoint events."""

    def __init__(self, cluster: Cluster, runs: RunDesk) -> None:
        self.c = cluster
        self.runs = runs

    def request(self, e: RequestCheckpoint, now: float) -> None:
        model = self.c.model(e.model)
        if e.name is not None and (not isinstance(e.name, str) or not MODEL_NAME.fullmatch(e.name)):
            raise problem("invalid_field", f"name: {e.name!r:.80} is not allowed for a checkpoint", where="name")
        if e.name in ALIASES:
            what = "the newest checkpoint" if e.name == "latest" else "the checkpoint whose metric was best"
            raise problem(
                "invalid_field", f"name: '{e.name}' stands for {what}", hint="choose another name", where="name"
            )
        if not model.ready:
            raise problem("initializing", f"model '{model.name}' has no values yet")
        wanted = model.checkpoints.wanted
        if e.name is not None and (e.name in model.checkpoints.records or any(w.name == e.name for w in wanted)):
            raise problem("conflict", f"checkpoint '{e.name}' exists", hint="choose another name")
        if len(wanted) >= WANTED_MAX:
            raise problem("too_many_requests", f"{WANTED_MAX} checkpoints wait already")
        wanted.append(Wanted(now, e.name, [e.request], clock=model.gate.clock))
        self.c.touch(model)

    def advance(self, model: Model, now: float) -> None:
        """Queue a checkpoint if the rule requires one, and begin the first in the queue if that is possible now."""
        points = model.checkpoints
        if not model.ready or not model.served or model.restoring:
            return
        run = self.runs.of_model(model)
        every = (run.checkpoint_every if run else 0) or model.spec.checkpoint.every_clocks
        clock = model.gate.clock
        if points.due(model.spec.checkpoint, every, clock, lambda: model.version, now):
            points.last_clock, points.last_version, points.last_s = clock, model.version, now
            points.wanted.append(Wanted(now, clock=clock))
        if not points.wanted or points.writing:
            return
        if not model.gate.sync:
            self._begin(model, None, clock, now)
        elif model.moving:
            return
        elif model.cut is not None and model.cut == clock:
            self._begin(model, model.cut, clock, now)
        elif model.pending_cut is None:
            since = max(model.last_commit_s, points.wanted[0].since_s)
            if now - since >= IDLE_S:
                points.reading_still = True
                self._begin(model, None, clock, now)
            elif model.cut is None or model.cut_moved or model.cut < min(points.wanted[0].clock, clock):
                model.cut_wanted = True
            else:
                # The cut made for it is complete; training has moved on a little since.
                self._begin(model, model.cut, model.cut, now)

    def _begin(self, model: Model, cut: int | None, clock: int, now: float) -> None:
        points = model.checkpoints
        wanted = points.wanted[0]
        points.number += 1
        points.last_clock, points.last_version = max(points.last_clock, clock), model.version
        points.last_s = now
        name = wanted.name or f"{points.number:06d}-clock-{clock}"
        while wanted.name is None and name in points.records:
            points.number += 1
            name = f"{points.number:06d}-clock-{clock}"
        wanted.written, wanted.clock = name, clock
        value = model.series.latest(model.spec.checkpoint.metric)
        wanted.metric = None if value is None else (model.spec.checkpoint.metric, value)
        document: dict[str, Any] = {
            "format": FORMAT,
            "name": name,
            "model": model.name,
            "generation": model.generation,
            "creation": model.creation,
            "revision": model.revision,
            "timeline": model.timeline,
            "clock": clock,
            "spec": model.spec.document(),
            "metric": {"name": wanted.metric[0], "value": wanted.metric[1]} if wanted.metric else None,
            "created_s": now + self.c.wall_offset_s,
            "workers": {
                w.name: {"rank": w.rank, "clock": w.done, "state": w.state}
                for w in model.roster
                if w.alive or w.state is not None
            },
        }
        self.c.save_clock(model)
        self.c.perform(WriteCheckpoint(model.key, name, cut, document))

    def written(self, e: CheckpointWritten, now: float) -> None:
        model = self.c.of_key(e.model.name, e.model.generation)
        wanted = self._finish(model, e.name) if model is not None else None
        if model is None or wanted is None or wanted.void:
            self.c.perform(RemoveCheckpoint(e.model.name, e.name, e.creation))
            for request in wanted.requests if wanted is not None else ():
                self.c.answer(request, _went_back(e.model.name))
            return
        record = Record(
            e.name,
            model.checkpoints.number,
            wanted.clock,
            now + self.c.wall_offset_s,
            e.bytes,
            tuple(e.versions),
            wanted.metric,
            wanted.name is not None,
            e.path,
            e.scheduler,
        )
        model.checkpoints.records[e.name] = record
        self.c.save(f"checkpoint:{model.name}:{e.name}", record.document)
        for old in model.checkpoints.surplus(model.spec.checkpoint):
            del model.checkpoints.records[old.name]
            self.c.drop(f"checkpoint:{model.name}:{old.name}")
            self.c.perform(RemoveCheckpoint(model.name, old.name, model.creation))
        for request in wanted.requests:
            self.c.answer(request, record.document(), 201)

    def failed(self, e: CheckpointFailed, now: float) -> None:
        model = self.c.of_key(e.model.name, e.model.generation)
        wanted = self._finish(model, e.name) if model is not None else None
        if e.taken and model is not None and wanted is not None and wanted.name is None:
            wanted.written, wanted.void = None, False
            model.checkpoints.wanted.insert(0, wanted)  # start over with the next number
            return
        for request in wanted.requests if wanted is not None else ():
            self.c.answer(request, e.error)

    def _finish(self, model: Model, name: str) -> Wanted | None:
        points = model.checkpoints
        self.c.touch(model)
        if not points.wanted or points.wanted[0].written != name:
            return None
        points.reading_still = False
        return points.wanted.pop(0)

    def forget(self, request: int) -> None:
        """Drop a request whose client is gone; its checkpoint is still written."""
        for model in self.c.models.values():
            for wanted in model.checkpoints.wanted:
                if request in wanted.requests:
                    wanted.requests.remove(request)


def _went_back(model: str) -> PsError:
    return problem(
        "conflict",
        f"model '{model}' went back to an earlier clock while it was read",
        hint="ask for another checkpoint",
    )
