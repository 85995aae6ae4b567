"""A worker's session: epoch, clock and push numbers of one worker of one model, without I/O of its own.

Every method that talks to the cluster is a call (see `calls`).  The heartbeat runs beside the worker's own calls, so
what both change is changed in single steps.  Three things may happen to a session, and it follows all of them:

- *rolled back*: a shard died and the synchronous model is at an earlier clock again, under a higher timeline.  The
  session goes to that clock; a gradient of the old timeline is dropped; the next pull has the older values.
- *fenced*: the worker's lease ran out.  It joins again under the same id with a higher epoch.  Where another one has
  joined under that id meanwhile, this one gives way: two would fence each other for ever.
- *draining*, *stop*, *paused*: what the scheduler asks for in its answers.
"""

import logging
import threading
from collections.abc import Mapping
from secrets import token_hex
from typing import Any, Final, TypeVar
from urllib.parse import quote

from paramserver import limits
from paramserver.client import transfer
from paramserver.client.arrays import Params
from paramserver.client.calls import ATTEMPT_S, Call, Clock, Deadline, Pause, Request, json_request
from paramserver.client.cluster import Cluster, control, model_path
from paramserver.client.encoding import Feedback, codec_of
from paramserver.client.frames import PushTerms
from paramserver.client.gradients import Grads
from paramserver.client.numbers import PushNumbers
from paramserver.client.pushed import DROPPED, Pushed
from paramserver.client.reports import Reports, document, numbers_of, refused, send
from paramserver.client.retry import Backoff
from paramserver.client.tasks import Holding
from paramserver.codecs.codec import Codec
from paramserver.core.layout import Layout
from paramserver.core.selection import Names, Ranges, listed
from paramserver.errors import InDoubt, PsError, Unavailable, problem

T = TypeVar("T")
log = logging.getLogger("paramserver")

NOTHING: Final = (-1, -1)
"""No epoch and no timeline: what stands in their place where a push was dropped."""
MAP_AGE_S: Final = 5.0
"""How often a heartbeat looks for changed settings."""


class Session:
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
        self.cluster, self.model = cluster, model
        self.silence_s = silence_s
        """How long the cluster may be silent before waiting for other workers or for a task is given up."""
        self._name, self._rank = name, rank
        self.codec, self.feedback = codec, Feedback()
        self._lock = threading.Lock()
        self._joining = False
        self._join_in_doubt = False
        """Whether the last join was asked for several times, so that a later epoch may be this worker's own."""
        self._looked_at = 0.0
        self._pulled: tuple[int, int, int] | None = None
        """Epoch, timeline and creation of the values that gradients are now computed from."""
        self.pushed: tuple[int, int] | None = None
        """Epoch and timeline under which the present iteration's last push was accepted; `NOTHING`: it was dropped."""
        self._torn = 0
        """sync: the epoch in which a push reached some shards and not, or not for sure, all: see `mend`."""
        self._base: Mapping[int, tuple[int, int]] | None = None
        self._min_clock = 0
        """sync: the clock that let this worker go on; no version tells it, for assignments raise them as well."""
        self.numbers = PushNumbers("", 0)
        self.worker = ""
        self.rank = -1
        self.lease_s = limits.LEASE_S
        self.timeline = 0
        self.clock = 0
        """Iterations finished, which is also the number of the one to work on."""
        self.since = 0
        """The first clock of those up to now of which this worker has left none out."""
        self.mode = "async"
        self.status = "active"
        """What the scheduler wants: `active`, `paused`, `draining` or `stop`."""
        self._evaluation_waits = False
        self.reports: Final = Reports()
        self.holding: Final = Holding()
        self.joined = False

    @property
    def evaluation_waits(self) -> bool:
        """Whether an evaluation may be asked for: one that nobody has taken, or that failed here."""
        return self._evaluation_waits or self.holding.evaluation_failed

    # -------------------------------------------------------------------------------------------- membership

    def join(self, deadline: Deadline) -> Call[None]:
        """Become a worker of the model, or become one again under the same id."""
        held = yield from self.cluster.map_of(self.model, deadline)
        self.mode = held.spec.consistency.mode
        body: dict[str, Any] = {}
        name = self.worker or self._name
        if name:
            body["name"] = name
        else:
            body["attempt"] = token_hex(16)  # sent again because its answer was lost, it is no second worker
        rank = self.rank if self.joined else self._rank
        if rank is not None:
            body["rank"] = rank
        if self.numbers.epoch:
            body["above"] = self.numbers.epoch
        path, backoff = model_path(self.model, "workers"), Backoff(deadline)
        try:
            doc = yield from control(_request("POST", path, body), deadline, backoff)
        except PsError as e:
            if not self.joined or e.code != "conflict" or "rank" not in body:
                raise
            del body["rank"]  # somebody else has taken it meanwhile
            doc = yield from control(_request("POST", path, body), deadline, backoff)
        with self._lock:
            self._join_in_doubt = backoff.in_doubt
            if not self.worker:
                self.numbers = PushNumbers(str(doc["worker"]), int(doc["epoch"]))
            else:
                self.numbers.renew(int(doc["epoch"]))
            self.worker = str(doc["worker"])
            self.rank = int(doc["rank"])
            self.lease_s = float(doc.get("lease_s") or limits.LEASE_S)
            self.timeline = int(doc.get("timeline") or 0)
            self.clock = self.since = int(doc.get("clock") or 0)
            self._min_clock = 0
            self.reports.joined(None if self.joined else doc.get("state"))
            self.joined = True
        log.info("worker.joined worker=%s rank=%d clock=%d", self.worker, self.rank, self.clock)

    def leave(self, deadline: Deadline) -> Call[None]:
        """Stop being a worker, after a last heartbeat; what the scheduler does not hear, the lease tells it."""
        try:
            yield from self.beat(deadline)
            query = f"?epoch={self.numbers.epoch}"
            request = _request("DELETE", self._path() + query)
            yield from control(request, deadline)
        except PsError as e:
            log.info("worker.leave_unheard worker=%s error=%s", self.worker, e.code)

    def beat(self, deadline: Deadline) -> Call[None]:
        """One heartbeat: say that the worker lives and how far it is, take up what the scheduler wants."""
        with self._lock:
            epoch, timeline = self.numbers.epoch, self.timeline
            body: dict[str, Any] = {"epoch": epoch, "clock": self.clock, "since": self.since, "timeline": timeline}
        state, points = self.reports.fresh_state(self.worker), self.reports.take()
        try:
            yield from self.reports.pass_on(self.model, self.worker, points, deadline, but=1)
            doc = yield from self._beat(body, document(state, points), deadline)
        except BaseException as e:  # also where whoever beats is cancelled: the last heartbeat says them
            self.reports.put_back(points)
            if not isinstance(e, PsError) or not self._follows(e):
                raise
            yield from self._follow(e, epoch, timeline, deadline)
            return
        if state is not None:
            self.reports.told(state)
        self._heed(doc)
        now = deadline.clock()
        if now - self._looked_at > MAP_AGE_S:
            self._looked_at = now
            yield from self.look(deadline)

    def _beat(self, body: Mapping[str, Any], said: dict[str, Any], deadline: Deadline) -> Call[Any]:
        """The answer to a heartbeat; what the scheduler refuses of `said` is left out, for the lease must go on."""
        wrong: dict[str, PsError] = {}
        while True:
            try:
                doc = yield from control(_request("PUT", self._path(), {**body, **said}), deadline)
                break
            except PsError as e:
                if not said or not refused(e):
                    raise
                where = str(e.members.get("where", "")).partition(".")[0]
                part = where if where in said else next(iter(said))
                del said[part]
                wrong[part] = e
        for part, why in wrong.items():
            self.reports.left_out(self.worker, part, why)
        return doc

    def look(self, deadline: Deadline) -> Call[None]:
        """Fetch the model's document anew: its mode may have been changed."""
        fresh = yield from self.cluster.map_now(self.model, deadline)
        self.mode = fresh.spec.consistency.mode

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

    # -------------------------------------------------------------------------------------------- metrics

    def report(self, metrics: Mapping[str, Any], deadline: Deadline) -> Call[None]:
        """Send a report now, after what is kept for the next heartbeat."""
        values, kept = numbers_of(metrics), self.reports.take()
        try:
            yield from self.reports.pass_on(self.model, self.worker, kept, deadline)
        finally:
            self.reports.put_back(kept)
        if values:
            yield from send(self.model, self.worker, (self.clock, values), deadline)

    # -------------------------------------------------------------------------------------------- what happens to it

    def ask(
        self, path: str, body: Mapping[str, Any], epoch: int, timeline: int, wait_s: float, clock: Clock
    ) -> Call[Any]:
        """The scheduler's answer, for which it may take `wait_s`; what it asks for in it is taken up.

        None: the worker is not what it was in that epoch and timeline any more, which was taken up instead.
        """
        now = clock()
        request = _request("POST", path, {"worker": self.worker, "epoch": epoch, **body, "wait_s": wait_s}, wait_s)
        try:
            doc = yield from control(request, Deadline(now + wait_s + self.silence_s, clock))
        except PsError as e:
            if not self._follows(e):
                raise
            yield from self._follow(e, epoch, timeline, Deadline(now + self.silence_s, clock))
            return None
        self._heed(doc)
        return doc

    def _follows(self, error: PsError) -> bool:
        """Whether `_follow` can take up what has happened."""
        # Who joined a model that was created anew since has never joined this one.
        return error.code in ("rolled_back", "fenced", "unknown_worker", "reserved_worker")

    def _follow(self, error: PsError, epoch: int, timeline: int, deadline: Deadline) -> Call[None]:
        """Take up a rollback or join again, unless another call of this session has done so already."""
        if error.code == "rolled_back":
            with self._lock:
                new = int(error.members.get("timeline") or 0)
                if new > self.timeline:
                    self.timeline = new
                    self.clock = self.since = int(error.members.get("clock") or 0)
                    self._min_clock = 0
                    self._base = None
                    log.warning("worker.rolled_back worker=%s timeline=%d clock=%d", self.worker, new, self.clock)
            if new <= timeline:  # nothing newer was told: wait for the shard to learn what we know
                yield Pause(0.1)
                if deadline.left_s() <= 0:
                    raise error
            return
        with self._lock:
            if self.numbers.epoch != epoch:
                return
            if int(error.members.get("epoch") or 0) > epoch and not self._join_in_doubt and not self._joining:
                self.status = "stop"
                raise problem(
                    "fenced",
                    f"another worker has joined as '{self.worker}' and takes its place",
                    hint="give each worker a name of its own, or none",
                ) from error
        log.warning("worker.lost worker=%s epoch=%d reason=%s: joining again", self.worker, epoch, error.code)
        yield from self._join_again(epoch, deadline)

    def _join_again(self, epoch: int, deadline: Deadline) -> Call[None]:
        """End that epoch, unless another call of this session does so."""
        with self._lock:
            if self.numbers.epoch != epoch:
                return
            mine, self._joining = not self._joining, True
        if not mine:
            while self._joining and deadline.left_s() > 0:
                yield Pause(0.02)
            return
        try:
            yield from self.join(deadline)
        finally:
            self._joining = False

    def _outlived(self, epoch: int, timeline: int, generation: int) -> bool:
        """Whether the gradient at hand was computed before a rollback, in sync before a new join, or of a model that
        was created anew since."""
        if self._pulled is None:
            return False
        sync = self.mode == "sync"
        return self._pulled[1:] != (timeline, generation) or (sync and self._pulled[0] != epoch)

    def _heed(self, doc: Mapping[str, Any]) -> None:
        """Take up what the scheduler asks for in one of its answers."""
        status = doc.get("state")
        if status in ("active", "paused", "draining", "stop") and status != self.status:
            self.status = str(status)
            log.info("worker.asked worker=%s state=%s", self.worker, status)
        if "evaluate" in doc:
            self._evaluation_waits = bool(doc["evaluate"])

    def while_paused(self, until: Deadline | None = None) -> Call[None]:
        """Returns once the worker is not asked to pause, or raises Unavailable (`unavailable`) at `until`."""
        while self.status == "paused":
            if until is not None and until.left_s() <= 0:
                raise problem(
                    "unavailable", "the run is paused", hint="psctl run resume, or client.set_run(), resumes it"
                )
            yield Pause(0.2 if until is None else min(0.2, until.left_s()))

    def _path(self) -> str:
        return model_path(self.model, "workers") + "/" + quote(self.worker, safe="")


def _request(method: str, path: str, body: Any = None, wait_s: float = 0.0) -> Request:
    """A request that the scheduler answers at once or after `wait_s`, and that may be repeated."""
    return json_request(method, path, body, timeout_s=ATTEMPT_S + wait_s)
