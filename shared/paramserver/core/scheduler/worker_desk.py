"""Workers join, report their clocks and leave, and commits are decided."""

from math import inf
from typing import Any, Final

from msgspec.structs import replace

from paramserver import limits
from paramserver.core.commit import Commit
from paramserver.core.fields import WORKER_NAME
from paramserver.core.scheduler.cluster import Cluster
from paramserver.core.scheduler.documents import check_document, size_of
from paramserver.core.scheduler.io import (
    ClockStaged,
    DrainWorker,
    JoinWorker,
    LeaseTask,
    LeaveWorker,
    ReportClock,
    ReportMetrics,
    TaskDone,
    WorkerHeartbeat,
)
from paramserver.core.scheduler.membership import JOIN_FIRST, Worker, expired
from paramserver.core.scheduler.models import Model
from paramserver.core.scheduler.run_desk import RunDesk
from paramserver.core.scheduler.series import check_metrics, check_points
from paramserver.core.scheduler.waiter import Waiter
from paramserver.core.settings import model_settings_document
from paramserver.errors import FencedError, PsError, problem, validating

COMMITS_PER_EVENT: Final = 64


class WorkerDesk:
    """Handles worker events."""

    def __init__(self, cluster: Cluster, runs: RunDesk) -> None:
        self.c = cluster
        self.runs = runs

    # --- membership ---

    def join(self, e: JoinWorker, now: float) -> None:
        model = self.c.model(e.model)
        name, count = self._name(model, e.name, e.attempt)
        self._clear_rank(model, name, e.rank)
        rank = model.roster.choose_rank(name, e.rank)
        old = model.roster.workers.get(name)
        if old is not None and old.alive:
            self._remove(model, old)
        clock = model.gate.join_clock(model.roster)
        worker, forgotten = model.roster.join(name, rank, e.above or 0, clock, model.timeline, now)
        model.worker_count = count
        worker.lease_s, worker.attempt = limits.LEASE_S if e.lease_s is None else e.lease_s, e.attempt
        if forgotten:
            self.c.drop(f"worker:{model.name}:{forgotten}")
        if e.name is None or forgotten:
            self.c.save_model(model)
        self.c.save_worker(model, worker)
        self.c.roster_changed(model)
        body = {
            "worker": name,
            "epoch": worker.epoch,
            "rank": rank,
            "lease_s": worker.lease_s,
            "clock": clock,
            "timeline": model.timeline,
            "generation": model.generation,
            "state": worker.state,
            "asked": self.state(model, worker),
            "first": model.roster.live()[0] is worker,
        }
        self.c.answer(e.request, body, 201)

    def _clear_rank(self, model: Model, name: str, rank: int | None) -> None:
        """Remove the rank's present holder if its run is over: the next run may start before it has been told."""
        for worker in model.roster.live():
            if worker.rank == rank and worker.name != name and self.runs.worker_state(model, worker.name) == "stop":
                self._remove(model, worker, left=True)
                break

    def _name(self, model: Model, name: Any, attempt: str | None) -> tuple[str, int]:
        """Return the name of a joining worker, and the number of names issued once it has joined."""
        count = model.worker_count
        if name is None:
            for worker in model.roster.live():
                if attempt is not None and worker.attempt == attempt:
                    return worker.name, count
            while True:
                chosen = f"{model.name}/w{count}"
                count += 1
                if chosen not in model.roster.workers:
                    return chosen, count
        whole = isinstance(name, str) and "/" in name
        longest = limits.WORKER_NAME_BYTES_MAX if whole else limits.BARE_NAME_BYTES_MAX
        if not isinstance(name, str) or not WORKER_NAME.fullmatch(name) or len(name) > longest:
            raise problem(
                "invalid_field",
                f"name: {name!r:.140} is not allowed for a worker",
                hint="letters, digits, '.', '_' and '-', "
                f"at most {limits.BARE_NAME_BYTES_MAX}; or a worker's id, with a '/'",
                where="name",
            )
        return (name if whole else f"{model.name}/{name}"), count

    def joined_model(self, e: WorkerHeartbeat | LeaveWorker | ReportClock | LeaseTask | TaskDone) -> Model:
        """Return the model that the worker has joined; raises like `Cluster.model`.

        If it was created again, the error names the epoch of the worker that has joined under this id since, if any.
        """
        try:
            return self.c.model(e.model, e.generation)
        except FencedError as error:
            other = self.c.models[e.model].roster.workers.get(e.worker)
            if other is None or not other.epoch:  # it has never joined
                raise
            raise error.plus(epoch=other.epoch) from error

    def leave(self, e: LeaveWorker, now: float) -> None:
        model = self.joined_model(e)
        worker = model.roster.workers.get(e.worker)
        if worker is None:
            raise problem("unknown_worker", f"worker {e.worker!r:.140} has not joined", hint=JOIN_FIRST)
        if worker.alive and e.epoch in (None, worker.epoch):
            self._remove(model, worker, left=True)
        self.c.answer(e.request, None, 204)

    def drain(self, e: DrainWorker, now: float) -> None:
        model = self.c.model(e.model)
        worker = model.roster.workers.get(e.worker)
        if worker is None or not worker.alive:
            what = "has not joined" if worker is None else "is no longer live: it left, or its lease ran out"
            raise problem("unknown_worker", f"worker {e.worker!r:.140} {what}", hint="" if worker else JOIN_FIRST)
        worker.draining = True
        self.c.save_worker(model, worker)
        self.c.answer(e.request, {"worker": worker.name, "state": self.state(model, worker)})

    def expire(self, now: float) -> None:
        """Remove workers whose lease has expired; one with a parked request counts as alive."""
        for model in self.c.models.values():
            for worker in expired(model.roster.live(), now):
                if worker.open_polls <= 0:
                    self._remove(model, worker)

    def _remove(self, model: Model, worker: Worker, *, left: bool = False) -> None:
        """Remove this incarnation: barriers stop waiting for it, and its data ranges and evaluations are freed."""
        model.gate.open(model.roster)  # Before it goes, because it counts towards `min_workers`.
        worker.left = left
        model.roster.mark_dead(worker)
        model.waits_for = -1  # its parked requests are refused
        for name, dataset in model.datasets.items():
            if dataset.release(worker.name, worker.epoch):
                self.c.save_dataset(model, name)
        for evaluation in model.evaluations:
            if evaluation.leased == (worker.name, worker.epoch):
                evaluation.leased = None
        self.c.save_worker(model, worker)
        self.c.save_clock(model)
        self.c.roster_changed(model)

    def renew_lease(self, model: Model, name: str, epoch: int, now: float) -> Worker:
        """Return the live worker of that epoch and renew its lease; raises like `Roster.find`."""
        worker = model.roster.find(name, epoch)
        worker.heard_s = now
        return worker

    def state(self, model: Model, worker: Worker) -> str:
        """What the worker is asked to be: `active`, `draining`, `paused` or `stop`."""
        asked = self.runs.worker_state(model, worker.name)
        return "draining" if asked == "active" and worker.draining else asked

    # --- reports ---

    def heartbeat(self, e: WorkerHeartbeat, now: float) -> None:
        model = self.joined_model(e)
        worker = self.renew_lease(model, e.worker, e.epoch, now)  # it is alive, even if the rest is invalid
        with validating():
            points = check_points(e.metrics)
            check_document(e.state, "state")
            if e.state is not None and e.state != worker.state:
                self.c.make_room(size_of(e.state) - worker.state_size)
        if e.clock is not None or e.timeline is not None:
            self._check_timeline(model, worker, e.timeline)
        if e.clock is not None:
            self._report(model, worker, e.clock, e.since)
        # The answer to a new state does not wait for the store, so that counts as kept only once it comes again.
        kept = e.state is None or (e.state == worker.state and not self.c.storage_away)
        if e.state is not None and e.state != worker.state:
            worker.keep(e.state)
            self.c.save_worker(model, worker)
        for clock, metrics in points:
            self.note(model, worker.name, worker.done if clock is None else clock, metrics, now)
            worker.note(metrics)
        asked = self.state(model, worker)
        if asked == "stop" and self.c.storage_away:
            asked = "paused"  # the end of its run may not be stored, and a heartbeat must be answered all the same
        body = {
            "state": asked,
            "clock": worker.done,
            "min_clock": model.gate.min_clock(model.roster),
            "timeline": worker.timeline,
            "evaluate": model.awaits_evaluation,
            "first": model.roster.live()[0] is worker,
            "state_kept": kept,
            "settings_tag": model.settings_tag,
        }
        # Redis may hang, and that be known only later: the state, or the end of the run, may still be on its way to it.
        waits = asked == "stop" or (e.state is not None and kept)
        (self.c.answer if waits else self.c.answer_now)(e.request, body)

    def _report(self, model: Model, worker: Worker, clock: int, since: int | None) -> None:
        model.gate.check(worker, clock, since)
        before = worker.done
        if worker.left_out is None:
            worker.left_out = clock if since != clock and model.left_out(worker, clock) else -1
        if clock > worker.done and since != clock:  # else it only goes on where the others are, and has done nothing
            model.gate.resume(worker, model.roster)
        model.gate.report(worker, clock, since)
        if worker.done > before:
            self.c.mark_dirty(model)
            if model.gate.may_fold(worker):
                self.c.save_clock(model)

    def _check_timeline(self, model: Model, worker: Worker, timeline: int | None) -> None:
        if timeline is None:
            known, worker.timeline = worker.timeline, model.timeline
        else:
            known = timeline
            if timeline == model.timeline:
                worker.timeline = timeline
        if known != model.timeline:
            raise self._rolled_back(model, worker)

    def _rolled_back(self, model: Model, worker: Worker) -> PsError:
        clock = self.grant(model, worker)
        return problem(
            "rolled_back",
            f"model '{model.name}' was rolled back, restored or made synchronous; it continues at clock {clock}",
            hint="discard pushes in doubt, continue at this clock, and pull",
            timeline=model.timeline,
            clock=clock,
        )

    def metrics(self, e: ReportMetrics, now: float) -> None:
        model = self.c.model(e.model)
        with validating():
            metrics = check_metrics(e.metrics)
        if e.generation not in (None, model.generation) or e.timeline not in (None, model.timeline):
            metrics = {}  # of values that may be gone
        name = e.worker if e.worker in model.roster.workers else ""
        worker = model.roster.workers.get(name)
        if worker is not None and worker.alive:
            worker.note(metrics)
        accepted = self.note(model, name, e.clock, metrics, now)
        self.c.answer(e.request, {"accepted": accepted})

    def note(self, model: Model, worker: str, clock: int | None, metrics: dict[str, float], now: float) -> int:
        """Add metrics to the model's series; return the number of values added."""
        if not metrics:
            return 0
        added = model.series.add(now, now + self.c.wall_offset_s, clock, worker, metrics)
        self.runs.check_stop_rule(model, worker, metrics, now)
        return added

    def clock(self, e: ReportClock, now: float) -> None:
        model = self.joined_model(e)
        worker = self.renew_lease(model, e.worker, e.epoch, now)
        self._check_timeline(model, worker, e.timeline)
        if len(model.clock_waiters) >= limits.WAITERS_MAX:
            raise problem("too_many_requests", f"{limits.WAITERS_MAX} requests are already waiting, which is the limit")
        self._report(model, worker, e.clock, e.since)
        waiter = Waiter(e.request, now + e.wait_s, worker.name, worker.epoch, e.clock)
        self.c.park(model.clock_waiters, waiter, now)
        model.waits_for = min(model.waits_for, e.clock)
        model.clock_waits_end_s = min(model.clock_waits_end_s, waiter.deadline_s)
        worker.open_polls += 1
        self.c.mark_dirty(model)

    def staged(self, e: ClockStaged, now: float) -> None:
        model, shard = self.c.models.get(e.model), self.c.shards.get(e.shard)
        if shard is None or not shard.alive or shard.epoch != e.shard_epoch:
            return
        if model is None or not model.gate.sync or (model.generation, model.timeline) != (e.generation, e.timeline):
            return
        worker = model.roster.workers.get(e.worker)
        if worker is None or not worker.alive or worker.epoch != e.epoch:
            return
        if e.clock != model.gate.next_clock(worker) + 1 or e.clock > model.gate.clock + limits.CLOCKS_AHEAD_MAX:
            return  # reported already; or the others have gone on without it and it must ask; or too far ahead
        if worker.final_push != (e.clock, e.seq):
            worker.final_push = (e.clock, e.seq)
            worker.final_push_shards.clear()
        worker.final_push_shards.add(e.shard)
        if len(worker.final_push_shards) >= e.shards:
            worker.timeline = e.timeline
            self._report(model, worker, e.clock, e.clock - 1)  # it has just done its next clock, so it skipped none

    # --- after each event ---

    def advance(self, model: Model, now: float) -> None:
        """Open or close the gate as the workers present ask for, and decide the commits that are possible."""
        gate = model.gate
        if gate.open(model.roster):
            self.c.save_clock(model)
        if gate.sync and model.ready and not model.restoring and not model.checkpoints.reading_current:
            self._commit(model, now)

    def _commit(self, model: Model, now: float) -> None:
        """Make the commits that are possible; if there are none, make the current clock a cut if that is due."""
        made = 0
        while made < COMMITS_PER_EVENT and (commit := self._decide(model, now)) is not None:
            made += 1
            if not model.commits or model.commits[-1][1].revision != commit.revision:
                commit = replace(commit, settings=model_settings_document(model.spec, model.revision))
            if commit.cut:
                model.cuts.begin(model.gate.clock, now)
            model.last_commit_s = now
            model.commits.append((now, commit))
            self.c.save_commit(model, commit)
            self.c.publish(commit.document(model.key) | {"asks": self._must_tell_workers(model)})
        if made:
            self.prune(model, now)
            self.c.save_clock(model)
        elif model.needs_idle_cut(now):
            model.cuts.begin(model.gate.clock, now, urgent=model.cuts.wanted_now)
            model.cuts.wanted_now = False
            self.c.save_clock(model)
            self.c.model_changed(model)
        if made == COMMITS_PER_EVENT:
            self.c.mark_dirty(model)  # there may be more

    def _decide(self, model: Model, now: float) -> Commit | None:
        """Decide the next commit; None if that is not possible now."""
        if model.commits_full:
            self.prune(model, now)
            if model.commits_full:
                return None  # some partition has yet to take the oldest one, or with a journal to store it
        if model.gate.opening:
            # Partitions apply nothing of this phase before this commit, so all of them must be served and in place.
            return model.gate.empty_commit(model.roster, model.timeline, model.revision) if model.may_cut else None
        cut = model.cut_due(now) and model.may_cut
        return model.gate.decide(model.roster, model.timeline, model.revision, cut)

    def prune(self, model: Model, now: float) -> None:
        """Forget the commits that no partition needs any more."""
        for old in model.prune_commits(now):
            self.c.drop(f"commit:{model.name}:{old.t}")

    def _must_tell_workers(self, model: Model) -> bool:
        """Whether the workers must be told something, which only the reply to their own clock report carries.

        Of an evaluation they are told once: if nobody makes it, asking each time would nearly halve the pace, and their
        heartbeats tell them of it, too.
        """
        evaluation = any(v.leased is None and model.gate.clock == v.clock + 1 for v in model.evaluations)
        return evaluation or any(self.state(model, w) != "active" for w in model.roster.live())

    def release(self, model: Model, now: float) -> None:
        """Answer the clock waiters that are released, rolled back, past their deadline, or no longer members."""
        top = model.gate.released(model.roster) if model.ready else -1
        if model.waits_for > top and now < model.clock_waits_end_s:
            return
        low = model.gate.min_clock(model.roster)
        for w in list(model.clock_waiters):
            try:
                worker = model.roster.find(w.worker, w.epoch)
            except PsError as gone:  # `fenced`, or `unknown_worker` once it is forgotten
                self.c.answer_waiter(model, w, gone, now)
                continue
            if worker.timeline != model.timeline:
                worker.timeline = model.timeline
                self.c.answer_waiter(model, w, self._rolled_back(model, worker), now)
            else:
                released = w.clock <= top
                if released or now >= w.deadline_s:
                    self.c.answer_waiter(model, w, self._clock_body(model, worker, w.clock, low, released), now)
        model.waits_for = min([w.clock for w in model.clock_waiters], default=inf)
        model.clock_waits_end_s = min([w.deadline_s for w in model.clock_waiters], default=inf)

    def grant(self, model: Model, worker: Worker) -> int:
        """Record and return the clock that the worker is told to go on at."""
        if worker.granted < (granted := model.gate.next_clock(worker)):
            worker.granted = granted
            if model.gate.may_fold(worker):
                self.c.save_clock(model)  # a new leader must know which clocks it was told to skip
        return worker.granted

    def _clock_body(self, model: Model, worker: Worker, clock: int, low: int, released: bool) -> dict[str, Any]:
        gate = model.gate
        waiting = [] if released else gate.waiting_for(clock, model.roster)
        if not model.ready:
            waiting = ["the model's initial values"]
        return {
            "released": released,
            "late": worker.left_out == clock,
            "clock": self.grant(model, worker),
            "min_clock": low,
            # Reported versions may predate a rollback, and the worker's next pull waits for the version given here.
            "version": gate.clock if gate.sync else model.version,
            "waiting_for": waiting,
            "timeline": model.timeline,
            "state": self.state(model, worker),
            "evaluate": model.awaits_evaluation,
        }
