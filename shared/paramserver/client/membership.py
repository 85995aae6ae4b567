"""A worker's membership: epoch, clock and mode of one worker of one model, and the status the scheduler asks for.

Every method that talks to the cluster is a call (see `calls`).  The heartbeat runs concurrently with the worker's own
calls, so state that both change is changed under a lock or by a single assignment.  A worker reacts to these events:

- *rolled back*: the model has a higher timeline.  A shard died, and the synchronous model is back at an earlier clock;
  or it was restored or made synchronous, at a later one.  The worker goes to that clock; a gradient of the old timeline
  is dropped; the next pull has the new one's values.
- *fenced*: the worker's lease expired.  It joins again under the same id with a higher epoch.  If another worker has
  joined under that id meanwhile, this one stops, because the two would fence each other forever.
- *replaced*: the model was deleted and created again, or its whole cluster was.  The worker joins the new one, unless
  another worker has joined it under that id.
- *draining*, *stop*, *paused*: what the scheduler asks for in its answers.
"""

import logging
import threading
from collections.abc import Mapping
from math import inf
from secrets import token_hex
from typing import Any, Final
from urllib.parse import quote

from paramserver import limits
from paramserver.client.cluster import Cluster, ModelMap, model_path
from paramserver.client.numbers import PushNumbers
from paramserver.client.reports import Reports, document, numbers_of, refused, send
from paramserver.client.tasks import Holding
from paramserver.client.transfer import ANSWER_S
from paramserver.client.turns import Held, Turn
from paramserver.errors import AuthError, PsError, RequestError, is_foreign, problem
from paramserver.net.calls import ATTEMPT_S, Call, Clock, Deadline, Pause, Request, json_request
from paramserver.net.retry import Backoff, deliver_json

log = logging.getLogger("paramserver")

MAP_AGE_S: Final = 60.0
"""How often a heartbeat fetches the model's document though its answer has the same tag: nobody tells a client whose
requests are passed on that by now a shard could be reached directly."""


class Membership:
    """One worker of one model."""

    def __init__(
        self,
        cluster: Cluster,
        model: str,
        name: str | None,
        rank: int | None,
        silence_s: float,
    ) -> None:
        if name is not None and not isinstance(name, str):
            detail = f"the name of a worker is text, not {name!r:.40}"
            raise problem("invalid_field", detail, hint=f"rank={name!r:.40} sets its rank", where="name")
        self.cluster, self.model = cluster, model
        self.silence_s = silence_s
        """How long the cluster may leave a request unanswered before waiting for workers or tasks gives up."""
        self._name, self._rank = name, rank
        self._lock = threading.Lock()
        self._joining: Final = Turn()
        self._join_in_doubt_until = 0.0
        """Until when, by the clock of deadlines, a higher epoch may be our own: a join may have been done without our
        knowing."""
        self._map_due_s = 0.0
        self._settings_tag: Any = None
        self._base: Mapping[int, tuple[int, int]] | None = None
        """partition -> (version, incarnation) of the values that gradients are currently computed from."""
        self._min_clock = 0
        """sync: the committed clock that released this worker, or at which it began, which pulls ask for: some shards
        may not have applied that commit yet.  A version cannot express it, because assignments raise versions, too."""
        self.numbers: Final = PushNumbers("", 0)
        self.worker = ""
        """The id that the scheduler issued; empty before that."""
        self.rank = -1
        self.first = False
        """Whether its rank is the lowest of the live workers', as the scheduler said last."""
        self.lease_s = limits.LEASE_S
        self.generation = 0
        """Which creation of the model it has joined.  Requests name it: its id and epoch may be another worker's in a
        later one, in particular in a cluster that was begun anew."""
        self.timeline = 0
        self.clock = 0
        """Iterations finished, which is also the number of the current one."""
        self.since = 0
        """The clock from which on this worker has skipped none."""
        self.pushed: tuple[int, int] | None = None
        """(epoch, timeline) of the current iteration's last accepted push; `session.NOTHING`: none of them counts."""
        self.mode = "async"
        self.status = "active"
        """What the scheduler asks for: `active`, `paused`, `draining` or `stop`."""
        self.replaced = False
        """Whether another worker has joined under this id, which this one then never takes back."""
        self.left = False
        """Whether it has left, or is leaving: it never joins again then."""
        self._evaluation_waits = False
        self.reports: Final = Reports()
        self.holding: Final = Holding()

    @property
    def joined(self) -> bool:
        """Whether it has ever joined."""
        return bool(self.worker)

    @property
    def evaluation_waits(self) -> bool:
        """Whether an evaluation may be pending: one that no worker has taken, or that failed or may be leased here."""
        return self._evaluation_waits or self.holding.evaluation_failed

    def join(self, deadline: Deadline) -> Call[None]:
        """Become a worker of the model, or become one again under the same id."""
        model_map = yield from self.cluster.map_of(self.model, deadline)
        self._adopt_settings(model_map)
        body = self._introduction()
        path, backoff = model_path(self.model, "workers"), Backoff(deadline)
        # Until the answer is here; a join that is given up may be granted all the same, even after the next one.
        earlier, self._join_in_doubt_until = self._join_in_doubt_until, inf
        try:
            try:
                doc = yield from deliver_json(_request("POST", path, body), deadline, backoff)
            except PsError as e:
                if not self.joined or e.members.get("where") != "rank" or "rank" not in body:
                    raise
                del body["rank"]  # another worker has taken it meanwhile
                doc = yield from deliver_json(_request("POST", path, body), deadline, backoff)
        except PsError:
            if not backoff.in_doubt:
                self._join_in_doubt_until = earlier
            raise
        with self._lock:
            doubtful = backoff.in_doubt or earlier == inf
            self._join_in_doubt_until = deadline.clock() + limits.LATE_JOIN_S if doubtful else earlier
            self._enter(doc)
        if self.generation != model_map.generation:
            yield from self.refresh_mode(deadline)
        self._map_due_s = deadline.clock() + MAP_AGE_S
        log.info("worker.joined worker=%s rank=%d clock=%d", self.worker, self.rank, self.clock)

    def _introduction(self) -> dict[str, Any]:
        """Return the body of a request to join: by which name, rank and epoch the scheduler may know this worker."""
        body: dict[str, Any] = {}
        if name := self.worker or self._name:
            body["name"] = name
        else:
            body["attempt"] = token_hex(16)  # makes the join idempotent: a retry does not add a second worker
        rank = self.rank if self.joined else self._rank
        if rank is not None:
            body["rank"] = rank
        if self.numbers.epoch:
            body["above"] = self.numbers.epoch
        return body

    def _enter(self, doc: Mapping[str, Any]) -> None:
        """Begin an epoch as the scheduler's answer to a join says."""
        self.reports.joined(None if self.joined else doc.get("state"))
        self.worker = self.numbers.worker = str(doc["worker"])
        self.generation = int(doc["generation"])
        self.numbers.renew(int(doc["epoch"]))
        self.rank = int(doc["rank"])
        self.first = bool(doc.get("first", self.rank == 0))
        self.lease_s = float(doc.get("lease_s") or limits.LEASE_S)
        self.timeline = int(doc.get("timeline") or 0)
        self.reports.begin(self.timeline)
        self.clock = self.since = self._min_clock = int(doc.get("clock") or 0)
        self._heed(doc.get("asked"))

    def leave(self, deadline: Deadline) -> Call[None]:
        """Leave the model, after a last heartbeat.  Errors are only logged: the lease then expires by itself."""
        self.left = True
        try:
            yield from self.beat(deadline)
            query = f"?epoch={self.numbers.epoch}&generation={self.generation}"
            request = _request("DELETE", self._path() + query)
            yield from deliver_json(request, deadline)
        except PsError as e:
            log.info("worker.leave_unheard worker=%s error=%s", self.worker, e.code)

    def beat(self, deadline: Deadline, *, last: bool = False) -> Call[None]:
        """Send one heartbeat with clock, state and metrics, and adopt what the scheduler asks for.

        `last` as in `Cluster.fetch_map`.
        """
        self.cluster.same_host.unmap_expired()  # here, as the worker itself may be quiet
        with self._lock:
            epoch, timeline = self.numbers.epoch, self.timeline
            body: dict[str, Any] = {"epoch": epoch, "clock": self.clock, "since": self.since, "timeline": timeline}
            body["generation"] = self.generation
        state, points = self.reports.fresh_state(self.worker), self.reports.take()
        try:
            doc = yield from self._beat(body, document(state, points), deadline)
        except BaseException as e:  # also if this task is cancelled: the last heartbeat, on leaving, sends the points
            self.reports.put_back(points)
            if not isinstance(e, PsError) or not self._follows(e, asked=True):
                if isinstance(e, RequestError | AuthError) and not is_foreign(e) and self.status == "paused":
                    self.status = "active"  # no heartbeat will say so: the call that waits meets the refusal itself
                raise
            yield from self._follow(e, epoch, timeline, deadline)
            return
        if state is not None and doc.get("state_kept", True):  # else it is sent again: that leader alone may know it
            self.reports.mark_sent(state)
        self._adopt(doc)
        if self.mode not in ("sync", "ssp"):  # there the answer to a report of the clock tells it
            self.catch_up(int(doc.get("clock") or 0), epoch, timeline)
        now = deadline.clock()
        if doc.get("settings_tag", self._settings_tag) != self._settings_tag or now >= self._map_due_s:
            self._map_due_s = now + MAP_AGE_S
            yield from self.refresh_mode(deadline, last=last)

    def catch_up(self, clock: int, epoch: int, timeline: int) -> None:
        """Adopt the clock that the model reached while this worker held nobody up, unless epoch or timeline changed.

        Reports of lower ones would say nothing new, so in async and buffered the model's clock would stand still.
        """
        with self._lock:
            now = self.numbers.epoch, self.timeline
            if now == (epoch, timeline) and clock > self.clock:
                took_part, self.pushed = self.pushed == now, None
                self._set_clock(clock, took_part=took_part)
                if self.mode == "sync":
                    self._min_clock = max(self._min_clock, clock)

    def _set_clock(self, clock: int, *, took_part: bool = True) -> None:
        """Set the clock, after the worker took part in the present one or not; `since` starts anew if it skips any."""
        if clock > self.clock + took_part:
            self.since = clock
        self.clock = clock

    def _beat(self, body: Mapping[str, Any], fields: dict[str, Any], deadline: Deadline) -> Call[Any]:
        """Send a heartbeat and return its answer.

        One of `fields` that the scheduler refuses is left out and the rest sent again, because the lease must be kept.
        """
        wrong: dict[str, PsError] = {}
        while True:
            try:
                doc = yield from deliver_json(_request("PUT", self._path(), {**body, **fields}), deadline)
                break
            except PsError as e:
                if not fields or not refused(e):
                    raise
                where = str(e.members.get("where", "")).partition(".")[0]
                part = where if where in fields else next(iter(fields))
                del fields[part]
                wrong[part] = e
        for part, why in wrong.items():
            self.reports.left_out(self.worker, part, why)
        return doc

    def refresh_mode(self, deadline: Deadline, *, last: bool = False) -> Call[None]:
        """Fetch the model's document and adopt its mode, which may have changed; `last` as in `Cluster.fetch_map`."""
        self._adopt_settings((yield from self.cluster.fetch_map(self.model, deadline, last=last)))

    def _adopt_settings(self, model_map: ModelMap) -> None:
        self.mode, self._settings_tag = model_map.spec.consistency.mode, model_map.document.get("settings_tag")

    def report(self, metrics: Mapping[str, Any], deadline: Deadline) -> Call[None]:
        """Send metrics now, after those that are queued for the next heartbeat."""
        values, timeline, kept = numbers_of(metrics), self.timeline, self.reports.take()
        try:
            yield from self.reports.pass_on(self.model, self.worker, self.generation, kept, deadline)
        finally:
            self.reports.put_back(kept)
        if values:
            yield from send(self.model, self.worker, self.generation, (timeline, self.clock, values), deadline)

    def ask(
        self,
        path: str,
        body: Mapping[str, Any],
        epoch: int,
        timeline: int,
        wait_s: float,
        clock: Clock,
        until: Deadline | None = None,
    ) -> Call[Any]:
        """Send a request to the scheduler, which may hold it for `wait_s`, and return the answer.

        A silent scheduler is given up after `silence_s` more, or `ANSWER_S` after `until`.  What the answer asks of the
        worker is adopted.  Returns None if the worker of this epoch and timeline was rolled back or
        lost its membership; that has been followed (`_follow`).
        """
        now = clock()
        ends = now + wait_s + self.silence_s if until is None else max(now, until.at) + ANSWER_S
        who = {"worker": self.worker, "epoch": epoch, "generation": self.generation}
        request = _request("POST", path, {**who, **body, "wait_s": wait_s}, wait_s)
        try:
            doc = yield from deliver_json(request, Deadline(ends, clock))
        except PsError as e:
            if not self._follows(e, asked=True):
                raise
            yield from self._follow(e, epoch, timeline, Deadline(ends, clock))
            return None
        self._adopt(doc)
        return doc

    def _follows(self, error: PsError, *, asked: bool = False) -> bool:
        """Whether `_follow` handles this error; `asked`: of the scheduler.

        Shards say `model_replaced` of values or of a gradient, whose sender is to hear of it.
        """
        # A model that was deleted and created again does not know its former workers: they have never joined it.
        codes = ("rolled_back", "fenced", "unknown_worker", "reserved_worker")
        return error.code in codes or (asked and error.code == "model_replaced")

    def _follow(self, error: PsError, epoch: int, timeline: int, deadline: Deadline) -> Call[None]:
        """Adopt a rollback, or join again, unless another call of this session has already done so.

        Raises FencedError (`fenced`) if another worker has joined under this id, and at the deadline `error` itself.
        """
        if error.code == "rolled_back":
            with self._lock:
                new = int(error.members.get("timeline") or 0)
                if new > self.timeline:
                    before, self.timeline = self.clock, new
                    self.reports.begin(new)
                    self.clock = self.since = self._min_clock = int(error.members.get("clock") or 0)
                    self._base = None
                    # A change to sync takes nothing back, and a restore goes on beyond all earlier clocks.
                    fell = self.mode == "sync" and self.clock <= before
                    what = "rolled_back" if fell else "moved_on"
                    level = logging.WARNING if fell else logging.INFO
                    log.log(level, "worker.%s worker=%s timeline=%d clock=%d", what, self.worker, new, self.clock)
            if new <= timeline:  # we know that timeline already: wait until the shard has learned of ours
                yield Pause(0.1)
                if deadline.left_s() <= 0:
                    raise error
            return
        with self._lock:
            if self.numbers.epoch != epoch:
                return
            taken = int(error.members.get("epoch") or 0) > (0 if error.code == "model_replaced" else epoch)
            if taken and deadline.clock() >= self._join_in_doubt_until and not self._joining.taken:
                self.replaced, self.status = True, "stop"
        if not self.replaced and not self.left:
            log.warning("worker.lost worker=%s epoch=%d reason=%s: joining again", self.worker, epoch, error.code)
        yield from self._join_again(epoch, deadline)

    def _join_again(self, epoch: int, deadline: Deadline) -> Call[None]:
        """Join under a new epoch if `epoch` is still current; if another call is doing so, wait for it.

        Raises FencedError (`fenced`) if this worker was replaced, even if its model was created anew since then and
        knows neither of the two; and ConflictError (`conflict`) once it has left.
        """
        if self.replaced:
            raise problem(
                "fenced",
                f"another worker has joined as '{self.worker}' and replaces this one",
                hint="give each worker a unique name, or no name",
            )
        if self.left:
            raise has_left()
        held = Held()
        try:
            with self._lock:
                if self.numbers.epoch != epoch:
                    return
                mine = not self._joining.taken
                if mine:
                    self._joining.take(held)
            if mine:
                yield from self.join(deadline)
                if self.left:  # meanwhile: nobody would send heartbeats for this epoch
                    yield from self.leave(deadline)
                    raise has_left()
            while not mine and self._joining.taken and deadline.left_s() > 0:
                yield Pause(0.02)
        finally:
            held.over = True

    def _adopt(self, doc: Mapping[str, Any]) -> None:
        """Adopt the status and the pending evaluation that an answer of the scheduler names."""
        self._heed(doc.get("state"))
        self.first = bool(doc.get("first", self.first))
        if "evaluate" in doc:
            self._evaluation_waits = bool(doc["evaluate"])

    def _heed(self, status: Any) -> None:
        untold = (status, self.status) == ("paused", "stop")  # Redis is away, and whoever leads cannot repeat it
        if status in ("active", "paused", "draining", "stop") and status != self.status and not untold:
            self.status = str(status)
            log.info("worker.asked worker=%s state=%s", self.worker, status)

    def while_paused(self, until: Deadline | None = None) -> Call[None]:
        """Wait while the worker is asked to pause.  Raises Unavailable (`unavailable`) at `until`, if given."""
        while self.status == "paused":
            if until is not None and until.left_s() <= 0:
                hint = (
                    "psctl run resume, or client.set_run(), resumes it; if it has ended, Redis is away (psctl status)"
                )
                raise problem("unavailable", "the run is paused", hint=hint)
            yield Pause(0.2 if until is None else min(0.2, until.left_s()))

    def _path(self) -> str:
        return model_path(self.model, "workers") + "/" + quote(self.worker, safe="")


def has_left() -> PsError:
    """Return the error for using a worker whose block has ended."""
    return problem("conflict", "the worker has left", hint="model.worker() makes another")


def _request(method: str, path: str, body: Any = None, wait_s: float = 0.0) -> Request:
    """Return an idempotent request that the scheduler answers at once or after `wait_s`."""
    return json_request(method, path, body, timeout_s=ATTEMPT_S + wait_s)
