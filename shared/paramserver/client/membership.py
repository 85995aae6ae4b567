"""A worker's membership: epoch, clock and mode of one worker of one model, and what the scheduler asks of it.

Every method that talks to the cluster is a call (see `calls`).  The heartbeat runs beside the worker's own calls, so
what both change is changed in single steps.  Three things may happen to a worker, and it follows all of them:

- *rolled back*: a shard died and the synchronous model is at an earlier clock again, under a higher timeline.  The
  worker goes to that clock; a gradient of the old timeline is dropped; the next pull has the older values.
- *fenced*: the worker's lease ran out.  It joins again under the same id with a higher epoch.  Where another one has
  joined under that id meanwhile, this one gives way: two would fence each other for ever.
- *draining*, *stop*, *paused*: what the scheduler asks for in its answers.
"""

import logging
import threading
from collections.abc import Mapping
from secrets import token_hex
from typing import Any, Final
from urllib.parse import quote

from paramserver import limits
from paramserver.client.calls import ATTEMPT_S, Call, Clock, Deadline, Pause, Request, json_request
from paramserver.client.cluster import Cluster, control, model_path
from paramserver.client.numbers import PushNumbers
from paramserver.client.reports import Reports, document, numbers_of, refused, send
from paramserver.client.retry import Backoff
from paramserver.client.tasks import Holding
from paramserver.errors import PsError, problem

log = logging.getLogger("paramserver")

MAP_AGE_S: Final = 5.0
"""How often a heartbeat looks for changed settings."""


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
        self.cluster, self.model = cluster, model
        self.silence_s = silence_s
        """How long the cluster may be silent before waiting for other workers or for a task is given up."""
        self._name, self._rank = name, rank
        self._lock = threading.Lock()
        self._joining = False
        self._join_in_doubt = False
        """Whether the last join was asked for several times, so that a later epoch may be this worker's own."""
        self._looked_at = 0.0
        self._base: Mapping[int, tuple[int, int]] | None = None
        """(version, incarnation) of each partition of the values that gradients are now computed from."""
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

    def report(self, metrics: Mapping[str, Any], deadline: Deadline) -> Call[None]:
        """Send a report now, after what is kept for the next heartbeat."""
        values, kept = numbers_of(metrics), self.reports.take()
        try:
            yield from self.reports.pass_on(self.model, self.worker, kept, deadline)
        finally:
            self.reports.put_back(kept)
        if values:
            yield from send(self.model, self.worker, (self.clock, values), deadline)

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
