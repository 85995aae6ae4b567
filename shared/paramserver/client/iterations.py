"""The iterations of one worker: a push, its clock, and the values that the next one begins with.

In sync one request to each shard does all three.  The last push of an iteration says so; the shards that have it tell
the scheduler, and answer when the commit is there.  What that cannot settle (a straggler, a shard that is lost,
something that the scheduler wants to say) is left to `advance`, which asks the scheduler for as long as it takes.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final

from paramserver.client import transfer
from paramserver.client.arrays import Params
from paramserver.client.calls import POLL_S, Call, Deadline
from paramserver.client.cluster import model_path
from paramserver.client.encoding import codec_of
from paramserver.client.gradients import Grads
from paramserver.client.pushed import Pushed
from paramserver.client.reports import numbers_of
from paramserver.client.session import Session
from paramserver.errors import PsError, Unavailable, from_document, problem

log = logging.getLogger("paramserver")

PUSHED: Final = "the gradient is pushed: worker.clock() goes on waiting, another step would count it twice"
DONE: Final = "the iteration is done: worker.pull() brings the values, another step would count its gradient twice"


class Iterations:
    """Begins and ends the iterations of one session."""

    def __init__(self, session: Session) -> None:
        self._session: Final = session

    def advance(self, deadline: Deadline, patience_s: float | None, began_s: float | None = None) -> Call[int]:
        """Report the present iteration finished and wait until the next may begin; its number.

        Waiting for other workers has no end of its own unless `patience_s` is given, counted from `began_s` or from
        now; only a silent cluster makes it raise before.  Raises Unavailable (`unavailable`) naming whom it waited for,
        or that the run is paused.
        """
        s = self._session
        yield from s.mend(deadline)
        epoch, timeline = s.numbers.epoch, s.timeline
        if s.mode == "sync" and s.pushed is not None and s.pushed != (epoch, timeline):
            # What was pushed for this clock went with a rollback or the worker's lease, as the heartbeat has noticed.
            log.warning("clock.kept worker=%s clock=%d reason=its push was dropped", s.worker, s.clock)
            s.pushed = None
            return s.clock
        done, committed = s.clock + 1, 0
        began_s = deadline.clock() if began_s is None else began_s
        give_up = began_s + patience_s if patience_s is not None else float("inf")
        while s.mode in ("ssp", "sync"):
            wait_s = max(0.0, min(POLL_S, give_up - deadline.clock()))
            body = {"clock": done, "since": min(s.since, done), "timeline": timeline}
            doc = yield from s.ask(model_path(s.model, "clock"), body, epoch, timeline, wait_s, deadline.clock)
            if doc is None:
                s.pushed = None
                return s.clock
            if doc.get("released"):
                done = max(done, int(doc.get("clock") or 0))
                committed = done if s.mode == "sync" else 0
                break
            if s.status == "stop":
                break
            if deadline.clock() >= give_up:
                whom = ", ".join(str(w) for w in doc.get("waiting_for", ())) or "a commit"
                raise problem("unavailable", f"clock {done} was not released in {patience_s:g} s: waiting for {whom}")
        until = deadline if patience_s is not None else None
        yield from s.go_on(done, epoch, timeline, committed, until=until)
        return s.clock

    def step(
        self, grads: Grads, metrics: Mapping[str, Any], deadline: Deadline, patience_s: float | None, **options: Any
    ) -> Call[Pushed]:
        """Push, clock, report; the clock does not advance over a gradient that was dropped."""
        s, told, began_s = self._session, numbers_of(metrics), deadline.clock()
        yield from s.mend(deadline)
        epoch, timeline, clock = s.numbers.epoch, s.timeline, s.clock
        done = yield from s.push(grads, deadline, ends_s=self._ends_s(deadline, patience_s), **options)
        if done.state != "dropped":
            s.reports.note(s.clock, told)
            released = (clock + 1, epoch, timeline) if done.released else None
            yield from self._finish(deadline, patience_s, released, began_s)
        return done

    def exchange(
        self,
        grads: Grads,
        metrics: Mapping[str, Any],
        deadline: Deadline,
        patience_s: float | None,
        *,
        out: Params | None = None,
        view: bool = False,
        **options: Any,
    ) -> Call[Params]:
        """Push, clock, report, and the values to go on from."""
        s, told, began_s = self._session, numbers_of(metrics), deadline.clock()
        if view and out is not None:
            raise problem("invalid_field", "out= and copy=False exclude each other")
        if s.mode == "ssp":  # the values are wanted as they are when the others have come so far
            yield from s.check_out(out, deadline)
            done = yield from self.step(grads, told, deadline, patience_s, **options)
            return (yield from self._pull(deadline, patience_s, out, view, done=done.state != "dropped"))
        yield from s.mend(deadline)
        epoch, timeline, clock = s.numbers.epoch, s.timeline, s.clock
        found = yield from self._exchange(grads, deadline, self._ends_s(deadline, patience_s), out, view, **options)
        if found is not None:
            pushed, values = found
            s.reports.note(s.clock, told)
            released = pushed.released or s.mode not in ("ssp", "sync")
            over = (clock + 1, epoch, timeline) if released else None
            yield from self._finish(deadline, patience_s, over, began_s)
            if released and values is not None and (s.numbers.epoch, s.timeline) == (epoch, timeline):
                s.goes_on_from(values, epoch, timeline)
                return values.frozen() if view else values
        return (yield from self._pull(deadline, patience_s, out, view, done=found is not None))

    def _pull(
        self, deadline: Deadline, patience_s: float | None, out: Params | None, view: bool, *, done: bool
    ) -> Call[Params]:
        """The values after an iteration; where waiting for the others had no end, with a deadline of their own.

        An error says whether the iteration is `done`, for then the caller may not push its gradient again.
        """
        s = self._session
        if patience_s is None:
            deadline = Deadline.after(s.silence_s, deadline.clock)
        try:
            values = yield from s.pull(deadline, out=out, view=view)
            return values.frozen() if view else values
        except Unavailable as e:
            if not done:
                raise
            raise _hinting(e, DONE) from e

    def _finish(
        self, deadline: Deadline, patience_s: float | None, released: tuple[int, int, int] | None, began_s: float
    ) -> Call[None]:
        """End an iteration whose push is there: by `advance`, or as the shards have `released` it.

        An error says that the gradient counts, for the caller may not push it again.
        """
        try:
            if released is None:
                yield from self.advance(deadline, patience_s, began_s)
            else:
                until = deadline if patience_s is not None else None
                yield from self._session.go_on(*released, until=until)
        except Unavailable as e:
            raise _hinting(e, PUSHED) from e

    def _exchange(
        self,
        grads: Grads,
        deadline: Deadline,
        ends_s: float | None,
        out: Params | None,
        view: bool,
        *,
        dtype: str | None = None,
        codec: str | None = None,
        **terms: Any,
    ) -> Call[tuple[Pushed, Params | None] | None]:
        s = self._session
        options: dict[str, Any] = {"out": out, "view": view, "dtype": dtype, "codec": codec_of(codec, dtype, s.codec)}
        _, agreed = yield from s.begin(deadline, ends_s=ends_s, **terms)
        if agreed is None:
            return None
        exchanging = transfer.exchange(s.cluster, s.model, deadline, grads, agreed, feedback=s.feedback, **options)
        try:
            found = yield from s.settled(exchanging, agreed, deadline)
        finally:
            s.numbers.settle(agreed.push_id)
        if found is not None:
            yield from s.check_mode(found[0], deadline)
        return found

    def _ends_s(self, deadline: Deadline, patience_s: float | None) -> float | None:
        """How long the push that ends an iteration waits at the shards; None where no commit is to be waited for."""
        if self._session.mode != "sync":
            return None
        return max(0.0, min(POLL_S, deadline.left_s() / 2, POLL_S if patience_s is None else patience_s / 2))


def _hinting(error: PsError, hint: str) -> PsError:
    """The same error with that hint besides its own."""
    return from_document({**error.document(), "hint": f"{error.hint}; {hint}" if error.hint else hint})
