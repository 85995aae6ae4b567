"""Data and evaluation tasks: registered, leased to workers, done, and leased again when a worker is gone."""

from bisect import bisect_left
from collections.abc import Collection
from operator import attrgetter
from typing import Any, Final

from paramserver import limits
from paramserver.core.near import near
from paramserver.core.scheduler.cluster import Cluster
from paramserver.core.scheduler.io import DeleteDataset, LeaseTask, RegisterDataset, RequestEvaluation, TaskDone
from paramserver.core.scheduler.membership import Worker
from paramserver.core.scheduler.models import Model
from paramserver.core.scheduler.run_desk import RunDesk
from paramserver.core.scheduler.series import check_metrics
from paramserver.core.scheduler.tasks import EVALUATE, Dataset, DatasetSpec, Evaluation, parse_task
from paramserver.core.scheduler.waiter import Waiter
from paramserver.core.scheduler.worker_desk import WorkerDesk
from paramserver.errors import PsError, problem, validating

DATASETS_MAX: Final = 256
EVALUATIONS_MAX: Final = 8
_DELETING: Final = "with DELETE /models/{m}/tasks/{dataset}, in Python model.delete_tasks()"


class TaskDesk:
    """Handles task events."""

    def __init__(self, cluster: Cluster, runs: RunDesk, workers: WorkerDesk) -> None:
        self.c = cluster
        self.runs = runs
        self.workers = workers

    def register(self, e: RegisterDataset, now: float) -> None:
        model = self.c.model(e.model)
        with validating():
            spec = DatasetSpec.check(e.dataset, e.size, e.task_size, e.ranges, e.uri, e.assignment, e.passes)
        old = model.datasets.get(spec.name)
        if old is not None and old.spec != spec:
            others = " and ".join(f for f in DatasetSpec.__struct_fields__ if getattr(old.spec, f) != getattr(spec, f))
            detail = f"dataset '{spec.name}' is already registered with different {others}"
            raise problem("conflict", detail, hint="choose another name")
        if old is None:
            self._make_room(model, spec)
            number = 1 + max([d.number for d in model.datasets.values()], default=0)
            model.datasets[spec.name] = Dataset(spec, number)
            self.c.save(f"dataset:{model.name}:{spec.name}", spec.document)
            self.c.save_dataset(model, spec.name)
            self.c.mark_dirty(model)
        self.c.answer(e.request, model.datasets[spec.name].document(), 200 if old else 201)

    def _make_room(self, model: Model, new: DatasetSpec) -> None:
        """Forget as many of the model's finished datasets, those registered first, as a new one needs room.

        Raises ConflictError (`conflict`), and forgets none, if that would not be enough.
        """
        count = len(model.datasets) + 1
        ranges = len(new.ranges) + sum(len(d.spec.ranges) for m in self.c.models.values() for d in m.datasets.values())
        gone: list[str] = []
        for old in sorted((d for d in model.datasets.values() if d.finished), key=lambda d: d.number):
            if count <= DATASETS_MAX and ranges <= limits.TASKS_MAX:
                break
            gone.append(old.spec.name)
            count -= 1
            ranges -= len(old.spec.ranges)
        if count > DATASETS_MAX:
            raise problem(
                "conflict",
                f"the model has {DATASETS_MAX} datasets that are not finished, which is the limit",
                hint=f"delete those that are not needed, {_DELETING}",
            )
        if ranges > limits.TASKS_MAX:
            raise problem(
                "conflict",
                f"the datasets of all models would have {ranges} ranges; the limit is {limits.TASKS_MAX}",
                hint=f"choose a larger task_size, or delete datasets that are not needed, {_DELETING}",
            )
        for name in gone:
            del model.datasets[name]
            self.c.drop_dataset(model, name)

    def delete(self, e: DeleteDataset, now: float) -> None:
        model = self.c.model(e.model)
        if e.dataset not in model.datasets:
            raise _unknown(model, e.dataset)
        del model.datasets[e.dataset]
        self.c.drop_dataset(model, e.dataset)
        for waiter in [w for w in model.task_waiters if w.dataset == e.dataset]:
            self.c.answer_waiter(model, waiter, _unknown(model, e.dataset), now)
        self.c.answer(e.request, None, 204)

    def lease(self, e: LeaseTask, now: float) -> None:
        model = self.workers.joined_model(e)
        if e.dataset != EVALUATE and e.dataset not in model.datasets:
            raise _unknown(model, e.dataset)
        worker = self.workers.renew_lease(model, e.worker, e.epoch, now)
        if len(model.task_waiters) >= limits.WAITERS_MAX:
            raise problem("too_many_requests", f"{limits.WAITERS_MAX} requests are already waiting, which is the limit")
        if e.holding is not None:
            self._free(model, worker, e.dataset, e.holding)
        waiter = Waiter(e.request, now + e.wait_s, worker.name, worker.epoch, dataset=e.dataset)
        self.c.park(model.task_waiters, waiter, now)
        worker.open_polls += 1
        self.c.mark_dirty(model)

    def _free(self, model: Model, worker: Worker, dataset: str, holding: Collection[str]) -> None:
        """Free what the worker has leased but does not hold: it gave the task up, or never got the reply."""
        holding = set(holding)
        if dataset != EVALUATE:
            if model.datasets[dataset].release(worker.name, worker.epoch, holding):
                self.c.save_dataset(model, dataset)
            return
        for evaluation in model.evaluations:
            if evaluation.leased == (worker.name, worker.epoch) and evaluation.id not in holding:
                evaluation.leased = None
                self.c.save_clock(model)

    def _next_task(self, model: Model, worker: Worker, dataset: str) -> dict[str, Any] | None:
        holder = (worker.name, worker.epoch)
        if dataset == EVALUATE:
            evaluation = next((v for v in model.evaluations if v.leased is None), None)
            if evaluation is None:
                return None
            evaluation.leased = holder
            self.c.save_clock(model)
            return evaluation.task()
        live, found = model.roster.live(), model.datasets[dataset]
        task = found.lease(*holder, bisect_left(live, worker.rank, key=attrgetter("rank")), len(live))
        if task is not None:
            self.c.save_dataset(model, dataset)
        return task

    def task_done(self, e: TaskDone, now: float) -> None:
        model = self.workers.joined_model(e)
        with validating():
            metrics = check_metrics(e.metrics)
            name, numbers = parse_task(e.task)
        worker = self.workers.renew_lease(model, e.worker, e.epoch, now)
        clock = worker.done
        if name == EVALUATE and len(numbers) == 2:
            if not model.gate.sync or clock < numbers[0]:  # else its values were those of its own clock
                clock = numbers[0]
            others = [v for v in model.evaluations if v.id != e.task]
            if numbers[1] != model.timeline:
                metrics = {}  # of values that were rolled back
            elif len(others) == len(model.evaluations):  # repeated, or superseded while it was nobody's
                metrics = {n: v for n, v in metrics.items() if not model.series.has(n, clock, worker.name)}
            else:
                model.evaluations = others
                self.c.save_clock(model)
        elif name in model.datasets and len(numbers) == 2:
            model.datasets[name].finish(*numbers)
            self.c.save_dataset(model, name)
        else:
            raise problem("unknown_task", f"no task {e.task!r:.80}")
        self.workers.note(model, worker.name, clock, metrics, now)
        self.c.mark_dirty(model)
        self.c.answer(e.request, {"id": e.task, "done": True})

    def ask_evaluation(self, e: RequestEvaluation, now: float) -> None:
        model = self.c.model(e.model)
        evaluation = self.evaluate(model)
        self.c.answer(e.request, {"id": evaluation.id, "clock": evaluation.clock}, 201)

    def evaluate(self, model: Model) -> Evaluation:
        """Return an evaluation task for the current clock, creating it if there is none yet."""
        clock = model.gate.clock
        model.evaluated = clock
        known = next((v for v in model.evaluations if v.clock == clock), None)
        if known is not None:
            return known
        # The new one supersedes those that nobody has leased yet, and the oldest if there would be too many.
        model.evaluations = [v for v in model.evaluations if v.leased is not None][-(EVALUATIONS_MAX - 1) :]
        model.evaluations.append(Evaluation(clock, model.timeline))
        self.c.save_clock(model)
        self.c.mark_dirty(model)
        return model.evaluations[-1]

    # --- after each event ---

    def watch(self, model: Model) -> None:
        """Create the evaluation that is due by `evaluate_every`, if any."""
        run = self.runs.of_model(model)
        every = (run.evaluate_every if run else 0) or model.spec.evaluate_every
        if every and model.gate.clock // every > model.evaluated // every:
            self.evaluate(model)

    def hand_out(self, model: Model, now: float) -> None:
        """Answer the waiting workers that get a task, are finished, have reached their deadline, or are gone."""
        rested = False
        empty: set[str] = set()  # what has no task for one worker has none for the next, however many wait
        for w in list(model.task_waiters):
            try:
                worker = model.roster.find(w.worker, w.epoch)
            except PsError as gone:  # `fenced`, or `unknown_worker` once it is forgotten
                self.c.answer_waiter(model, w, gone, now)
                continue
            asked = self.workers.state(model, worker)
            dataset, task = model.datasets.get(w.dataset), None
            if asked == "active" and w.dataset not in empty:
                task = self._next_task(model, worker, w.dataset)
                if task is None and not (dataset is not None and dataset.static):
                    empty.add(w.dataset)
            finished = asked in ("stop", "draining") or (dataset is not None and dataset.finished)
            if task is not None and w.dataset != EVALUATE:
                model.gate.resume(worker, model.roster)
            elif w.dataset != EVALUATE and not worker.resting:
                model.roster.rest(worker, True)
                rested = True
            if task is None and not finished and now < w.deadline_s:
                continue
            body = {
                "task": task,
                "finished": finished,
                "clock": self.workers.grant(model, worker),
                "timeline": model.timeline,
            }
            self.c.answer_waiter(model, w, body, now)
        if rested:
            # Barriers do not wait for resting workers, so others may be released now.
            self.c.mark_dirty(model)


def _unknown(model: Model, dataset: str) -> PsError:
    """Return the error for a request that names a dataset that the model does not have."""
    found = near(dataset, model.datasets)
    hint = f"did you mean '{found}'?" if found else "register it first, in Python with model.add_tasks()"
    return problem("unknown_task", f"model '{model.name}' has no dataset {dataset!r:.80}", hint=hint)
