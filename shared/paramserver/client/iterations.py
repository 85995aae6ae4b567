"""The iterations of one worker: a push, the report of its clock, and the values for the next iteration.

In sync mode one request to each shard does all three.  The last push of an iteration is marked as such; the shards that
accept it report the clock to the scheduler, and answer once the commit has arrived.  If that does not work out (a
straggler, a lost shard, or the scheduler has something to tell the worker), `advance` reports the clock itself and
polls the scheduler for as long as it takes.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, Literal, TypeAlias, TypeVar

from paramserver.client import transfer
from paramserver.client.arrays import Params
from paramserver.client.cluster import model_path
from paramserver.client.gradients import Grads
from paramserver.client.pushed import DROPPED, Pushed
from paramserver.client.reports import numbers_of
from paramserver.client.session import Session
from paramserver.errors import PsError, problem
from paramserver.net.calls import POLL_S, Call, Deadline

T = TypeVar("T")
log = logging.getLogger("paramserver")

TOLD_AFTER_S: Final = 30.0
"""After so long a wait for other workers without a timeout, the log says once whom for."""
PUSHED: Final = "the gradient was pushed: call worker.clock() to keep waiting, and do not push it again"
Over: TypeAlias = tuple[int | None, int, int]
"""Clock (None: the next), epoch and timeline to go on in, once an iteration is over."""
Ended: TypeAlias = Literal["over", "late", "kept"]
"""How the report of an iteration ended: the next one begins, the report came too late, or the iteration starts again
because its pushes were undone before the report was answered (the clock then is the one that the model told)."""
DONE: Final = "the iteration is done; get the values with worker.pull(). Another step would count its gradient twice"


class Iterations:
    """Begins and ends the iterations of one session.

    `until`: when waiting for other workers, or for a paused run, ends.  None: never, only a silent cluster ends it.
    """

    def __init__(self, session: Session) -> None:
        self._session: Final = session

    def advance(self, deadline: Deadline, until: Deadline | None) -> Call[int]:
        """Report the current iteration finished, wait until the next may begin, and return its number.

        Raises Unavailable (`unavailable`) naming the workers it waited for, or saying that the run is paused.
        """
        s = self._session
        with s.ending_iteration():
            if (yield from self._advance(deadline, until)) == "kept":
                s.reported = None
            return s.clock

    def _advance(self, deadline: Deadline, until: Deadline | None) -> Call[Ended]:
        """See `advance`.  If the iteration is `kept`, the caller clears `reported`."""
        s = self._session
        yield from s.rejoin_if_torn(deadline)
        epoch, timeline = s.numbers.epoch, s.timeline
        if s.mode == "sync" and s.pushed is not None and s.pushed != (epoch, timeline):
            # The heartbeat has followed a rollback or joined again: what was pushed for this clock is gone.  If instead
            # the model became synchronous during the push, what is staged of it is added to the next one.
            log.warning("clock.kept worker=%s clock=%d reason=its push was for an earlier timeline", s.worker, s.clock)
            s.pushed = None
            return "kept"
        ended: Ended = "over"
        done, committed, asked = s.clock + 1, 0, False
        to_be_told = deadline.clock() + TOLD_AFTER_S if until is None else None
        while s.mode in ("ssp", "sync"):
            asked = True
            wait_s = POLL_S if until is None else min(POLL_S, until.left_s())
            body = {"clock": done, "since": min(s.since, done), "timeline": timeline}
            s.reported = (epoch, timeline, done - 1)
            doc = yield from s.ask(model_path(s.model, "clock"), body, epoch, timeline, wait_s, deadline.clock, until)
            if doc is None:
                s.pushed = None
                return "kept"
            if doc.get("released"):
                if doc.get("late"):
                    ended = "late"
                    log.info("clock.late worker=%s clock=%d reason=the others ended it first", s.worker, done - 1)
                done = max(done, int(doc.get("clock") or 0))
                committed = done if s.mode == "sync" else 0
                break
            if s.status == "stop":
                break
            whom = ", ".join(str(w) for w in doc.get("waiting_for", ())) or "a commit"
            if to_be_told is not None and deadline.clock() >= to_be_told:
                to_be_told = None
                log.warning(
                    "clock.waits worker=%s clock=%d waited_s=%g for=%s: a timeout= of the call would bound the wait",
                    s.worker,
                    done - 1,
                    TOLD_AFTER_S,
                    whom,
                )
            if until is not None and until.left_s() <= 0:
                within = f" in {until.whole_s:g} s" if until.whole_s is not None else ""
                raise problem("unavailable", f"clock {done} was not released{within}: waiting for {whom}")
        over = done if asked else None  # if nobody was, other threads may raise the clock during a pause
        yield from s.continue_at(over, epoch, timeline, committed, until=until)
        return ended

    def step(
        self, grads: Grads, metrics: Mapping[str, Any], deadline: Deadline, until: Deadline | None, **options: Any
    ) -> Call[Pushed]:
        """Push, report the metrics and the clock; if the gradient was dropped, the clock does not advance."""
        with self._session.ending_iteration():
            return (yield from self._step(grads, metrics, deadline, until, **options))

    def _step(
        self, grads: Grads, metrics: Mapping[str, Any], deadline: Deadline, until: Deadline | None, **options: Any
    ) -> Call[Pushed]:
        s, numbers = self._session, numbers_of(metrics)
        yield from s.rejoin_if_torn(deadline)
        wait_s, timeline = self._commit_wait_s(deadline), s.timeline
        pushing = s.push(grads, deadline, last=True, commit_wait_s=wait_s, **options)
        done = yield from self._reporting_divergence(timeline, numbers, pushing)
        if done.state != "dropped":
            s.reports.note(timeline, s.clock, numbers)
            return (yield from self._finish(deadline, until, done, self._released(done)))
        return done

    def _released(self, done: Pushed) -> Over | None:
        """Clock, epoch and timeline to go on in, if the shards have `released` the iteration that this push ended.

        They follow from those of the push: before it began the heartbeat may have followed to another timeline.
        """
        if not done.released or self._session.reported is None:
            return None
        epoch, timeline, clock = self._session.reported
        return clock + 1, epoch, timeline

    def _reporting_divergence(self, timeline: int, numbers: dict[str, float], pushing: Call[T]) -> Call[T]:
        """Perform a push; if its gradient is refused as not finite, report the metrics, too: they tell why it ends."""
        try:
            return (yield from pushing)
        except PsError as e:
            if e.code in ("non_finite", "non_finite_result"):
                self._session.reports.note(timeline, self._session.clock, numbers)
            raise

    def exchange(
        self,
        grads: Grads,
        metrics: Mapping[str, Any],
        deadline: Deadline,
        until: Deadline | None,
        *,
        out: Params | None = None,
        view: bool = False,
        **options: Any,
    ) -> Call[Params]:
        """Like `step`, but return the values for the next iteration, if possible from the same round trip."""
        with self._session.ending_iteration():
            s, numbers = self._session, numbers_of(metrics)
            transfer.check_view(out, view)
            if s.mode == "ssp":  # pull the values once the clock is released: the other workers are far enough then
                yield from s.check_out(out, deadline)
                done = yield from self._step(grads, numbers, deadline, until, **options)
                return (yield from self._pull(deadline, until, out, view, done=done.state != "dropped"))
            yield from s.rejoin_if_torn(deadline)
            epoch, timeline = s.numbers.epoch, s.timeline
            options |= {"last": True, "commit_wait_s": self._commit_wait_s(deadline)}
            exchanging = s.exchange(grads, deadline, out=out, view=view, **options)
            found = yield from self._reporting_divergence(timeline, numbers, exchanging)
            done = DROPPED
            if found is not None:
                pushed, values = found
                s.reports.note(timeline, s.clock, numbers)
                over = self._released(pushed)
                if not pushed.released and s.mode not in ("ssp", "sync"):  # nobody is waited for
                    over = None, epoch, timeline  # other threads may have raised the clock meanwhile
                done = yield from self._finish(deadline, until, pushed, over)
                if over is not None and values is not None and (s.numbers.epoch, s.timeline) == over[1:]:
                    s.record_pulled(values, *over[1:])
                    return values.frozen() if view else values
            return (yield from self._pull(deadline, until, out, view, done=done.state != "dropped"))

    def _pull(
        self, deadline: Deadline, until: Deadline | None, out: Params | None, view: bool, *, done: bool
    ) -> Call[Params]:
        """Pull the values after an iteration, with a deadline of its own if waiting for the others had no limit."""
        s = self._session
        if until is None:
            deadline = Deadline.after(s.silence_s, deadline.clock)
        with pulling_after(DONE if done else None):
            return (yield from s.pull(deadline, out=out, view=view))

    def _finish(
        self, deadline: Deadline, until: Deadline | None, pushed: Pushed, released: Over | None
    ) -> Call[Pushed]:
        """End an iteration whose push was accepted, by `advance` unless the shards have `released` its clock already.

        Returns the result of the push: it may have been late or, while the commit was awaited, undone.

        The hint of an error says that the gradient counts, because the caller must not push it again.
        """
        s = self._session
        accepted = s.pushed
        try:
            if released is not None:
                yield from s.continue_at(*released, until=until)
                return pushed
            ended = yield from self._advance(deadline, until)
        except PsError as e:
            if not transfer.may_count_before(e):
                raise
            raise _hinting(e, PUSHED) from e
        if ended == "late":
            return replace(pushed, late=True)
        if ended == "kept":
            reported, s.reported = s.reported, None
            if pushed.state != "staged" or accepted is None:
                return pushed
            if reported is not None and reported[:2] == accepted:  # by the shards with the push, or just now
                return (yield from self._kept(pushed, reported, deadline))
            if accepted[0] != s.numbers.epoch:
                return DROPPED  # what an ended epoch has staged, and not reported, is in no commit
        return pushed

    def _kept(self, pushed: Pushed, reported: tuple[int, int, int], deadline: Deadline) -> Call[Pushed]:
        """Return the result of a staged push whose iteration starts again: `dropped`, unless it may count.

        It may if the model has gone on beyond the push's clock, whose commit may have listed it; and if it has left
        sync, when all that is staged counts, under a timeline that goes on.
        """
        s, (_, timeline, clock) = self._session, reported
        if s.clock > clock:
            return pushed
        if s.timeline == timeline:
            try:
                yield from s.refresh_mode(deadline)
            except PsError:
                return pushed
            if s.mode != "sync":
                return pushed
        log.warning("push.dropped worker=%s reason=undone before its commit", s.worker)
        return DROPPED

    def _commit_wait_s(self, deadline: Deadline) -> float | None:
        """How long shards may hold the answer to the last push until the commit arrives; None outside sync mode."""
        if self._session.mode != "sync":
            return None
        return min(POLL_S, deadline.left_s() / 2)


@contextmanager
def pulling_after(done: str | None) -> Iterator[None]:
    """Surround the pull of the values after an iteration; if it fails, its error is raised with `done` as a hint.

    It tells the caller that the gradient must not be pushed again; None: the push was dropped, so it may be.  Values
    that a shard does not have in time are Unavailable.
    """
    try:
        yield
    except PsError as e:
        if done is not None and transfer.may_count_before(e):
            late = problem("unavailable", e.detail, hint=e.hint) if e.code == "version_not_reached" else e
            raise _hinting(late, done) from e
        raise


def _hinting(error: PsError, hint: str) -> PsError:
    """Return the error of a call whose push was accepted, with `hint` appended to its own: it must not be repeated."""
    return error.plus(retryable=False).with_detail(error.detail, f"{error.hint}; {hint}" if error.hint else hint)
