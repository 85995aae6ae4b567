"""Pulls, which may have to wait: for a version, for a partition to be loaded, or for initial values to be complete."""

from dataclasses import dataclass
from typing import Protocol

from paramserver import limits
from paramserver.core.partition import Partition
from paramserver.core.served_model import ServedModel
from paramserver.core.shard_io import Outcome, PullDone, PulledPart, PullReceived, Request
from paramserver.core.timers import Timer, Timers
from paramserver.errors import PsError, as_problem, problem


@dataclass(slots=True, eq=False)
class WaitingPull:
    """One pull and until when it waits."""

    model: ServedModel
    event: PullReceived
    version_until: float
    """Until when it waits for `min_version` and `min_clock`."""
    load_until: float
    """Until when it waits for values to be there at all."""
    at: Partition | None = None
    """The partition it waits for."""
    timer: Timer | None = None
    """By which it is looked at again at the latest."""

    @classmethod
    def of(cls, model: ServedModel, event: PullReceived, now: float) -> "WaitingPull":
        """A pull that has just come; it waits at least a lease for partitions that are being recovered."""
        wait_s = min(event.wait_s, limits.WAIT_S_MAX) if event.wait_s > 0.0 else 0.0
        return cls(model, event, now + wait_s, now + max(wait_s, limits.LEASE_S))

    def attempt(self, map_epoch: int, now: float) -> PullDone | float:
        """The outcome, or until when to wait for `at`; raises PsError when it cannot be or has waited long enough."""
        found = _look(self.model, self.event, map_epoch)
        if isinstance(found, PullDone):
            return found
        until = self.version_until if self.model.ready and found.state is not None else self.load_until
        if now >= until:
            raise self._late(found)
        self.at = found
        return until

    def _late(self, p: Partition) -> PsError:
        if p.state is None:
            return problem("loading", f"partition {p.index} is being recovered")
        if not self.model.ready:
            return problem("initializing", "the model's initial values are not complete")
        have, want = f"version {p.version}", str(self.event.min_version)
        if p.version >= self.event.min_version:
            have, want = f"clock {p.clock}", f"clock {self.event.min_clock}"
        return problem("version_not_reached", f"partition {p.index} is at {have}, not yet at {want}", version=p.version)


def _look(model: ServedModel, event: PullReceived, map_epoch: int) -> PullDone | Partition:
    """The outcome, or the last partition that is not there yet; raises PsError.

    The last, because they are loaded in about their order: a pull that waits for all of them is looked at a few times,
    not once for each.
    """
    model.check(event.generation, event.timeline)
    partitions = [model.owned(i, map_epoch) for i in event.parts]
    ready, min_version, min_clock = model.ready, event.min_version, event.min_clock
    for p in reversed(partitions):
        if (
            not ready
            or p.state is None
            or p.version < min_version
            or (p.clock < min_clock and _takes_commits(model, p))
        ):
            return p
    parts = [PulledPart(p.index, p.state, p.version, p.token) for p in partitions if p.state is not None]
    lowest, highest = min([p.version for p in parts]), max([p.incarnation for p in parts])
    return PullDone(model.key, model.timeline, lowest, highest, tuple(parts))


def _takes_commits(model: ServedModel, p: Partition) -> bool:
    """Whether there is still a commit to come that a pull may wait for.

    A partition that is to leave sync takes those decided before; one that has left it will never take another.
    """
    return model.sync or p.spec.consistency.mode == "sync"


class Shard(Protocol):
    """What pulls need of the shard."""

    map_epoch: int
    models: dict[str, ServedModel]

    def reply(self, request: Request, outcome: Outcome) -> None:
        """Answer a request."""

    def model_gone(self, model: ServedModel) -> PsError:
        """What to tell a request for a model that was deleted or created anew."""


class PullDesk:
    """All pulls that wait, each at the last partition that is not there yet."""

    def __init__(self, shard: Shard, timers: Timers) -> None:
        self._shard = shard
        self._timers = timers
        self._waiting: dict[Request, WaitingPull] = {}

    def at_once(self, event: PullReceived) -> PullDone | None:
        """The answer to a pull that need neither wait nor be refused; nothing is changed by asking."""
        model = self._shard.models.get(event.model)
        if model is None or not event.parts:
            return None
        try:
            found = _look(model, event, self._shard.map_epoch)
        except PsError:
            return None  # which the event says
        return found if isinstance(found, PullDone) else None

    def take(self, model: ServedModel, event: PullReceived, now: float) -> None:
        """Answer a pull now, or when it can be."""
        pull = self._waiting[event.request] = WaitingPull.of(model, event, now)
        self._try(pull, now)

    def withdraw(self, request: Request) -> bool:
        """The client has gone; returns whether it was waiting."""
        pull = self._waiting.pop(request, None)
        if pull is not None:
            self._forget(pull)
        return pull is not None

    def wake(self, partition: Partition, now: float) -> None:
        """The partition has changed."""
        for pull in partition.pulls[:]:
            self._try(pull, now)

    def refuse(self, partition: Partition, error: PsError) -> None:
        """Those that wait for the partition are told why it is not there."""
        for pull in partition.pulls[:]:
            self._answer(pull, error)

    def _try(self, pull: WaitingPull, now: float) -> None:
        _leave(pull)
        try:
            if self._shard.models.get(pull.event.model) is not pull.model:
                raise self._shard.model_gone(pull.model)
            outcome = pull.attempt(self._shard.map_epoch, now)
        except Exception as error:  # also of ours: whoever wakes it is none the worse for it
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
