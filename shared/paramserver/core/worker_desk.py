"""Workers come, report their clocks and go; commits are decided; data tasks are handed out."""

import re
from typing import Any, Final

from paramserver import limits
from paramserver.core.cluster import Cluster
from paramserver.core.documents import check_document
from paramserver.core.fields import finite
from paramserver.core.membership import Worker, expired
from paramserver.core.models import FORMAT, Model, Waiter
from paramserver.core.run_desk import RunDesk
from paramserver.core.scheduler_io import (
    DrainWorker,
    JoinWorker,
    LeaseTask,
    LeaveWorker,
    RegisterDataset,
    ReportClock,
    ReportMetrics,
    RequestEvaluation,
    TaskDone,
    WorkerHeartbeat,
)
from paramserver.core.series import check_metrics
from paramserver.core.tasks import EVALUATE, Dataset, DatasetSpec, Evaluation, parse_task
from paramserver.errors import PsError, problem

WORKER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?", re.ASCII)
COMMITS_PER_EVENT: Final = 64
DATASETS_MAX: Final = 256
EVALUATIONS_MAX: Final = 8
RANK_MAX: Final = 1 << 31
EPOCH_MAX: Final = 1 << 53


def _count(value: Any, where: str, top: int = EPOCH_MAX) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < top:
        raise problem("invalid_field", f"{where}: must be an integer from 0 to {top - 1}", where=where)


def _lease_s(value: Any) -> float:
    """A lease that a worker asks for; raises RequestError (`invalid_field`) outside of what is allowed."""
    if value is None:
        return limits.LEASE_S
    if not finite(value) or not limits.LEASE_S <= value <= limits.WORKER_LEASE_S_MAX:
        raise problem(
            "invalid_field",
            f"lease_s: must be from {limits.LEASE_S:g} to {limits.WORKER_LEASE_S_MAX:g} seconds, not {value!r:.40}",
            where="lease_s",
        )
    return float(value)


def _wait_s(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= limits.WAIT_S_MAX:
        raise problem("invalid_field", f"wait_s: must be from 0 to {limits.WAIT_S_MAX:g}", where="wait_s")
    return float(value)


class WorkerDesk:
    """Handles the events of workers."""

    def __init__(self, cluster: Cluster, runs: RunDesk) -> None:
        self.c = cluster
        self.runs = runs

    # --- membership ---

    def join(self, e: JoinWorker, now: float) -> None:
        model = self.c.model(e.model)
        if e.rank is not None:
            _count(e.rank, "rank", RANK_MAX)
        if e.above is not None:
            _count(e.above, "above", EPOCH_MAX - 1)
        lease_s = _lease_s(e.lease_s)
        name = self._name(model, e.name)
        rank = model.roster.choose_rank(name, e.rank)
        old = model.roster.workers.get(name)
        if old is not None and old.alive:
            self._part(model, old)
        clock = model.gate.join_clock(model.roster)
        worker, forgotten = model.roster.join(name, rank, e.above or 0, clock, model.timeline, now)
        worker.lease_s = lease_s
        for gone in forgotten:
            self.c.drop(f"worker:{model.name}:{gone}")
        if e.name is None or forgotten:
            self.c.save_model(model)
        self._save(model, worker)
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
        }
        self.c.answer(e.request, body, 201)

    def _name(self, model: Model, name: Any) -> str:
        if name is None:
            while True:
                chosen = f"{model.name}/w{model.worker_count}"
                model.worker_count += 1
                if chosen not in model.roster.workers:
                    return chosen
        if (
            not isinstance(name, str)
            or not WORKER_NAME.fullmatch(name)
            or len(name) > limits.WORKER_NAME_BYTES_MAX - 65
        ):
            raise problem(
                "invalid_field",
                f"name: {name!r:.140} is not allowed for a worker",
                hint="letters, digits, '.', '_' and '-', with at most one '/' inside",
                where="name",
            )
        return name if "/" in name else f"{model.name}/{name}"

    def _save(self, model: Model, worker: Worker) -> None:
        self.c.save(
            f"worker:{model.name}:{worker.name}",
            lambda: {
                "format": FORMAT,
                "epoch": worker.epoch,
                "alive": worker.alive,
                "rank": worker.rank,
                "clock": worker.done,
                "timeline": worker.timeline,
                "lease_s": worker.lease_s,
                "state": worker.state,
            },
        )

    def leave(self, e: LeaveWorker, now: float) -> None:
        model = self.c.model(e.model)
        worker = model.roster.workers.get(e.worker)
        if worker is None:
            raise problem("unknown_worker", f"worker {e.worker!r:.140} has not joined")
        if worker.alive and e.epoch in (None, worker.epoch):
            self._part(model, worker)
        self.c.answer(e.request, None, 204)

    def drain(self, e: DrainWorker, now: float) -> None:
        model = self.c.model(e.model)
        worker = model.roster.workers.get(e.worker)
        if worker is None or not worker.alive:
            raise problem("unknown_worker", f"worker {e.worker!r:.140} has not joined")
        worker.draining = True
        self.c.answer(e.request, {"worker": worker.name, "state": self.state(worker)})

    def expire(self, now: float) -> None:
        """Workers whose lease has run out; one that is parked here is alive."""
        for model in self.c.models.values():
            for worker in expired(model.roster, now):
                if worker.parked <= 0:
                    self._part(model, worker)

    def _part(self, model: Model, worker: Worker) -> None:
        """That incarnation is gone: barriers open, its data and evaluations are free again."""
        model.gate.open(model.roster)  # Before it goes, for it was among those who had joined.
        model.roster.bury(worker)
        for name, dataset in model.datasets.items():
            if dataset.release(worker.name, worker.epoch):
                self.c.save_dataset(model, name)
        for evaluation in model.evaluations:
            if evaluation.leased == (worker.name, worker.epoch):
                evaluation.leased = None
        self._save(model, worker)
        self.c.save_clock(model)
        self.c.roster_changed(model)

    def _heard(self, model: Model, name: str, epoch: int, now: float) -> Worker:
        worker = model.roster.find(name, epoch)
        worker.heard_s = now
        return worker

    def state(self, worker: Worker) -> str:
        """What the worker is asked to do."""
        asked = self.runs.worker_state(worker.name)
        return "draining" if asked == "active" and worker.draining else asked

    # --- reports ---

    def heartbeat(self, e: WorkerHeartbeat, now: float) -> None:
        model = self.c.model(e.model)
        metrics = check_metrics(e.metrics)
        check_document(e.state, "state")
        worker = self._heard(model, e.worker, e.epoch, now)
        if e.state is not None:
            worker.state = e.state
        if e.clock is not None:
            _count(e.clock, "clock")
            self._check_timeline(model, worker, e.timeline)
            self._report(model, worker, e.clock)
        self._note(model, worker.name, worker.done, metrics, now)
        worker.note(metrics)
        body = {
            "state": self.state(worker),
            "min_clock": model.gate.min_clock(model.roster),
            "timeline": worker.timeline,
            "evaluate": self._to_evaluate(model),
        }
        self.c.answer_now(e.request, body)

    def _to_evaluate(self, model: Model) -> bool:
        return any(v.leased is None for v in model.evaluations)

    def _report(self, model: Model, worker: Worker, clock: int) -> None:
        if clock > worker.done:
            model.gate.resume(worker, model.roster)
        model.gate.report(worker, clock)
        self.c.touch(model)

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
        clock = model.gate.next_clock(worker)
        return problem(
            "rolled_back",
            f"model '{model.name}' went on from clock {clock}",
            hint="drop what is in doubt, go on at this clock, and pull",
            timeline=model.timeline,
            clock=clock,
        )

    def metrics(self, e: ReportMetrics, now: float) -> None:
        model = self.c.model(e.model)
        metrics = check_metrics(e.metrics)
        if e.clock is not None:
            _count(e.clock, "clock")
        name = e.worker if e.worker in model.roster.workers else ""
        worker = model.roster.workers.get(name)
        if worker is not None and worker.alive:
            worker.note(metrics)
        accepted = self._note(model, name or "", e.clock, metrics, now)
        self.c.answer(e.request, {"accepted": accepted})

    def _note(self, model: Model, worker: str, clock: int | None, metrics: dict[str, float], now: float) -> int:
        if not metrics:
            return 0
        added = model.series.add(now, now + self.c.wall_offset_s, clock, worker, metrics)
        self.runs.saw_metrics(model, metrics, now)
        return added

    def clock(self, e: ReportClock, now: float) -> None:
        model = self.c.model(e.model)
        wait_s = _wait_s(e.wait_s)
        _count(e.clock, "clock")
        worker = self._heard(model, e.worker, e.epoch, now)
        self._check_timeline(model, worker, e.timeline)
        if len(model.clock_waiters) >= limits.WAITERS_MAX:
            raise problem("too_many_requests", f"{limits.WAITERS_MAX} requests wait already")
        self._report(model, worker, e.clock)
        model.clock_waiters.append(Waiter(e.request, now + wait_s, worker.name, worker.epoch, e.clock))
        worker.parked += 1

    # --- data ---

    def register(self, e: RegisterDataset, now: float) -> None:
        model = self.c.model(e.model)
        spec = DatasetSpec.check(e.dataset, e.size, e.task_size, e.ranges, e.uri, e.assignment, e.passes)
        old = model.datasets.get(spec.name)
        if old is not None and old.spec != spec:
            raise problem(
                "conflict", f"dataset '{spec.name}' is registered with other ranges", hint="choose another name"
            )
        if old is None and len(model.datasets) >= DATASETS_MAX:
            raise problem("too_many_requests", f"the model has {DATASETS_MAX} datasets, which is the bound")
        if old is None:
            model.datasets[spec.name] = Dataset(spec)
            self.c.save(f"dataset:{model.name}:{spec.name}", spec.document)
            self.c.save_dataset(model, spec.name)
            self.c.touch(model)
        self.c.answer(e.request, model.datasets[spec.name].document(), 200 if old else 201)

    def lease(self, e: LeaseTask, now: float) -> None:
        model = self.c.model(e.model)
        wait_s = _wait_s(e.wait_s)
        if e.dataset != EVALUATE and e.dataset not in model.datasets:
            raise problem(
                "unknown_task", f"model '{model.name}' has no dataset {e.dataset!r:.80}", hint="register it first"
            )
        worker = self._heard(model, e.worker, e.epoch, now)
        if len(model.task_waiters) >= limits.WAITERS_MAX:
            raise problem("too_many_requests", f"{limits.WAITERS_MAX} requests wait already")
        model.task_waiters.append(Waiter(e.request, now + wait_s, worker.name, worker.epoch, dataset=e.dataset))
        worker.parked += 1
        self.c.touch(model)

    def _next_task(self, model: Model, worker: Worker, dataset: str) -> dict[str, Any] | None:
        holder = (worker.name, worker.epoch)
        if dataset == EVALUATE:
            evaluation = next((v for v in model.evaluations if v.leased is None), None)
            if evaluation is None:
                return None
            evaluation.leased = holder
            self.c.save_clock(model)
            return evaluation.task()
        live = model.roster.live()
        task = model.datasets[dataset].lease(*holder, live.index(worker), len(live))
        if task is not None:
            self.c.save_dataset(model, dataset)
        return task

    def task_done(self, e: TaskDone, now: float) -> None:
        model = self.c.model(e.model)
        metrics = check_metrics(e.metrics)
        name, numbers = parse_task(e.task)
        worker = self._heard(model, e.worker, e.epoch, now)
        clock: int | None = worker.done
        if name == EVALUATE and len(numbers) == 1:
            clock = numbers[0]
            if any(v.clock == clock for v in model.evaluations):
                model.evaluations = [v for v in model.evaluations if v.clock != clock]
                self.c.save_clock(model)
        elif name in model.datasets and len(numbers) == 2:
            model.datasets[name].finish(*numbers)
            self.c.save_dataset(model, name)
        else:
            raise problem("unknown_task", f"no task {e.task!r:.80}")
        self._note(model, worker.name, clock, metrics, now)
        self.c.touch(model)
        self.c.answer(e.request, {"id": e.task, "done": True})

    def ask_evaluation(self, e: RequestEvaluation, now: float) -> None:
        model = self.c.model(e.model)
        evaluation = self._evaluate(model)
        self.c.answer(e.request, {"id": evaluation.id, "clock": evaluation.clock}, 201)

    def _evaluate(self, model: Model) -> Evaluation:
        clock = model.gate.clock
        model.evaluated = clock
        known = next((v for v in model.evaluations if v.clock == clock), None)
        if known is not None:
            return known
        # One that nobody has taken yet is superseded by the newer.
        model.evaluations = [v for v in model.evaluations if v.leased is not None][-EVALUATIONS_MAX:]
        model.evaluations.append(Evaluation(clock))
        self.c.save_clock(model)
        self.c.touch(model)
        return model.evaluations[-1]

    # --- what follows from all that ---

    def advance(self, model: Model, now: float) -> None:
        """Decides commits, asks for evaluations, and answers those who wait."""
        if model.gate.open(model.roster):
            self.c.save_clock(model)
        self._commit(model, now)
        run = self.runs.of_model(model)
        every = (run.evaluate_every if run else 0) or model.spec.evaluate_every
        if every and model.gate.clock // every > model.evaluated // every:
            self._evaluate(model)
        self.release(model, now)
        self._hand_out(model, now)

    def _commit(self, model: Model, now: float) -> None:
        gate = model.gate
        if not gate.sync or not model.ready or model.restoring or model.checkpoints.reading_still:
            return
        made = False
        for _ in range(COMMITS_PER_EVENT):
            may_cut = model.pending_cut is None and not model.checkpoints.writing
            if model.switched and model.cut_wanted:
                # All that a partition applies in this phase comes after this commit, so each must know its clock.
                if not may_cut or not model.served:
                    break
                commit = gate.empty_commit(model.roster, model.timeline, model.revision)
            else:
                cut = may_cut and (model.cut_wanted or now - model.last_cut_s >= limits.SNAPSHOT_INTERVAL_S)
                decided = gate.decide(model.roster, model.timeline, model.revision, cut)
                if decided is None:
                    break
                commit = decided
            made = True
            if commit.cut:
                model.pending_cut, model.last_cut_s, model.cut_wanted = commit.t + 1, now, False
                model.cut_seen.clear()
            model.last_commit_s = now
            model.commits.append((now, commit))
            document = commit.document(model.name, model.generation)
            self.c.save(f"commit:{model.name}:{commit.t}", lambda document=document: document)  # type: ignore[misc]
            self.c.publish(document)
        else:
            self.c.again(model)
        if made:
            for old in model.prune_commits(now):
                self.c.drop(f"commit:{model.name}:{old.t}")
            self.c.save_clock(model)

    def release(self, model: Model, now: float) -> None:
        """Answers those whose clock is free, those who have waited long enough, and those who are no members."""
        low = model.gate.min_clock(model.roster) if model.clock_waiters else 0
        for w in list(model.clock_waiters):
            worker = model.worker_of(w)
            if worker is None or not worker.alive:
                self._answer_waiter(now, model, w, _gone(w))
            elif worker.timeline != model.timeline:
                worker.timeline = model.timeline
                self._answer_waiter(now, model, w, self._rolled_back(model, worker))
            else:
                released = model.ready and model.gate.released(w.clock, low)
                if released or now >= w.deadline_s:
                    self._answer_waiter(now, model, w, self._clock_body(model, worker, w.clock, low, released))

    def _clock_body(self, model: Model, worker: Worker, clock: int, low: int, released: bool) -> dict[str, Any]:
        gate = model.gate
        waiting = [] if released else gate.waiting_for(clock, model.roster)
        if not released and not model.ready:
            waiting = ["the model's initial values"]
        worker.granted = gate.next_clock(worker)
        return {
            "released": released,
            "clock": worker.granted,
            "min_clock": low,
            "version": model.version,
            "waiting_for": waiting,
            "timeline": model.timeline,
            "state": self.state(worker),
            "evaluate": self._to_evaluate(model),
        }

    def _answer_waiter(self, now: float, model: Model, w: Waiter, outcome: dict[str, Any] | PsError) -> None:
        (model.clock_waiters if w in model.clock_waiters else model.task_waiters).remove(w)
        model.unpark(w, now)
        self.c.answer(w.request, outcome)

    def _hand_out(self, model: Model, now: float) -> None:
        rested = False
        for w in list(model.task_waiters):
            worker = model.worker_of(w)
            if worker is None or not worker.alive:
                self._answer_waiter(now, model, w, _gone(w))
                continue
            asked = self.state(worker)
            task = self._next_task(model, worker, w.dataset) if asked == "active" else None
            dataset = model.datasets.get(w.dataset)
            finished = asked in ("stop", "draining") or (dataset is not None and dataset.finished)
            if task is not None:
                model.gate.resume(worker, model.roster)
            elif w.dataset != EVALUATE and not worker.resting:
                worker.resting = rested = True
            if task is None and not finished and now < w.deadline_s:
                continue
            body = {
                "task": task,
                "finished": finished,
                "clock": model.gate.next_clock(worker),
                "timeline": model.timeline,
            }
            self._answer_waiter(now, model, w, body)
        if rested:
            # Whoever rests holds no barrier up: others may be free now.
            self.c.again(model)


def _gone(w: Waiter) -> PsError:
    return problem("fenced", f"worker '{w.worker}' of epoch {w.epoch} is no member any more", hint="join again")
