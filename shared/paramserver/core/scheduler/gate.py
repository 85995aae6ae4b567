"""The gate of each consistency mode: which workers may start the next iteration, and when a sync clock commits.

Rules: semantics 4.  Decisions depend only on the workers' done reports and on who is alive; gradients are not seen
here.  A sync commit t lists (worker, clock) pairs in (rank, clock) order; no pair is listed twice.
"""

from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any

from paramserver import limits
from paramserver.core.commit import Commit, Contribution
from paramserver.core.scheduler.membership import Roster, Worker
from paramserver.core.spec import ConsistencySpec
from paramserver.errors import problem


@dataclass(slots=True)
class Gate:
    """The clocks of one model, and the consistency setting that gates them."""

    rule: ConsistencySpec
    clock: int = 0
    """sync: the open clock, which is the next commit's `t`; else the highest clock the slowest worker ever had."""
    opened: bool = False
    """Whether `min_workers` workers have been live at once, and at clock 0, some worker ever since."""
    opening: bool = False
    """sync: whether the open clock's commit is the one that begins the phase, which lists nothing."""
    folds_from: int = 0
    """sync: clocks below are never folded, because the policy was `drop` when the others passed them."""
    members: list[Worker] = field(default_factory=list)
    """sync: the incarnations in the open clock's roster."""
    _of: list[Worker] | None = None
    """sync: the barrier members for which `_awaited` and `_size` were made; None: for an earlier clock."""
    _size: int = 0
    """sync: how many of the open clock's roster count."""
    _awaited: set[Worker] = field(default_factory=set)
    """sync: those of them that have not finished it."""
    _low_of: list[Worker] | None = None
    _low: int = 0
    """The lowest clock of `_low_of`."""
    _at_low: int = 0

    @property
    def sync(self) -> bool:
        """Whether the mode is `sync`, so that clocks are committed."""
        return self.rule.mode == "sync"

    def change(self, rule: ConsistencySpec, roster: Roster) -> None:
        """Switch to another setting.

        In a new mode, the gate waits for `min_workers` unless there has been progress.  So it does for more workers
        than before, unless one that is live has reported: the others may have been told to go on.
        """
        more = rule.min_workers > self.rule.min_workers and not any(w.done for w in roster.live())
        if rule.mode != self.rule.mode or more:
            self.opened = self.clock > 0
        if self.rule.late == "drop" and rule.late == "fold":
            self.folds_from = self.clock
        self.rule = rule

    def reset(self, roster: Roster, clock: int) -> None:
        """Set the clock of the model and of every worker, for a rollback or the start of a sync phase."""
        self.clock = self.folds_from = clock
        self.members, self._of, self._low_of = [], None, None
        for w in roster:
            w.done = w.granted = clock
            w.left_out = -1
            w.pending.clear()

    def open(self, roster: Roster) -> bool:
        """Open the gate if enough workers have joined, and outside sync take over the slowest worker's clock.

        At clock 0 it closes once all have gone: what they did not begin, the next ones begin together.
        Returns True if this call opened or closed the gate.
        """
        counted = roster.barrier_members()
        was_open = self.opened
        if len(roster.live()) >= self.rule.min_workers:
            self.opened = True
        elif not self.clock and not roster.live():
            self.opened = False
        if not self.sync and counted and (self.opened or self.rule.mode != "ssp"):
            self.clock = max(self.clock, self._lowest(counted))
        return self.opened != was_open

    def join_clock(self, roster: Roster) -> int:
        """The clock at which a worker that joins now begins."""
        counted = roster.barrier_members()
        if self.sync:
            return self.first_clock
        if not self.opened or not counted:
            return self.clock
        return self._lowest(counted)

    def min_clock(self, roster: Roster) -> int:
        """Iterations finished by the slowest worker.

        It is the gate's own clock while there is no worker to count and, in ssp, until the gate has opened, because
        workers that are yet to join count as well.
        """
        counted = roster.barrier_members()
        if not counted or (not self.opened and self.rule.mode == "ssp"):
            return self.clock
        return self._lowest(counted)

    def _lowest(self, counted: list[Worker]) -> int:
        """The lowest clock of the barrier members, of whom there are some; counted anew when the last one leaves it."""
        if self._low_of is not counted or self._at_low < 1:
            done = [w.done for w in counted]
            self._low_of, self._low = counted, min(done)
            self._at_low = done.count(self._low)
        return self._low

    def check(self, worker: Worker, done: int, since: int | None) -> None:
        """Raise RequestError (`invalid_field`) if the worker cannot report these numbers; see `report`."""
        ahead = max(worker.done, self.clock + limits.CLOCKS_AHEAD_MAX)
        top = ahead if self.sync else worker.done + limits.CLOCKS_AT_ONCE_MAX
        if not 0 <= done <= top:
            raise problem("invalid_field", f"clock: must be from 0 to {top}, not {done}", where="clock")
        if since is not None and not 0 <= since <= done:
            raise problem("invalid_field", f"since: must be from 0 to clock {done}, not {since}", where="since")

    def report(self, worker: Worker, done: int, since: int | None = None) -> None:
        """Record that the worker has finished `done` iterations; absolute, so an older report changes nothing.

        The worker has contributed to every clock from `since` on; None: from the clock at which it was last told to go
        on.  Both numbers must have passed `check`.
        """
        if done <= worker.done:
            return
        if self.sync:
            if since is None and worker.granted <= done:
                since = worker.granted
            first = max(worker.done, since or 0)
            dropped = self.clock if self.rule.late == "drop" else self.folds_from
            if first < done <= dropped:
                worker.left_out = done
            first = max(first, dropped)
            worker.pending.extend(range(first, done))
        if worker.done == self._low:
            self._at_low -= 1
        worker.done = done
        if done > self.clock:
            self._awaited.discard(worker)

    def late(self, roster: Roster) -> dict[str, list[Any]]:
        """sync: [epoch, iterations done, clock granted, late clocks] by name, of the workers that may still fold.

        These are the workers with a clock that the others have passed and a later commit may still list.  For all
        others these numbers follow from the open clock; what is not below it, each worker reports again.
        """
        return {
            w.name: [
                w.epoch,
                min(w.done, self.clock),
                min(w.granted, self.clock),
                [c for c in w.pending if c < self.clock],
            ]
            for w in roster.live()  # also of those that wait for data: what they have reported is in the next commit
            if self.may_fold(w)
        }

    def may_fold(self, worker: Worker) -> bool:
        """sync: whether a later commit may still list a clock of this worker that the others have passed.

        With `drop`, those are the ones that it had reported when the policy was `fold`.
        """
        lowest = worker.pending[:1] + ([worker.done] if self.rule.late == "fold" else [])
        return self.sync and min(lowest, default=self.clock) < self.clock

    def resume(self, worker: Worker, roster: Roster) -> None:
        """Wake a resting worker that has data again, or has finished an iteration all the same.

        Outside sync it continues at least where a joining worker would begin.  In sync it is told where to go on, and
        what it has finished meanwhile is late if the others have ended it.
        """
        if worker.resting:
            if not self.sync:
                worker.done = worker.granted = max(worker.done, self.join_clock(roster))
            roster.rest(worker, False)

    def next_clock(self, worker: Worker) -> int:
        """The clock that this worker is to work on next."""
        return max(worker.done, self.first_clock) if self.sync else worker.done

    @property
    def first_clock(self) -> int:
        """The clock; in sync the first one whose commit is not decided and may list contributions."""
        return self.clock + self.opening

    def _roster(self, roster: Roster) -> list[Worker]:
        """sync: the live workers of the open clock's roster.

        The roster is fixed when the previous clock commits.  The roster of clock 0 stays open until a worker has
        reported.  If all its workers are gone, the present ones take their place.
        """
        live = [w for w in self.members if w.alive and not w.resting]
        if live and (self.clock or any(w.done for w in roster.barrier_members())):
            return live
        return roster.barrier_members()

    def needed(self, live: int) -> int:
        """sync: how many workers of a live roster of that size must have reported."""
        count = self.rule.quorum_count
        # The subtraction keeps 0.1 * 30 = 3.0000000000000004 from asking for a fourth.
        wanted = min(count, live) if count is not None else ceil(self.rule.quorum * live - 1e-9)
        return max(1, wanted)

    def decide(self, roster: Roster, timeline: int, revision: int, cut: bool) -> Commit | None:
        """sync: commit the open clock and open the next one, if that is possible now; else None."""
        if not self.opened:
            return None
        t, counted = self.clock, roster.barrier_members()
        if self._of is not counted:
            members = self._roster(roster)
            if not {*self.members}.issuperset(members):
                self.members = members
            self._of, self._size = counted, len(members)
            self._awaited = {w for w in members if w.done <= t}
        if self._size - len(self._awaited) < self.needed(self._size):
            return None
        listed: list[Contribution] = []
        for w in roster.live():
            listed += [Contribution(w.name, w.epoch, w.rank, c) for c in w.pending if c <= t]
            w.pending = [c for c in w.pending if c > t]
        return self._commit(tuple(listed), roster, timeline, revision, cut)

    def empty_commit(self, roster: Roster, timeline: int, revision: int) -> Commit:
        """sync: make the commit that begins a phase and lists nothing; all workers continue after it.

        Those that have heard of the phase may have finished their first clock after it already.
        """
        commit = self._commit((), roster, timeline, revision, True)
        self.opening = False
        self.members, self._of, self._low_of = [], None, None
        for w in roster:
            w.done, w.granted = max(w.done, self.clock), max(w.granted, self.clock)
            w.pending = [c for c in w.pending if c >= self.clock]
        return commit

    def _commit(
        self, listed: tuple[Contribution, ...], roster: Roster, timeline: int, revision: int, cut: bool
    ) -> Commit:
        commit = Commit(self.clock, timeline, listed, revision, len(roster.live()), cut)
        self.clock += 1
        self.members, self._of = roster.barrier_members(), None
        return commit

    def released(self, roster: Roster) -> float:
        """The number of iterations up to which a worker that has finished them may begin the next one."""
        if self.sync:
            return self.clock
        return self.min_clock(roster) + self.rule.staleness if self.rule.mode == "ssp" else inf

    def missing(self, roster: Roster) -> int:
        """sync and ssp: how many more workers must join before any may go on."""
        if self.opened or self.rule.mode not in ("sync", "ssp"):
            return 0
        return max(0, self.rule.min_workers - len(roster.live()))

    def waiting_for(self, clock: int, roster: Roster) -> list[str]:
        """What a worker that is not released waits for: names of workers, missing joins, or the commit."""
        if (missing := self.missing(roster)) > 0:
            return [f"{missing} more worker{'s' if missing > 1 else ''} to join"]
        if self.sync:
            names = [w.name for w in self._roster(roster) if w.done <= self.clock]
            return names or ["the commit"]
        return [w.name for w in roster.barrier_members() if w.done < clock - self.rule.staleness]
