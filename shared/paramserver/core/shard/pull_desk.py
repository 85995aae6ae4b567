"""Pulls, which may wait for a version, a clock, a partition being loaded or moved, or complete initial values."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paramserver import limits
from paramserver.core.shard.effects import Outcome, PullDone, PulledPart
from paramserver.core.shard.events import PullReceived, Request
from paramserver.core.shard.partition import Partition
from paramserver.core.shard.served_model import ServedModel, no_values_yet
from paramserver.core.shard.timers import Timer, Timers
from paramserver.errors import PsError, as_problem, problem

if TYPE_CHECKING:
    from paramserver.core.shard.core import ShardCore


@dataclass(slots=True, eq=False)
class WaitingPull:
    """One pull and its deadlines."""

    model: ServedModel
    event: PullReceived
    version_until: float
    """Deadline for `min_version` and `min_clock`."""
    load_until: float
    """Deadline for any values at all: partitions loaded and not released, initial values complete."""
    at: Partition | None = None
    """The partition it waits for."""
    timer: Timer | None = None
    """Retries it at its deadline, when it fails unless it can be answered."""

    @classmethod
    def of(cls, model: ServedModel, event: PullReceived, now: float) -> "WaitingPull":
        """Create one for a pull that has just arrived; it waits at least one lease for partitions being recovered."""
        wait_s = min(event.wait_s, limits.WAIT_S_MAX) if event.wait_s > 0.0 else 0.0
        return cls(model, event, now + wait_s, now + max(wait_s, limits.LEASE_S))

    def attempt(self, map_epoch: int, now: float) -> PullDone | float:
        """Return the outcome, or the deadline for waiting at `at`. Raises PsError if the pull fails or is too late."""
        found = _outcome_or_blocker(self.model, self.event, map_epoch)
        if isinstance(found, PullDone):
            return found
        until = self.version_until if self.model.ready and found.answers else self.load_until
        if now >= until:
            raise self._late(found)
        self.at = found
        return until

    def _late(self, p: Partition) -> PsError:
        if not p.answers:
            return problem("loading", f"partition {p.index} is being {'recovered' if p.state is None else 'moved'}")
        if not self.model.ready:
            return no_values_yet()
        have, want = f"version {p.version}", str(self.event.min_version)
        if p.version >= self.event.min_version:
            have, want = f"clock {p.clock}", f"clock {self.event.min_clock}"
        return problem("version_not_reached", f"partition {p.index} is at {have}, not yet at {want}", version=p.version)


def _outcome_or_blocker(model: ServedModel, event: PullReceived, map_epoch: int) -> PullDone | Partition:
    """Return the outcome, or the last partition that cannot serve the pull yet. Raises PsError.

    The last one, because partitions are loaded in roughly this order: a pull that waits for all of them is then retried
    a few times, not once per partition.
    """
    model.check(event.generation, event.timeline)
    partitions = [model.owned(i, map_epoch) for i in event.parts]
    ready, min_version, min_clock = model.ready, event.min_version, event.min_clock
    for p in reversed(partitions):
        if not ready or not p.answers or p.version < min_version or _lacks_commits(model, p, min_clock):
            return p
    parts = [PulledPart(p.index, p.state, p.version, p.token) for p in partitions if p.state is not None]
    return PullDone(model.key, model.timeline, tuple(parts))


def _lacks_commits(model: ServedModel, p: Partition, min_clock: int) -> bool:
    """Whether the partition has not taken that many commits, but will: a pull may wait for them.

    The commit that begins a phase changes no values, and may be long in coming, so it is not waited for.  A partition
    that is about to leave sync still applies the commits decided before; one that has left applies no more.
    """
    clock = p.clock + (model.view.opening and p.clock == model.view.began)
    return clock < min_clock and (model.sync or p.spec.consistency.mode == "sync")


class PullDesk:
    """All waiting pulls, each at the last partition that cannot serve it yet."""

    def __init__(self, shard: "ShardCore", timers: Timers) -> None:
        self._shard = shard
        self._timers = timers
        self._waiting: dict[Request, WaitingPull] = {}

    def at_once(self, event: PullReceived) -> PullDone | None:
        """Return the answer if the pull can be served immediately, else None. Changes nothing."""
        model = self._shard.models.get(event.model)
        if model is None or not event.parts:
            return None
        try:
            found = _outcome_or_blocker(model, event, self._shard.map_epoch)
        except PsError:
            return None  # raised again when the event is handled
        return found if isinstance(found, PullDone) else None

    def take(self, model: ServedModel, event: PullReceived, now: float) -> None:
        """Answer the pull now, or once it can be served."""
        pull = self._waiting[event.request] = WaitingPull.of(model, event, now)
        self._try(pull, now)

    def withdraw(self, request: Request) -> bool:
        """Drop the pull of a client that has gone; returns whether it was waiting."""
        pull = self._waiting.pop(request, None)
        if pull is not None:
            self._forget(pull)
        return pull is not None

    def wake(self, partition: Partition, now: float) -> None:
        """Retry the pulls that wait at this partition, which has changed."""
        for pull in partition.pulls[:]:
            self._try(pull, now)

    def refuse(self, partition: Partition, error: PsError) -> None:
        """Fail the pulls that wait at this partition."""
        for pull in partition.pulls[:]:
            self._answer(pull, error)

    def _try(self, pull: WaitingPull, now: float) -> None:
        _leave(pull)
        try:
            if self._shard.models.get(pull.event.model) is not pull.model:
                raise self._shard.model_gone(pull.model)
            outcome = pull.attempt(self._shard.map_epoch, now)
        except Exception as error:  # also bugs of ours: they must not fail whatever woke this pull
            self._answer(pull, as_problem(error))
            return
        if isinstance(outcome, PullDone):
            self._answer(pull, outcome)
            return
        assert pull.at is not None
        pull.at.pulls.append(pull)
        if pull.timer is None or pull.timer.at != outcome:
            self._disarm(pull)
            pull.timer = self._timers.at(outcome, lambda at: self._expire(pull, at))

    def _expire(self, pull: WaitingPull, now: float) -> None:
        pull.timer = None
        self._try(pull, now)

    def _answer(self, pull: WaitingPull, outcome: Outcome) -> None:
        self._forget(pull)
        del self._waiting[pull.event.request]
        self._shard.reply(pull.event.request, outcome)

    def _forget(self, pull: WaitingPull) -> None:
        _leave(pull)
        self._disarm(pull)

    def _disarm(self, pull: WaitingPull) -> None:
        if pull.timer is not None:
            self._timers.cancel(pull.timer)
            pull.timer = None


def _leave(pull: WaitingPull) -> None:
    if pull.at is not None:
        pull.at.pulls.remove(pull)
        pull.at = None
