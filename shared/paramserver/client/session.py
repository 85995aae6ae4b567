"""A worker's session, sans I/O: it pulls values, pushes gradients and advances the clock.

How it reacts to rollbacks, fencing and requests of the scheduler is in `membership`.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from paramserver import limits
from paramserver.client import transfer
from paramserver.client.arrays import Params
from paramserver.client.cluster import Cluster, ModelMap
from paramserver.client.encoding import Encoding, Feedback
from paramserver.client.frames import OwnBase, PushTerms
from paramserver.client.gradients import Grads
from paramserver.client.membership import Membership
from paramserver.client.pushed import DROPPED, Pushed
from paramserver.client.rows import Rows, ids_of
from paramserver.client.turns import Held, Turn
from paramserver.codecs.codec import Codec
from paramserver.core.layout import Layout
from paramserver.core.selection import Names, Ranges, listed
from paramserver.errors import InDoubt, PsError, problem
from paramserver.net.calls import Call, Deadline, Pause
from paramserver.types import DTypeLike

T = TypeVar("T")
log = logging.getLogger("paramserver")

NOTHING: Final = (-1, -1)
"""Stands for the epoch and timeline of a push that does not count."""


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
        self.encoding: Final = Encoding(codec, feedback=Feedback())
        """How gradients are sent unless a push says otherwise."""
        self._pulled: tuple[int, int, int] | None = None
        """(epoch, timeline, model generation) of the values that gradients are currently computed from."""
        self._ending: Final = Turn()
        """Of the call that is ending the current iteration."""
        self.reported: tuple[int, int, int] | None = None
        """(epoch, timeline, clock) of the last iteration that may have been reported finished; see `begin`."""
        self._torn = 0
        """The epoch in which a push may have reached some shards but not all; see `rejoin_if_torn`.

        It matters in sync only.  A later push that is `applied` does not clear it: its shards may be other ones, which
        have not heard of sync yet.
        """

    # -------------------------------------------------------------------------------------------- values

    def pull(
        self,
        deadline: Deadline,
        *,
        names: Names | None = None,
        ranges: Ranges | None = None,
        rows: Rows | None = None,
        out: Params | None = None,
        dtype: DTypeLike | None = None,
        min_version: int = 0,
        wait_s: float | None = None,
        view: bool = False,
        record: bool = True,
        adds: bool = False,
    ) -> Call[Params]:
        """Pull the current values; in sync they include at least the last commit before this worker's clock.

        `view`: read-only, and on a shard's own machine its memory.  Raises RequestError (`invalid_field`) with `out`.
        `record`: gradients are computed from these values from now on.  `adds`: from these and those pulled before, so
        they stay obsolete if those are.
        """
        transfer.check_view(out, view)
        if names is not None or ranges is not None:
            names, ranges = listed(names, ranges)
        rows = ids_of(rows)
        while True:
            yield from self._joined_map(deadline)
            epoch, timeline = self.numbers.epoch, self.timeline
            clock = self._min_clock if self.mode == "sync" else 0
            waits = bool(min_version) or clock > 0
            wait = wait_s if wait_s is not None else (min(limits.WAIT_S_MAX, deadline.left_s()) if waits else 0.0)
            try:
                pulling = transfer.pull(
                    self.cluster,
                    self.model,
                    deadline,
                    names=names,
                    ranges=ranges,
                    rows=rows,
                    out=out,
                    dtype=dtype,
                    min_version=min_version,
                    min_clock=clock,
                    wait_s=wait,
                    timeline=timeline,
                    view=view,
                )
                p = yield from self._while_current(pulling, epoch, timeline)
            except PsError as e:
                if (self.numbers.epoch, self.timeline) != (epoch, timeline):
                    continue  # the heartbeat has followed meanwhile
                if not self._follows(e):
                    raise
                yield from self._follow(e, epoch, timeline, deadline)
                continue
            if record and not (adds and self._pulled not in (None, (epoch, timeline, p.origin.generation))):
                self.record_pulled(p, epoch, timeline)
            return p.frozen() if view else p

    def _joined_map(self, deadline: Deadline) -> Call[ModelMap]:
        """Return the model's map; if it is of another creation than this worker has joined, join that one first.

        There, this worker's id and epoch may be another one's, and its timeline and clock mean nothing.
        """
        model_map = yield from self.cluster.map_of(self.model, deadline)
        if model_map.generation != self.generation:
            yield from self.beat(deadline)  # not at once: a join would fence a worker that has this id there
            model_map = yield from self.cluster.fetch_map(self.model, deadline)
        return model_map

    def _while_current(self, call: Call[T], epoch: int, timeline: int) -> Call[T]:
        """Perform a call under this epoch and timeline; once the heartbeat has others, its next pause ends it.

        What no shard knows yet would else be waited for until the deadline: a model that was created again begins its
        timelines anew.  Raises what the call raises, or Unavailable (`loading`).
        """
        try:
            effect = next(call)
            while True:
                if isinstance(effect, Pause) and (self.numbers.epoch, self.timeline) != (epoch, timeline):
                    effect = call.throw(problem("loading", "the worker has joined again or followed a rollback"))
                effect = call.send((yield effect))
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            call.close()

    def check_out(self, out: Params | None, deadline: Deadline) -> Call[None]:
        """Raise RequestError if values cannot be pulled into `out`.  After a push it would be too late to find out."""
        if out is not None:
            transfer.check_out((yield from self.cluster.map_of(self.model, deadline)), out)

    def record_pulled(self, values: Params, epoch: int, timeline: int) -> None:
        """Record that gradients are computed from these values from now on."""
        generation = values.origin.generation
        same = self._pulled is not None and self._pulled[2] == generation
        self._pulled = (epoch, timeline, generation)
        base = OwnBase(self._base or {} if same else {})  # a new one: pushes under way have the one before
        base.update(values.origin.versions)
        self._base = base

    def push(
        self,
        grads: Grads,
        deadline: Deadline,
        *,
        encoding: Encoding | None = None,
        **terms: Any,
    ) -> Call[Pushed]:
        """Push a gradient for the current clock, under these terms (see `begin`).

        The result is `dropped` if a rollback, a new epoch or a new creation of the model has made the gradient
        obsolete.
        """
        _, agreed = yield from self.begin(deadline, **terms)
        if agreed is None:
            return DROPPED
        try:
            return (yield from self.deliver(agreed, grads, deadline, encoding=encoding))
        finally:
            self.numbers.settle(agreed.push_id)

    def begin(
        self,
        deadline: Deadline,
        *,
        base: Params | None = None,
        weight: float = 1.0,
        ack: str | None = None,
        streamed: bool = False,
        last: bool = False,
        commit_wait_s: float | None = None,
    ) -> Call[tuple[Layout, PushTerms | None]]:
        """Return the model's layout, and the terms of a push for the current clock, whose push id the caller settles.

        `last`: the call that is ending the iteration sends it; in sync, `commit_wait_s` (see `PushTerms`) goes with it.

        The terms are None if the gradient is obsolete (see `_is_obsolete`).  Raises RequestError (`invalid_field`) for
        a `streamed` push, which is sent in pieces, if the optimizer clips by the norm of the whole gradient, and in
        sync ConflictError (`conflict`) for another call's push while the iteration is being ended, and if it may have
        been reported, but its end was not awaited: whenever its commit is decided, it could take this push on some
        partitions only.
        """
        if self.mode != "sync" or not self._ending.taken or last:  # else it is refused below, without another request
            yield from self.rejoin_if_torn(deadline)
        self._check_open(last)
        model_map = yield from self._joined_map(deadline)
        if streamed and model_map.spec.optimizer.clip_norm is not None:
            detail = f"'{self.model}' clips by the norm of the whole gradient, which is not known before its end"
            raise problem("invalid_field", detail, hint="push it whole: worker.push(grads)")
        if not self._is_obsolete(self.numbers.epoch, self.timeline, model_map.generation):
            push_id = yield from self.numbers.take(deadline)
            # Meanwhile the heartbeat may have followed a rollback, or another thread reported the iteration.
            with self._lock:
                timeline, clock, generation = self.timeline, self.clock, self.generation
                try:
                    self._check_open(last)
                except PsError:
                    self.numbers.settle(push_id)
                    raise
            if not self._is_obsolete(push_id.epoch, timeline, model_map.generation):
                chosen = base if base is not None else self._base
                terms = PushTerms(push_id, clock, weight, ack, timeline, chosen, commit_wait_s, generation)
                return model_map.layout, terms
            self.numbers.settle(push_id)
        log.warning(
            "push.dropped worker=%s reason=computed from obsolete values: "
            "all are until this worker pulls (worker.pull(); model.pull() is not its own)",
            self.worker,
        )
        self._dropped()
        return model_map.layout, None

    def _check_open(self, last: bool) -> None:
        """Raise ConflictError (`conflict`) if, in sync, no push can be added to the iteration; see `begin`."""
        if self.mode != "sync":
            return
        if self._ending.taken and not last:
            raise _busy()
        if self.reported == (self.numbers.epoch, self.timeline, self.clock):
            detail = f"iteration {self.clock} of this worker has been reported finished, so nothing can be added to it"
            raise problem("conflict", detail, hint="worker.clock() waits for its end; then pull again")

    def deliver(
        self,
        terms: PushTerms,
        grads: Grads,
        deadline: Deadline,
        *,
        encoding: Encoding | None = None,
        partitions: frozenset[int] | None = None,
    ) -> Call[Pushed]:
        """Push a gradient under these terms, whole or only its part in `partitions`; `dropped` as in `push`."""
        how = encoding or self.encoding
        pushing = transfer.push(self.cluster, self.model, deadline, grads, terms, encoding=how, partitions=partitions)
        done = yield from self.run_push(pushing, terms, deadline)
        if done is None:
            return DROPPED
        yield from self.check_mode(done, deadline)
        return done

    def run_push(self, pushing: Call[T], terms: PushTerms, deadline: Deadline) -> Call[T | None]:
        """Run the call and return its result; None if the push was dropped, as in `push`."""
        epoch, timeline = terms.push_id.epoch, terms.timeline or 0
        try:
            done = yield from pushing
        except PsError as e:
            if not self._follows(e):
                if isinstance(e, InDoubt) or "partitions" in e.members:
                    self.mark_torn(terms)
                if isinstance(e, InDoubt):  # the next push has another number
                    raise e.plus(retryable=False) from e
                raise
            log.warning("push.dropped worker=%s reason=%s", self.worker, e.code)
            yield from self._follow(e, epoch, timeline, deadline)
            self._dropped()
            return None
        except BaseException:  # an interrupt: some shards may have received their parts
            self.mark_torn(terms)
            raise
        self.pushed = (epoch, timeline)
        if terms.commit_wait_s is not None:
            self.reported = (epoch, timeline, terms.clock or 0)
        return done

    def mark_torn(self, terms: PushTerms) -> None:
        """Record that only some shards may have the push: in sync its iteration must not end with it.

        Shards may be in sync already, and have staged it, before this session knows.
        """
        self._torn = terms.push_id.epoch

    def rejoin_if_torn(self, deadline: Deadline) -> Call[None]:
        """In sync, join under a new epoch if a push of this one is torn.

        What is staged under an ended epoch is in no commit, so a synchronous push counts on all partitions or on none,
        and its iteration starts again.  If its clock was committed meanwhile, the worker continues after it.
        """
        epoch = self.numbers.epoch
        if self.mode != "sync" or self._torn != epoch:
            return
        log.warning("push.taken_back worker=%s clock=%d reason=not all shards have it", self.worker, self.clock)
        clock, timeline = self.clock, self.timeline
        yield from self.beat(deadline)  # if the model was created again, another worker may have this id there
        yield from self._join_again(epoch, deadline)
        with self._lock:
            self.pushed = NOTHING
            if self._pulled is not None and (self.clock, self.timeline) == (clock, timeline):
                self._pulled = (self.numbers.epoch, *self._pulled[1:])  # the values pulled are still current

    def _dropped(self) -> None:
        """Record a dropped push: unless another push of its iteration is accepted, the clock does not advance.

        If its values were pulled by this worker, it stays on record which: further gradients of them are obsolete, too.
        """
        self.pushed = self.pushed or NOTHING

    def check_mode(self, done: Pushed, deadline: Deadline) -> Call[None]:
        """Fetch the model's mode if the state of a push does not fit the mode we know."""
        if (done.state == "staged") != (self.mode == "sync"):
            try:
                yield from self.refresh_mode(deadline)  # the mode was changed a moment ago
            except PsError as e:  # the push was accepted all the same; the heartbeat tries again
                log.info("worker.mode_unknown worker=%s error=%s", self.worker, e.code)

    def pushpull(self, grads: Grads, deadline: Deadline, *, out: Params | None = None, **options: Any) -> Call[Params]:
        """Push, then pull, outside sync in one round trip if possible; the clock does not advance."""
        if self.mode == "sync":  # where a pull has to wait for the commit that released this worker's clock
            yield from self.check_out(out, deadline)
            done = yield from self.push(grads, deadline, **options)
            dropped = done.state == "dropped"
        else:
            epoch, timeline = self.numbers.epoch, self.timeline
            found = yield from self.exchange(grads, deadline, out=out, **options)
            if found is not None and found[1] is not None and (self.numbers.epoch, self.timeline) == (epoch, timeline):
                self.record_pulled(found[1], epoch, timeline)
                return found[1]
            dropped = found is None
        pulling = self.pull(deadline, out=out)
        return (yield from (pulling if dropped else transfer.after_push(pulling)))

    def exchange(
        self,
        grads: Grads,
        deadline: Deadline,
        *,
        out: Params | None = None,
        view: bool = False,
        encoding: Encoding | None = None,
        **terms: Any,
    ) -> Call[tuple[Pushed, Params | None] | None]:
        """Push under these terms (see `begin`) and, if one round trip can do both, return the values after it, too.

        Returns None if the push was dropped, as in `push`.
        """
        _, agreed = yield from self.begin(deadline, **terms)
        if agreed is None:
            return None
        how = encoding or self.encoding
        exchanging = transfer.exchange(
            self.cluster, self.model, deadline, grads, agreed, encoding=how, out=out, view=view
        )
        try:
            found = yield from self.run_push(exchanging, agreed, deadline)
        finally:
            self.numbers.settle(agreed.push_id)
        if found is not None:
            yield from self.check_mode(found[0], deadline)
        return found

    # -------------------------------------------------------------------------------------------- clocks

    @contextmanager
    def ending_iteration(self) -> Iterator[None]:
        """Surround a call that ends the iteration.

        Raises ConflictError (`conflict`) in sync if another call of this worker is pushing or ending it: the commit
        could take that push on some partitions only.
        """
        held = Held()
        try:
            with self._lock:
                if self.mode == "sync" and (self._ending.taken or self.numbers.any_in_doubt()):
                    raise _busy()
                self._ending.take(held)
            yield
        finally:
            held.over = True

    def continue_at(
        self, clock: int | None, epoch: int, timeline: int, min_clock: int = 0, *, until: Deadline | None = None
    ) -> Call[None]:
        """Go on to `clock` (None: the next) once the worker is not paused, if its epoch and timeline are still these.

        Pulls from now on ask for at least `min_clock` commits.  A pause is waited out without limit, or up to `until`;
        then Unavailable (`unavailable`) is raised, and the clock must be reported again.
        """
        yield from self.while_paused(until)
        with self._lock:
            self.pushed = None
            if (self.numbers.epoch, self.timeline) == (epoch, timeline):
                self._set_clock(self.clock + 1 if clock is None else clock)
                self._min_clock = max(self._min_clock, min_clock)

    def _is_obsolete(self, epoch: int, timeline: int, generation: int) -> bool:
        """Whether the gradient at hand is obsolete.

        It is if, since its values were pulled, the model was rolled back or created again or, in sync, the worker
        joined again.
        """
        if self._pulled is None:
            return False
        sync = self.mode == "sync"
        return self._pulled[1:] != (timeline, generation) or (sync and self._pulled[0] != epoch)


def _busy() -> PsError:
    return problem(
        "conflict",
        "another call of this worker is in the middle of this iteration, which is synchronous",
        hint="end it after its pushes; threads and tasks need workers of their own: model.worker()",
    )
