"""Load on models whose values count the pushes: one process, a thread for each worker, every operation recorded.

`python -m tests.chaos.load FILE URL JOBS` runs until its stdin closes.  JOBS is a JSON list of `Job`s; the records
(`history.py`) are written to FILE.
"""

import json
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

import paramserver as ps
from paramserver.client import transfer
from paramserver.client.client import Client
from paramserver.client.frames import PushTerms
from paramserver.client.worker import Worker
from paramserver.errors import PsError
from paramserver.types import AnyArray, PushId

from .history import Recorder

ROOT = Path(__file__).parents[2]
PULL_EVERY = 3
"""Pushes between two pulls of an asynchronous worker."""


@dataclass(frozen=True)
class Job:
    """One worker of one model."""

    model: str
    worker: int
    """Number of the worker and of its own cell."""
    workers: int
    """Number of workers' cells in each partition."""
    mode: Literal["async", "sync"] = "async"
    joined: bool = True
    """Whether it joins the model as a worker; otherwise it only pushes and pulls."""
    pause_s: float = 0.02
    """Pause between two operations (sync: between two iterations)."""
    timeout_s: float = 60.0
    deliveries: int = 1
    """How often each push is sent under the same id; more than 1 only if not `joined`."""
    persists: bool = False
    """Whether it goes on after any error, with the same worker as long as that has joined."""

    @property
    def steps(self) -> bool:
        """Whether it ends an iteration with `step`, whose push has the shards report the clock; else with `clock`."""
        return self.mode == "sync" and self.worker % 2 == 1


def create(
    client: Client, model: str, *, workers: int, mode: str, ack: str, partitions: int = 6, size: int = 64
) -> None:
    """Create a model of `partitions` times `size` cells, all 0, to which gradients are added unscaled."""
    consistency = ps.Sync(min_workers=workers) if mode == "sync" else ps.Async()
    client.create_model(
        model,
        {"w": (partitions * size,)},
        optimizer=ps.Sum(),
        consistency=consistency,
        partitions=partitions,
        ack=ack,
        timeout=60.0,
    )


def bounds_of(client: Client, model: str) -> list[int]:
    """Return the first element of each partition of a model, and the total size."""
    return [int(b) for b in client.model(model).info(timeout=60.0)["bounds"]]


def ones(bounds: Sequence[int], worker: int, workers: int) -> AnyArray:
    """Return a worker's gradient: 1.0 in its own of the first `workers` cells of each partition, and in all others."""
    out = np.ones(bounds[-1], np.float32)
    for begin in bounds[:-1]:
        out[begin : begin + workers] = 0.0
        out[begin + worker] = 1.0
    return out


def parts_of(values: ps.Params, bounds: Sequence[int], workers: int) -> list[list[Any]]:
    """Return [partition, version, incarnation, min and max shared cell, workers' cells] of each pulled partition."""
    flat, out = values["w"], []
    for index, (version, incarnation) in sorted(values.origin.versions.items()):
        part = flat[bounds[index] : bounds[index + 1]]
        shared = part[workers:]
        own = [float(x) for x in part[:workers]]
        out.append([index, version, incarnation, float(shared.min()), float(shared.max()), own])
    return out


class Load(threading.Thread):
    """The thread of one job."""

    def __init__(self, job: Job, url: str, recorder: Recorder, stop: threading.Event) -> None:
        super().__init__(name=f"{job.model}/{job.worker}", daemon=True)
        self.job, self.url, self.recorder, self.stopped = job, url, recorder, stop
        self.pushes = 0

    def run(self) -> None:
        try:
            while not self.stopped.is_set():
                try:
                    with ps.connect(self.url, timeout=self.job.timeout_s) as client:
                        while not self.stopped.is_set():
                            self.go_on(client)
                except PsError as e:
                    if not self.job.persists:
                        raise
                    self.recorder.write(op="failed", what="beginning", model=self.job.model, error=e.code)
                    self.stopped.wait(self.job.pause_s)
        except BaseException as e:  # tests look for it in the history
            self.recorder.write(op="error", error=f"{self.name}: {e!r}\n{traceback.format_exc()}")

    def go_on(self, client: Client) -> None:
        """Work until told to stop, or in sync until a push is in doubt."""
        job, model = self.job, client.model(self.job.model)
        if not hasattr(self, "gradient"):
            self.prepare(client)
        if job.mode == "sync":
            with model.worker(f"w{job.worker}") as worker:
                self.work_in_step(worker)
        elif job.joined:
            with model.worker(f"w{job.worker}") as worker:
                self.work(worker)
        else:
            self.work(model)

    def prepare(self, client: Client) -> None:
        """Read the bounds of the model's partitions and make the gradient."""
        self.bounds = bounds_of(client, self.job.model)
        self.gradient = ones(self.bounds, self.job.worker, self.job.workers)

    def work(self, target: Any) -> None:
        """Push until told to stop, with a pull after every third push."""
        while not self.stopped.wait(self.job.pause_s):
            self.push(target)
            if self.pushes % PULL_EVERY == 0:
                self.pull(target)

    def work_in_step(self, worker: Worker) -> None:
        """Pull, push and clock until told to stop or a push is in doubt: only a new epoch rules it out.

        If the job persists, that is left to the worker itself.
        """
        result = ""
        while not self.stopped.wait(self.job.pause_s):
            if result != "doubt":  # else its iteration may be over: the next push tells
                self.pull(worker)
            start = time.monotonic()
            match result := self.push(worker):
                case "doubt" if not self.job.persists:
                    return
                case "ok" if self.job.steps:
                    self.write_clock(worker, start, worker._session.clock)
                case "ok" | "reported":
                    while not self.clock(worker) and not self.stopped.is_set():
                        pass

    def push(self, target: Any) -> str:
        """Push once and return `ok`, `doubt`, or `dropped` if the worker must assume that the push was not applied.

        `reported`: nothing was sent, as the worker has yet to wait for the end of an iteration that it has reported.
        """
        self.pushes += 1
        number = (self.job.worker << 32) + self.pushes
        who = {"model": self.job.model, "by": self.job.worker}
        key = f"{self.job.model}:{number}"
        self.recorder.write(op="invoke", id=key, **who, start=time.monotonic())
        try:
            for _ in range(self.job.deliveries):
                done = self.deliver(target)
        except PsError as e:
            self.recorder.write(op="push", id=key, **who, end=time.monotonic(), result="doubt", error=e.code)
            return "reported" if e.code == "conflict" and self.job.persists else "doubt"
        result = "dropped" if done.state == "dropped" else "ok"
        self.recorder.write(op="push", id=key, **who, end=time.monotonic(), result=result, error=done.state)
        return result

    def deliver(self, target: Any) -> ps.Pushed:
        """Send the current push; with several deliveries, under an id that is the same each time."""
        if self.job.deliveries == 1:
            push = target.step if self.job.steps else target.push
            done: ps.Pushed = push({"w": self.gradient})
            return done
        client: Client = target._client
        deadline = client.deadline(None)
        terms = PushTerms(PushId(f"twice-{self.job.worker}", 1, self.pushes), None, 1.0, None, None, None)
        return client.run(transfer.push(client.cluster, target.name, deadline, {"w": self.gradient}, terms))

    def pull(self, target: Any) -> None:
        start = time.monotonic()
        try:
            values = target.pull()
        except PsError as e:
            self.recorder.write(op="failed", what="pull", model=self.job.model, error=e.code)
            return
        write_pull(self.recorder, self.job, start, values, self.bounds, epoch_of(target))

    def clock(self, target: Worker) -> bool:
        """Report the iteration as done and wait for the next; return whether it may begin."""
        start = time.monotonic()
        try:
            clock = target.clock()
        except PsError as e:
            self.recorder.write(op="failed", what="clock", model=self.job.model, error=e.code)
            return False
        self.write_clock(target, start, clock)
        return True

    def write_clock(self, worker: Worker, start: float, clock: int) -> None:
        """Record that this iteration may begin."""
        session = worker._session
        self.recorder.write(
            op="clock", model=self.job.model, by=self.job.worker, start=start, end=time.monotonic(),
            clock=clock, timeline=session.timeline, epoch=session.numbers.epoch,
        )  # fmt: skip


def epoch_of(target: Any) -> int:
    """Return the epoch of a worker; 0 for a model used without joining."""
    return int(target._session.numbers.epoch) if isinstance(target, Worker) else 0


def write_pull(
    recorder: Recorder, job: Job, start: float, values: ps.Params, bounds: Sequence[int], epoch: int
) -> None:
    """Record one pull."""
    recorder.write(
        op="pull", model=job.model, by=job.worker, start=start, end=time.monotonic(), epoch=epoch,
        timeline=values.origin.timeline, parts=parts_of(values, bounds, job.workers),
    )  # fmt: skip


def begin(file: Path, url: str, jobs: Sequence[Job]) -> subprocess.Popen[bytes]:
    """Start a load process, which ends when its stdin is closed."""
    argv = [sys.executable, "-m", "tests.chaos.load", str(file), url, json.dumps([asdict(j) for j in jobs])]
    log = file.with_suffix(".log").open("ab")
    with log:
        return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=ROOT)


def main(file: Path, url: str, jobs: Sequence[Job]) -> None:
    """Run the jobs until stdin closes."""
    recorder, stop = Recorder(file), threading.Event()
    threads = [Load(job, url, recorder, stop) for job in jobs]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    recorder.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [Job(**j) for j in json.loads(sys.argv[3])])
