"""The gate of each consistency mode: who may go on to the next iteration, and when a synchronous clock commits.

Rules: semantics 4.  Everything here follows from the done reports of the workers and from who is alive; gradients are
not seen.  A sync commit t lists (worker, clock) pairs in (rank, clock) order; no (worker, clock) is listed twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Final

from msgspec import Struct

from paramserver import limits
from paramserver.core.membership import Roster, Worker
from paramserver.core.spec import ConsistencySpec
from paramserver.errors import problem

CLOCK_MAX: Final = 1 << 53


class Commit(Struct, frozen=True):
    """The decision on one synchronous clock."""

    t: int
    timeline: int
    contributions: tuple[tuple[str, int, int, int, float], ...]
    """(worker, epoch, rank, clock, weight)."""
    revision: int
    live_workers: int
    cut: bool

    def document(self, model: str, generation: int) -> dict[str, Any]:
        """The record as it is stored and published."""
        return {
            "type": "commit",
            "model": model,
            "generation": generation,
            "timeline": self.timeline,
            "t": self.t,
            "contributions": [list(c) for c in self.contributions],
            "revision": self.revision,
            "live_workers": self.live_workers,
            "cut": self.cut,
        }

    @classmethod
    def of(cls, doc: Mapping[str, Any]) -> "Commit":
        """The commit that a stored record describes."""
        return cls(
            doc["t"],
            doc["timeline"],
            tuple((w, e, r, c, x) for w, e, r, c, x in doc["contributions"]),
            doc["revision"],
            doc["live_workers"],
            doc["cut"],
        )


@dataclass(slots=True)
class Gate:
    """The clocks of one model under one consistency setting."""

    rule: ConsistencySpec
    clock: int = 0
    """sync: the clock that is open, which is the number of commits; else the highest the slowest worker ever had."""
    opened: bool = False
    """Whether `min_workers` have been there."""
    members: set[tuple[str, int]] = field(default_factory=set)
    """sync: (worker, epoch) of the roster of the open clock."""

    @property
    def sync(self) -> bool:
        """Whether clocks are committed."""
        return self.rule.mode == "sync"

    def change(self, rule: ConsistencySpec) -> None:
        """Another setting from now on; what belongs to the open clock is dropped when the mode changes."""
        if rule.mode != self.rule.mode:
            self.members.clear()
            self.opened = self.clock > 0
        self.rule = rule

    def reset(self, roster: Roster, clock: int) -> None:
        """Every clock is `clock`: a rollback, or the beginning of a sync phase."""
        self.clock = clock
        self.members.clear()
        for w in roster:
            w.done = w.granted = clock
            w.pending.clear()

    def open(self, roster: Roster) -> bool:
        """Takes the slowest clock, and notes whether enough workers have joined; True when that is news."""
        counting = roster.counting()
        was_open = self.opened
        if len(roster.live()) >= self.rule.min_workers:
            self.opened = True
        if not self.sync and counting and (self.opened or self.rule.mode != "ssp"):
            self.clock = max(self.clock, min(w.done for w in counting))
        return self.opened and not was_open

    def join_clock(self, roster: Roster) -> int:
        """The clock at which one who joins now begins."""
        counting = roster.counting()
        if self.sync or not self.opened or not counting:
            return self.clock
        return min(w.done for w in counting)

    def min_clock(self, roster: Roster) -> int:
        """Iterations that the slowest worker has finished; those still to come at the start count as well."""
        counting = roster.counting()
        if not counting or (not self.opened and self.rule.mode == "ssp"):
            return self.clock
        return min(w.done for w in counting)

    def check(self, worker: Worker, done: int, since: int | None) -> None:
        """Raises RequestError (`invalid_field`) for numbers that the worker cannot report; see `report`."""
        top = max(worker.done, self.clock + limits.CLOCKS_AHEAD_MAX) if self.sync else CLOCK_MAX
        if not 0 <= done <= top:
            raise problem("invalid_field", f"clock: must be from 0 to {top}, not {done}", where="clock")
        if since is not None and not 0 <= since <= done:
            raise problem("invalid_field", f"since: must be from 0 to clock {done}, not {since}", where="since")

    def report(self, worker: Worker, done: int, since: int | None = None) -> None:
        """The worker has finished `done` iterations; absolute, so an older report changes nothing.

        `since`: it has worked on every clock from there; None: from where it was last told to go on.
        Both are known to be possible (`check`).
        """
        if done <= worker.done:
            return
        if self.sync:
            if since is None and worker.granted <= done:
                since = worker.granted
            worker.pending.extend(range(max(worker.done, since or 0), done))
        worker.done = done

    def late(self, roster: Roster) -> dict[str, list[Any]]:
        """sync: (epoch, iterations done, clock granted, late clocks) by name, where a later list may have one that the
        others have passed; of everybody else the open clock says all that."""
        return {
            w.name: [w.epoch, w.done, w.granted, [c for c in w.pending if c < self.clock]]
            for w in roster.counting()
            if self.may_fold(w)
        }

    def may_fold(self, worker: Worker) -> bool:
        """sync: whether a clock of this worker that the others have passed may still enter a list."""
        return self.sync and self.rule.late == "fold" and min([worker.done, *worker.pending[:1]]) < self.clock

    def resume(self, worker: Worker, roster: Roster) -> None:
        """A resting worker has data again: it goes on where one who joins would begin."""
        if worker.resting:
            worker.done = max(worker.done, self.join_clock(roster))
            worker.granted = worker.done
            worker.resting = False

    def next_clock(self, worker: Worker) -> int:
        """The clock that this worker is to work on next."""
        return max(worker.done, self.clock) if self.sync else worker.done

    def _roster(self, roster: Roster) -> list[Worker]:
        """sync: the live roster of the open clock.

        It was fixed when the clock before committed.  For the first clock it stays open until somebody has reported,
        and when all of it have gone, it is those who are there now.
        """
        counting = roster.counting()
        live = [w for w in counting if (w.name, w.epoch) in self.members]
        if not live or (self.clock == 0 and not any(w.done for w in counting)):
            live = counting
            self.members = {(w.name, w.epoch) for w in live}
        return live

    def needed(self, live: int) -> int:
        """sync: workers out of a live roster of that size that must have reported."""
        count = self.rule.quorum_count
        # The subtraction keeps 0.1 * 30 = 3.0000000000000004 from asking for a fourth.
        wanted = min(count, live) if count is not None else ceil(self.rule.quorum * live - 1e-9)
        return max(1, wanted)

    def decide(self, roster: Roster, timeline: int, revision: int, cut: bool) -> Commit | None:
        """sync: the commit of the open clock if it can be made now; the next clock is open then."""
        if not self.sync or not self.opened:
            return None
        members = self._roster(roster)
        t = self.clock
        if not members or sum(w.done > t for w in members) < self.needed(len(members)):
            return None
        fold = self.rule.late == "fold"
        listed: list[tuple[str, int, int, int, float]] = []
        for w in roster.live():
            listed += [(w.name, w.epoch, w.rank, c, 1.0) for c in w.pending if c == t or (fold and c < t)]
            w.pending = [c for c in w.pending if c > t]
        return self._commit(tuple(listed), roster, timeline, revision, cut)

    def empty_commit(self, roster: Roster, timeline: int, revision: int) -> Commit:
        """sync: a commit that changes nothing, for the sake of its cut; all workers go on after it."""
        commit = self._commit((), roster, timeline, revision, True)
        self.reset(roster, self.clock)
        return commit

    def _commit(
        self,
        listed: tuple[tuple[str, int, int, int, float], ...],
        roster: Roster,
        timeline: int,
        revision: int,
        cut: bool,
    ) -> Commit:
        commit = Commit(self.clock, timeline, listed, revision, len(roster.live()), cut)
        self.clock += 1
        self.members = {(w.name, w.epoch) for w in roster.counting()}
        return commit

    def released(self, clock: int, min_clock: int) -> bool:
        """Whether a worker that has finished `clock` iterations may begin the next one; see `min_clock`."""
        if self.sync:
            return clock <= self.clock
        if self.rule.mode == "ssp":
            return clock - min_clock <= self.rule.staleness
        return True

    def waiting_for(self, clock: int, roster: Roster) -> list[str]:
        """Whom a worker that is not released waits for, by name."""
        missing = self.rule.min_workers - len(roster.live())
        if not self.opened and missing > 0:
            return [f"{missing} more worker{'s' if missing > 1 else ''} to join"]
        if self.sync:
            names = [w.name for w in self._roster(roster) if w.done <= self.clock]
            return names or ["the commit"]
        return [w.name for w in roster.counting() if w.done < clock - self.rule.staleness]
