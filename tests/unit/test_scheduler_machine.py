"""Invariants of the scheduler under any order of joins, clocks, deaths and kills of the scheduler."""

from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paramserver.core.scheduler import io
from paramserver.errors import FencedError, PsError

from .scheduling import Driver

NAMES = ("a", "b", "c", "d")
CRASH = st.one_of(st.none(), st.none(), st.integers(0, 5))
"""The number of an event's effects after which the scheduler is killed; None: it is not."""


class Training(RuleBasedStateMachine):
    """Up to four workers that report clocks one by one; any of them, a shard and the scheduler may die at any time."""

    mode: dict[str, Any] = {}  # noqa: RUF012 - replaced by the subclasses, never changed

    def __init__(self) -> None:
        super().__init__()
        self.d = Driver()
        self.workers: dict[str, dict[str, Any]] = {}
        """What each worker knows: the reply to its join, the clock it works on, its parked request."""
        self.epochs: dict[str, int] = {}
        self.seen = 0
        self.listed: set[tuple[int, str, int, int]] = set()
        self.last: tuple[int, int] = (0, -1)
        self.roster: set[tuple[str, int]] = set()
        """(worker, epoch) of those that were alive when the last commit had been decided."""

    @initialize()
    def start(self) -> None:
        self.d.model(consistency=self.mode)

    def _kill_scheduler(self) -> None:
        """Drop the workers' parked requests, so that they ask again."""
        for w in self.workers.values():
            w["parked"] = None

    @rule(name=st.sampled_from(NAMES), crash=CRASH)
    def join(self, name: str, crash: int | None) -> None:
        number = self.d.send(lambda n: io.JoinWorker(n, "m", name), crash)
        if crash is not None:
            self._kill_scheduler()
        reply = self.d.replies.get(number)
        if reply is None:
            return
        assert reply["epoch"] > self.epochs.get(name, 0), "an epoch was given out twice"
        self.epochs[name] = reply["epoch"]
        self.workers[name] = {**reply, "parked": None}

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), crash=CRASH)
    def work(self, data: st.DataObject, crash: int | None) -> None:
        """A worker that is not parked finishes an iteration, and waits at the clock."""
        name = data.draw(st.sampled_from(sorted(self.workers)))
        w = self.workers[name]
        if w["parked"] is None:
            w["done"] = w["clock"] + 1
            w["parked"] = self.d.clock_of(w, w["done"], crash)
            if crash is not None:
                number = w["parked"]
                self._kill_scheduler()
                w["parked"] = number if number in self.d.replies else None
        self.collect()

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        w = self.workers.pop(name)
        self.d.ask(lambda n: io.LeaveWorker(n, "m", w["worker"], w["epoch"]))

    @rule(seconds=st.sampled_from([1, 6]))
    def wait(self, seconds: int) -> None:
        """Let time pass; a worker that is not parked dies within six seconds."""
        self.d.wait(seconds)

    @rule()
    def shard_dies(self) -> None:
        self.d.shard("s0")

    @rule()
    def restart(self) -> None:
        self.d.restart()
        self._kill_scheduler()

    def collect(self) -> None:
        """Let the workers read their replies."""
        for name, w in list(self.workers.items()):
            reply = self.d.replies.get(w["parked"] or -1)
            if reply is None:
                continue
            w["parked"] = None
            if isinstance(reply, PsError):
                assert isinstance(reply, FencedError), reply
                if reply.code == "rolled_back":
                    w["clock"], w["timeline"] = reply.members["clock"], reply.members["timeline"]
                else:
                    del self.workers[name]
            elif reply["released"]:
                self.released(w, reply)
                w["clock"] = max(w["done"], reply["clock"])

    def released(self, w: dict[str, Any], reply: dict[str, Any]) -> None:
        """Check a released worker; for subclasses."""

    @invariant()
    def commits_are_contiguous_and_list_each_clock_once(self) -> None:
        for commit in self.d.commits()[self.seen :]:
            self.seen += 1
            timeline, t = commit["timeline"], commit["t"]
            if timeline == self.last[0]:
                assert t == self.last[1] + 1
            else:
                assert timeline > self.last[0]
                assert t <= self.last[1] + 1
            self.last = (timeline, t)
            ranks = [(rank, clock) for _, _, rank, clock in commit["contributions"]]
            assert ranks == sorted(ranks)
            for worker, epoch, _, clock in commit["contributions"]:
                entry = (timeline, worker, epoch, clock)
                assert entry not in self.listed
                self.listed.add(entry)
                assert clock <= t
            self.committed(commit)
            self.roster = self.alive()

    def committed(self, commit: dict[str, Any]) -> None:
        """Check a commit; for subclasses."""

    def alive(self) -> set[tuple[str, int]]:
        """(worker, epoch) of those that the scheduler takes for alive."""
        return {(r["worker"], r["epoch"]) for r in self.d.core.read.workers("m", self.d.now) if r["alive"]}

    @invariant()
    def what_was_published_is_known_after_a_kill(self) -> None:
        model = self.d.core.read.model("m") if self.d.core.read.models() else None
        if model is not None and self.mode["mode"] == "sync":
            assert (model["timeline"], model["clock"] - 1) >= self.last

    def teardown(self) -> None:
        """Parked workers are answered once all others have died: a death never leaves a barrier closed."""
        self.collect()
        parked = {n: w for n, w in self.workers.items() if w["parked"] is not None}
        enough = self.mode.get("min_workers", 1) == 1
        if parked and enough:
            self.d.wait(7)
            assert not [n for n, w in parked.items() if w["parked"] in self.d.open]


class SyncTraining(Training):
    """A commit needs the reports of all live workers, and lists what they have pushed for its clock."""

    mode = {"mode": "sync"}  # noqa: RUF012

    def committed(self, commit: dict[str, Any]) -> None:
        contributed = {(w, epoch) for w, epoch, _, clock in commit["contributions"] if clock == commit["t"]}
        assert self.roster & self.alive() <= contributed


class FoldTraining(Training):
    """A commit needs the reports of half the live workers; late gradients enter the next one."""

    mode = {"mode": "sync", "quorum": 0.5, "late": "fold"}  # noqa: RUF012


class SspTraining(Training):
    """No worker is more than two clocks ahead of the slowest live one."""

    mode = {"mode": "ssp", "staleness": 2}  # noqa: RUF012

    def released(self, w: dict[str, Any], reply: dict[str, Any]) -> None:
        assert w["done"] - reply["min_clock"] <= 2
        alive = self.alive()
        reported = [v.get("done", v["clock"]) for v in self.workers.values() if (v["worker"], v["epoch"]) in alive]
        assert not reported or w["done"] - min(reported) <= 2


SETTINGS = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestSync = SyncTraining.TestCase
TestSync.settings = SETTINGS
TestFold = FoldTraining.TestCase
TestFold.settings = SETTINGS
TestSsp = SspTraining.TestCase
TestSsp.settings = SETTINGS
