"""A worker's session, without I/O of its own: values pulled, gradients pushed, clocks ended.

What may happen to the worker meanwhile is in `membership`.
"""

import logging
from typing import Any, Final, TypeVar

from paramserver import limits
from paramserver.client import transfer
from paramserver.client.arrays import Params
from paramserver.client.calls import Call, Deadline
from paramserver.client.cluster import Cluster
from paramserver.client.encoding import Feedback, codec_of
from paramserver.client.frames import PushTerms
from paramserver.client.gradients import Grads
from paramserver.client.membership import Membership
from paramserver.client.pushed import DROPPED, Pushed
from paramserver.codecs.codec import Codec
from paramserver.core.layout import Layout
from paramserver.core.selection import Names, Ranges, listed
from paramserver.errors import InDoubt, PsError, Unavailable, problem

T = TypeVar("T")
log = logging.getLogger("paramserver")

NOTHING: Final = (-1, -1)
"""No epoch and no timeline: what stands in their place where a push was dropped."""


class Session(Membership):
    """One worker of one model."""

    def __init__(
        self,
        cluster: Cluster,
        model: str,
        name: str | None,
        rank: int | None,
        silence_s: float,
        codec: Codec | None = None,
    ) -> None:
        super().__init__(cluster, model, name, rank, silence_s)
        self.codec, self.feedback = codec, Feedback()
        self._pulled: tuple[int, int, int] | None = None
        """Epoch, timeline and creation of the values that gradients are now computed from."""
        self.pushed: tuple[int, int] | None = None
        """Epoch and timeline under which the present iteration's last push was accepted; `NOTHING`: it was dropped."""
        self._torn = 0
        """sync: the epoch in which a push reached some shards and not, or not for sure, all: see `mend`."""

    # -------------------------------------------------------------------------------------------- values

    def pull(
        self,
        deadline: Deadline,
        *,
        names: Names | None = None,
        ranges: Ranges | None = None,
        out: Params | None = None,
        dtype: str | None = None,
        min_version: int = 0,
        wait_s: float | None = None,
        view: bool = False,
    ) -> Call[Params]:
        """The present values; in sync at least those of the commit that released this worker's clock."""
        if names is not None or ranges is not None:
            names, ranges = listed(names, ranges)
        while True:
            epoch, timeline = self.numbers.epoch, self.timeline
            clock = self._min_clock if self.mode == "sync" else 0
            waits = bool(min_version) or clock > 0
            wait = wait_s if wait_s is not None else (min(limits.WAIT_S_MAX, deadline.left_s()) if waits else 0.0)
            try:
                p = yield from transfer.pull(
                    self.cluster,
                    self.model,
                    deadline,
                    names=names,
                    ranges=ranges,
                    out=out,
                    dtype=dtype,
                    min_version=min_version,
                    min_clock=clock,
                    wait_s=wait,
                    timeline=timeline,
                    view=view,
                )
            except PsError as e:
                if not self._follows(e):
                    raise
                yield from self._follow(e, epoch, timeline, deadline)
                continue
            self.goes_on_from(p, epoch, timeline)
            return p

    def check_out(self, out: Params | None, deadline: Deadline) -> Call[None]:
        """Raise RequestError where values cannot be pulled into `out`, which is too late to learn after a push."""
        if out is not None:
            transfer.check_out((yield from self.cluster.map_of(self.model, deadline)), out)

    def goes_on_from(self, values: Params, epoch: int, timeline: int) -> None:
        """Gradients are computed from these values from now on."""
        generation = values.origin.generation
        same = self._pulled is not None and self._pulled[2] == generation
        self._pulled = (epoch, timeline, generation)
        self._base = {**(self._base or {} if same else {}), **values.origin.versions}

    def push(
        self,
        grads: Grads,
        deadline: Deadline,
        *,
        base: Params | None = None,
        weight: float = 1.0,
        ranges: Ranges | None = None,
        dtype: str | None = None,
        ack: str | None = None,
        codec: str | None = None,
        ends_s: float | None = None,
    ) -> Call[Pushed]:
        """Push for the present clock; `dropped` if the model or the worker is no longer what it was computed for.

        `ends_s`: it is the last push of this clock; see `PushTerms`.
        """
        _, terms = yield from self.begin(deadline, base=base, weight=weight, ack=ack, ends_s=ends_s)
        if terms is None:
            return DROPPED
        try:
            return (yield from self.deliver(terms, grads, deadline, ranges=ranges, dtype=dtype, codec=codec))
        finally:
            self.numbers.settle(terms.push_id)

    def begin(
        self,
        deadline: Deadline,
        *,
        base: Params | None = None,
        weight: float = 1.0,
        ack: str | None = None,
        streamed: bool = False,
        ends_s: float | None = None,
    ) -> Call[tuple[Layout, PushTerms | None]]:
        """The model's layout, and the terms of a push for the present clock, whose number the caller settles.

        No terms: the values that its gradient comes from were rolled back.  Raises RequestError (`invalid_field`) for a
        push in pieces (`streamed`) to an optimizer that clips by the norm of the whole.
        """
        yield from self.mend(deadline)
        held = yield from self.cluster.map_of(self.model, deadline)
        if streamed and held.spec.optimizer.clip_norm is not None:
            detail = f"'{self.model}' clips by the norm of the whole gradient, which is not known before its end"
            raise problem("invalid_field", detail, hint="push it whole: worker.push(grads)")
        if not self._outlived(self.numbers.epoch, self.timeline, held.generation):
            push_id = yield from self.numbers.take(deadline)
            with self._lock:  # the heartbeat may have followed a rollback while a number was waited for
                timeline, clock = self.timeline, self.clock
            if not self._outlived(push_id.epoch, timeline, held.generation):
                chosen = base if base is not None else self._base
                return held.layout, PushTerms(push_id, clock, weight, ack, timeline, chosen, ends_s)
            self.numbers.settle(push_id)
        log.warning("push.dropped worker=%s reason=computed from values that are no more", self.worker)
        self._dropped()
        return held.layout, None

    def deliver(
        self,
        terms: PushTerms,
        grads: Grads,
        deadline: Deadline,
        *,
        ranges: Ranges | None = None,
        dtype: str | None = None,
        codec: str | None = None,
        partitions: frozenset[int] | None = None,
    ) -> Call[Pushed]:
        """Push on these terms, all of it or its share of some partitions; `dropped` as `push` says."""
        how = codec_of(codec, dtype, self.codec)
        options: dict[str, Any] = {"ranges": ranges, "dtype": dtype, "codec": how, "feedback": self.feedback}
        pushing = transfer.push(self.cluster, self.model, deadline, grads, terms, partitions=partitions, **options)
        done = yield from self.settled(pushing, terms, deadline)
        if done is None:
            return DROPPED
        yield from self.check_mode(done, deadline)
        return done

    def settled(self, pushing: Call[T], terms: PushTerms, deadline: Deadline) -> Call[T | None]:
        """What `pushing` gives; None where the model or the worker is no longer what it was computed for."""
        epoch, timeline = terms.push_id.epoch, terms.timeline or 0
        try:
            done = yield from pushing
        except PsError as e:
            if not self._follows(e):
                if isinstance(e, InDoubt) or "partitions" in e.members:
                    self.tear(terms)
                raise
            log.warning("push.dropped worker=%s reason=%s", self.worker, e.code)
            yield from self._follow(e, epoch, timeline, deadline)
            self._dropped()
            return None
        except BaseException:  # an interrupt: what has been sent is with the shards
            self.tear(terms)
            raise
        self.pushed = (epoch, timeline)
        return done

    def tear(self, terms: PushTerms) -> None:
        """Some shards may have that push, and others not: in sync its iteration must not end with it."""
        if self.mode == "sync":
            self._torn = terms.push_id.epoch

    def mend(self, deadline: Deadline) -> Call[None]:
        """Join anew where a push of this epoch is torn: what is staged under an epoch that is over is in no commit.

        So a synchronous push counts on all partitions or on none, and its iteration begins anew; if its commit was made
        meanwhile, this worker is after it.
        """
        epoch = self.numbers.epoch
        if self._torn != epoch:
            return
        log.warning("push.taken_back worker=%s clock=%d reason=not all shards have it", self.worker, self.clock)
        clock, timeline = self.clock, self.timeline
        yield from self._join_again(epoch, deadline)
        with self._lock:
            self.pushed = NOTHING
            if self._pulled is not None and (self.clock, self.timeline) == (clock, timeline):
                self._pulled = (self.numbers.epoch, *self._pulled[1:])  # the same values still

    def _dropped(self) -> None:
        """Nothing of a push counts; its iteration ends only where another one does."""
        self._pulled = None
        self.pushed = self.pushed or NOTHING

    def check_mode(self, done: Pushed, deadline: Deadline) -> Call[None]:
        """Look which mode the model is in where a push was not treated as it would be in the one known."""
        if (done.state == "staged") != (self.mode == "sync"):
            try:
                yield from self.look(deadline)  # the mode was changed a moment ago
            except Unavailable as e:  # the push is there all the same; the heartbeat looks again
                log.info("worker.mode_unknown worker=%s error=%s", self.worker, e.code)

    def pushpull(self, grads: Grads, deadline: Deadline, *, out: Params | None = None, **options: Any) -> Call[Params]:
        """A push and then the values; the clock stays."""
        yield from self.check_out(out, deadline)
        done = yield from self.push(grads, deadline, **options)
        pulling = self.pull(deadline, out=out)
        return (yield from (pulling if done.state == "dropped" else transfer.after_push(pulling)))

    # -------------------------------------------------------------------------------------------- clocks

    def go_on(
        self, clock: int, epoch: int, timeline: int, min_clock: int = 0, *, until: Deadline | None = None
    ) -> Call[None]:
        """So many iterations are finished, if the session is still what it was when the last of them began.

        Pulls from now on have at least `min_clock` commits.  While the worker is asked to pause it waits first,
        without an end or `until` then, and raises Unavailable (`unavailable`): the clock is to be reported again.
        """
        yield from self.while_paused(until)
        with self._lock:
            self.pushed = None
            if (self.numbers.epoch, self.timeline) == (epoch, timeline):
                self._at(clock)
                self._min_clock = max(self._min_clock, min_clock)

    def catch_up(self, clock: int, epoch: int, timeline: int) -> None:
        """The model has reached that clock while this worker held nobody up, if it is still what it was then."""
        with self._lock:
            if self.mode in ("sync", "ssp") and (self.numbers.epoch, self.timeline) == (epoch, timeline):
                self._at(max(self.clock, clock))

    def _at(self, clock: int) -> None:
        """So many iterations are finished: one more, or the others have gone on without this worker."""
        if clock > self.clock + 1:
            self.since = clock
        self.clock = clock

    def _outlived(self, epoch: int, timeline: int, generation: int) -> bool:
        """Whether the gradient at hand was computed before a rollback, in sync before a new join, or of a model that
        was created anew since."""
        if self._pulled is None:
            return False
        sync = self.mode == "sync"
        return self._pulled[1:] != (timeline, generation) or (sync and self._pulled[0] != epoch)
