"""One launch: start a system, run one untimed and one timed window of its workers, and check the values."""

import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from queue import Empty
from typing import Any

from benchmarks.meters import Reading, forget_peaks, memory_bytes, percentile
from benchmarks.systems.system import Running, System
from benchmarks.workloads import ENOUGH, GIVE_UP_S, Client, Rounds, Window, Work, verdict

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
PATIENCE_S = 120.0
"""Longest time for all workers to reach the next barrier, in addition to the window."""
LEARNING_WARM_S = 0.5


class Failed(Exception):
    """A launch failed and has no figures."""


@dataclass(frozen=True)
class Meeting:
    """What the workers of a launch and their parent have in common; the methods are for the parent."""

    seconds: float
    """Length of the timed window."""
    together: Barrier
    """They all wait here for each other between two steps."""
    stop: "Synchronized[int]"
    """See `Rounds`."""
    pushed: "Synchronized[int]"
    """Pushes of all workers, once they have ended."""
    results: "Queue[Any]"

    @property
    def patience_s(self) -> float:
        """Longest time for a step."""
        return PATIENCE_S + max(self.seconds, GIVE_UP_S)

    def meet(self) -> None:
        """Wait until all workers have ended a step.  Raises Failed."""
        try:
            self.together.wait(self.patience_s)
        except Exception:  # a worker broke the barrier and has reported why
            raise (self._first_failure() or Failed("the workers did not meet")) from None

    def result(self) -> Any:
        """Return what a worker has reported.  Raises Failed."""
        try:
            found = self.results.get(timeout=self.patience_s)
        except Empty:
            raise Failed(f"a worker did not answer in {self.patience_s:g} s") from None
        if isinstance(found, Failed):
            raise found
        return found

    def _first_failure(self) -> Failed | None:
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            try:
                found = self.results.get(timeout=0.2)
            except Empty:
                continue
            if isinstance(found, Failed) and "BrokenBarrierError" not in str(found):
                return found
        return None


def work_through(connect: Callable[[Work, int], Client], work: Work, rank: int, meeting: Meeting) -> None:
    """Run one worker process from start to end."""
    m = meeting
    try:
        client = connect(work, rank)
        rounds = Rounds(work, client, rank, m.stop)
        for warm in (True, False):
            m.together.wait()  # the parent takes a reading
            m.together.wait()
            m.results.put(rounds.run(warm_s(work, m.seconds) if warm else m.seconds, warm=warm))
            m.together.wait()  # the parent takes another reading
        with m.pushed.get_lock():
            m.pushed.value += rounds.done
        m.together.wait()
        if rank == 0:
            m.results.put("" if work.kind == "W4" else verdict(work, client.pull(), m.pushed.value))
        m.together.wait()
        client.close()
    except BaseException:
        m.results.put(Failed(traceback.format_exc(limit=-4)))
        m.together.abort()


def warm_s(work: Work, seconds: float) -> float:
    """Return the length of the untimed window."""
    return min(seconds, LEARNING_WARM_S) if work.kind == "W4" else seconds


def launch(system: System, work: Work, seconds: float) -> dict[str, Any]:
    """Run one launch and return its figures; raises Failed."""
    for name in THREADS:
        os.environ[name] = "1"
    try:
        with system.start(work) as running:
            return _drive(running, work, seconds)
    except Failed:
        raise
    except Exception as e:
        raise Failed(f"{type(e).__name__}: {e}") from e


def _drive(running: Running, work: Work, seconds: float) -> dict[str, Any]:
    context = mp.get_context("spawn")
    together, results = context.Barrier(work.workers + 1), context.Queue()
    meeting = Meeting(seconds, together, context.Value("q", 0), context.Value("q", 0), results)
    workers = [
        context.Process(target=work_through, args=(running.connect, work, rank, meeting), daemon=True)
        for rank in range(work.workers)
    ]
    with _started(workers) as pids:
        for warm in (True, False):
            meeting.meet()
            meeting.stop.value = 0
            if warm:
                forget_peaks(running.servers)
            servers = [*running.servers, *running.others()]
            before = Reading.now(servers, pids)
            meeting.meet()
            windows: list[Window] = [meeting.result() for _ in workers]
            after = Reading.now(servers, pids)
            meeting.meet()
        peak = memory_bytes(running.servers, "VmHWM")
        meeting.meet()
        check = str(meeting.result())
        meeting.meet()
    return figures(work, windows, before, after, peak - running.base_bytes, check) | {"versions": running.versions}


@contextmanager
def _started(workers: Sequence[BaseProcess]) -> Iterator[list[int]]:
    """Start the processes and yield their ids; they end by themselves after the block, or are killed if it failed."""
    for p in workers:
        p.start()
    try:
        yield [p.pid for p in workers if p.pid is not None]
        for p in workers:
            p.join(PATIENCE_S)
    finally:
        for p in workers:
            if p.is_alive():
                p.kill()
            p.join()


def figures(
    work: Work, windows: list[Window], before: Reading, after: Reading, held_bytes: int, check: str
) -> dict[str, Any]:
    """Return the figures of one launch."""
    rounds = sum(w.rounds for w in windows)
    rate = sum(w.rounds / w.seconds for w in windows)
    took_s = max(w.seconds for w in windows)
    moved_gb = rounds * 2 * work.model_bytes / 1e9
    every = [s for w in windows for s in w.round_s]
    server_s, worker_s = after.server_s - before.server_s, after.worker_s - before.worker_s
    accuracy = max(w.accuracy for w in windows)
    if work.kind == "W4":
        check = f"{accuracy:.1%}" if accuracy >= ENOUGH else f"WRONG: only {accuracy:.1%}"
    return {
        "rounds": rounds,
        "seconds": round(took_s, 4),
        "rounds_per_s": round(rate, 3),
        "mb_per_s": round(rate * 2 * work.model_bytes / 1e6, 2),
        "p50_ms": round(1e3 * percentile(every, 50), 4),
        "p99_ms": round(1e3 * percentile(every, 99), 4),
        "server_s_per_gb": round(server_s / moved_gb, 4),
        "worker_s_per_gb": round(worker_s / moved_gb, 4),
        "server_us_per_round": round(1e6 * server_s / rounds, 1),
        "worker_us_per_round": round(1e6 * worker_s / rounds, 1),
        "held_of_model": round(held_bytes / work.model_bytes, 2),
        "other_cores": round(after.others_s(before) / took_s, 2),
        "check": check,
    }
