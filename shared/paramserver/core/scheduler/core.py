"""The scheduler's decision logic: events in, effects out; see `io`.

`SchedulerCore` only dispatches each event to the desk that handles it, then advances every model that was marked dirty:
it makes the commits that are possible and answers the requests whose wait is over.
"""

from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Self

from paramserver import limits
from paramserver.core.scheduler import io
from paramserver.core.scheduler.checkpoint_desk import CheckpointDesk
from paramserver.core.scheduler.cluster import Cluster
from paramserver.core.scheduler.model_desk import ModelDesk
from paramserver.core.scheduler.move_desk import MoveDesk
from paramserver.core.scheduler.placement import Placement
from paramserver.core.scheduler.reading import Reading
from paramserver.core.scheduler.recovery import restore
from paramserver.core.scheduler.run_desk import RunDesk
from paramserver.core.scheduler.shard_desk import ShardDesk
from paramserver.core.scheduler.task_desk import TaskDesk
from paramserver.core.scheduler.worker_desk import WorkerDesk
from paramserver.errors import PsError

ROUNDS_MAX = 16
PAUSE_S = limits.LEASE_S / 2
"""A longer gap between two events means that this process was paused, because it gets a tick twice a second."""


class SchedulerCore:
    """One scheduler.  Only `handle` changes it; `read` is the read-only view for everything else."""

    def __init__(self, cluster: Cluster, now: float) -> None:
        self._c = cluster
        self._now = now
        self._leases_end_s = inf
        """When the first lease ends, as of the last tick; what has begun since ends later than the next tick is due."""
        self.read = Reading(cluster)
        moves, runs, placement = MoveDesk(cluster), RunDesk(cluster), Placement(cluster, now)
        shards = ShardDesk(cluster, moves, placement)
        models, workers = ModelDesk(cluster, placement, runs), WorkerDesk(cluster, runs)
        tasks, checkpoints = TaskDesk(cluster, runs, workers), CheckpointDesk(cluster, runs)
        self._shards, self._runs, self._models, self._workers = shards, runs, models, workers
        self._tasks, self._checkpoints, self._moves = tasks, checkpoints, moves
        self._desk: Mapping[type, Callable[[Any, float], None]] = {
            io.JoinShard: shards.join,
            io.ShardHeartbeat: shards.heartbeat,
            io.LeaveShard: shards.leave,
            io.SetShardState: moves.set_state,
            io.OpenFeed: shards.feed,
            io.RedisEmptied: shards.emptied,
            io.StorageChanged: moves.storage,
            io.CreateModel: models.create,
            io.PatchModel: models.patch,
            io.DeleteModel: models.delete,
            io.ParameterUploaded: models.uploaded,
            io.FilesLoaded: models.files_loaded,
            io.StartRestore: models.start_restore,
            io.RestoreFinished: models.finish_restore,
            io.ModelRestored: models.restored,
            io.JoinWorker: workers.join,
            io.WorkerHeartbeat: workers.heartbeat,
            io.LeaveWorker: workers.leave,
            io.DrainWorker: workers.drain,
            io.ReportClock: workers.clock,
            io.ClockStaged: workers.staged,
            io.ReportMetrics: workers.metrics,
            io.RegisterDataset: tasks.register,
            io.DeleteDataset: tasks.delete,
            io.LeaseTask: tasks.lease,
            io.TaskDone: tasks.task_done,
            io.RequestEvaluation: tasks.ask_evaluation,
            io.RequestCheckpoint: checkpoints.request,
            io.DeleteCheckpoint: checkpoints.delete,
            io.CheckpointRead: checkpoints.read,
            io.CheckpointWritten: checkpoints.written,
            io.CheckpointFailed: checkpoints.failed,
            io.CreateRun: runs.create,
            io.PatchRun: runs.patch,
            io.JoinPool: runs.join,
            io.PoolHeartbeat: runs.heartbeat,
            io.LeavePool: runs.leave,
            io.PlaceDone: runs.done,
            io.RequestGone: self._gone,
            io.Tick: self._tick,
            io.ClockStepped: self._clock_stepped,
        }

    @classmethod
    def restore(
        cls,
        documents: Mapping[str, Mapping[str, Any]],
        now: float,
        term: int,
        unix_s: float = 0.0,
        new_id: str = "",
    ) -> Self:
        """Build the core of a scheduler that starts in this term, from the fields found in `ps:state`.

        `new_id`: a random id for a cluster that starts for the first time.
        Everyone who was alive gets one full lease from `now`.  Raises CorruptState if the fields cannot be read.
        """
        core = cls(restore(documents, now, term, unix_s, new_id), now)
        core._models.end_orphaned_restores(now)
        return core

    def handle(self, event: io.Event, now: float) -> list[io.Effect]:
        """Handle one event and return its effects, to be performed in order.

        Refusals become replies, and so do unexpected exceptions while a request is only validated
        (`errors.validating`).  Any other exception leaves the state inconsistent: discard this core.
        """
        if now - self._now > PAUSE_S:
            self._c.extend_leases(now - self._now)
        self._now = now
        try:
            self._desk[type(event)](event, now)
        except PsError as e:
            if not isinstance(event, io.Request):
                raise
            # `rolled_back` names the new timeline and its clock, so it waits until these are stored.
            (self._c.answer if e.code == "rolled_back" else self._c.answer_now)(event.request, e)
        self._advance(now)
        self._moves.advance(now)
        if isinstance(event, io.Tick):
            self._look_ahead()
        return self._c.effects()

    def _advance(self, now: float) -> None:
        c = self._c
        for _ in range(ROUNDS_MAX):
            names, c.dirty = c.dirty, {}
            if not names:
                return
            for model in [c.models[n] for n in names if n in c.models]:
                self._models.advance(model, now)
                self._workers.advance(model, now)
                self._tasks.watch(model)
                self._workers.release(model, now)
                self._tasks.hand_out(model, now)
                self._checkpoints.advance(model, now)
                self._runs.watch(model, now)

    def _tick(self, event: io.Tick, now: float) -> None:
        self._shards.expire(now)
        self._moves.expire(now)
        self._workers.expire(now)
        self._runs.expire(now)
        for model in self._c.models.values():
            self._c.mark_dirty(model)
            if self._c.storage_away:
                continue
            if model.series.due(now):
                self._c.save(f"series:{model.name}", model.series.stored)
            if not model.gate.sync and model.gate.clock != model.clock_stored:
                # Otherwise a worker that joins under a new leader before the others report would start at an old clock.
                model.clock_stored = model.gate.clock
                self._c.save_clock(model)
            if model.commits and not model.gate.sync and not model.ending_sync:
                self._workers.prune(model, now)

    def _clock_stepped(self, event: io.ClockStepped, now: float) -> None:
        self._c.wall_offset_s = event.wall_offset_s

    def _gone(self, event: io.RequestGone, now: float) -> None:
        self._checkpoints.forget(event.request)
        for model in self._c.models.values():
            if model.forget(event.request, now):
                return

    def _look_ahead(self) -> None:
        """Find out when the first lease and the first wait end.

        Only at each tick: after each event, with a thousand models or workers, it would take most of the event's time.
        """
        c = self._c
        holders = [*c.shards.values(), *c.members.values()]
        leases = [h.expires_s() for h in holders if h.alive]
        waits: list[float] = []
        for model in c.models.values():
            leases += [w.heard_s + w.lease_s for w in model.roster.live() if w.open_polls <= 0]
            waits += [w.deadline_s for w in model.waiters()]
        self._leases_end_s, c.waits_end_s = min(leases, default=inf), min(waits, default=inf)

    def deadline(self) -> float:
        """Latest time for the next `Tick`: a lease or a wait may end, or `limits.HEARTBEAT_S` has passed.

        It is due at once if the last event left dirty models.
        """
        c = self._c
        if c.dirty:
            return self._now
        return max(self._now, min(self._now + limits.HEARTBEAT_S, self._leases_end_s, c.waits_end_s))
