"""Cluster membership of this shard: joining, heartbeats, and following the scheduler's feed.

Several schedulers may be configured; the first that answers is used until it fails. The feed is level-triggered: each
new connection starts with the complete state, so a broken connection loses nothing.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from math import inf
from time import monotonic
from typing import Any, Final

from msgspec.structs import replace
from redis.asyncio import Redis
from redis.exceptions import ReadOnlyError, RedisError

from paramserver import __version__
from paramserver.core.heartbeat_rows import LostRow
from paramserver.core.shard.effects import AskWorker
from paramserver.core.shard.events import CommitDecided, MapChanged, ModelGone, ModelView, RosterChanged, WorkerAnswered
from paramserver.errors import AuthError, FencedError, NotFoundError, PsError, RequestError, problem
from paramserver.limits import HEARTBEAT_S, LEASE_S
from paramserver.types import ModelKey
from paramserver_node.race import race
from paramserver_node.redis import FENCE_KEY, LEADER_KEY, TERM_KEY, leave_after, stop_if_cancelled
from paramserver_shard.clocks import ClockReports
from paramserver_shard.directory import Directory
from paramserver_shard.leader_terms import LeaderTerms
from paramserver_shard.link import RETRY_S, SOURCE_URL, SchedulerLink
from paramserver_shard.memory import Memory
from paramserver_shard.runtime import Runtime
from paramserver_shard.serving import Serving
from paramserver_shard.telemetry import Telemetry

log = logging.getLogger("paramserver.shard")

LOG_INTERVAL_S: Final = 60.0
REFUSAL_LOG_INTERVAL_S: Final = 5.0
FENCE_S: Final = 1.5
"""Timeout of the fence key, unless it was just exceeded: if the network has lost the connection, the next one answers
before the shard may no longer serve (`SERVE_WITHOUT_CONTACT_S`)."""


class Membership:
    """Keeps one shard a member of the cluster; implements the runtime's `Scheduler`."""

    def __init__(
        self,
        name: str,
        addresses: Sequence[str],
        link: SchedulerLink,
        redis: Redis,
        directory: Directory,
        runtime: Runtime,
        telemetry: Telemetry,
        memory: Memory,
        clocks: ClockReports,
    ) -> None:
        self.name = name
        self.epoch = 0
        """Node epoch, 0 before the first join."""
        self.followed = False
        """Whether the first document of the feed has been processed."""
        self.stopping = False
        """Whether the process is shutting down: no longer ready, but still serving what it owns."""
        self.serving: Final = Serving()
        self._addresses = list(addresses)
        self.link = link
        self._redis = redis
        self._terms = LeaderTerms(link, redis)
        self._directory = directory
        self._runtime = runtime
        self._telemetry = telemetry
        self._clocks = clocks
        self.memory = memory
        self._kick = asyncio.Event()
        self._resync = asyncio.Event()
        self._views: dict[str, ModelView] = {}
        self._joining = asyncio.Lock()
        """Held while a request to join is under way."""
        self._fenced = False
        """Whether this process was fenced before, so that its current membership is a rejoin."""
        self._join_error, self._join_error_logged_at = "", 0.0
        """Error code of the last failed join, and when it was logged."""
        self._unheard, self._unheard_logged_at = False, -inf
        """Whether it was logged that nothing is heard from a scheduler, and still is not; when it was logged last."""
        self._refusal_logged_at = -inf

    def unready(self) -> str:
        """Return why this shard is not ready, or an empty string if it is. Does not query Redis."""
        if self.stopping:
            return "this shard is stopping"
        if not self.epoch:
            return "not a member of the cluster yet" + (f" ({self._join_error})" if self._join_error else "")
        return "" if self.followed else "the cluster map has not arrived yet"

    @property
    def cluster(self) -> str:
        """Id of the cluster; empty until the first map has come."""
        return self._directory.cluster

    # -- requests from the core (`Scheduler`)

    def report(self) -> None:
        self._kick.set()

    def resync(self) -> None:
        self._resync.set()

    async def ask_worker(self, effect: AskWorker) -> WorkerAnswered:
        path = f"/internal/models/{effect.model.name}/worker"
        try:
            answer = await self.link.request("GET", path, params={"worker": effect.worker})
        except NotFoundError:
            return WorkerAnswered(effect.request, None)
        except PsError as error:
            return WorkerAnswered(effect.request, None, error=error)
        epoch, generation = int(answer["epoch"]), int(answer["generation"])
        return WorkerAnswered(effect.request, epoch, bool(answer["alive"]), generation=generation)

    # -- the loops

    async def run(self) -> None:
        """Join, and rejoin whenever the membership ends, until cancelled or closed."""
        while not self.serving.closed:
            try:
                async with self._joining:
                    await self._join()
            except PsError as error:
                if error.code == "invalid_field":  # its name or an address is not allowed: retrying would not help
                    raise
                self._log_join_failure(error)
                if error.code == "conflict":  # perhaps of a leader that does not know its successor yet
                    self.link.switch_from(self.link.url)
                await asyncio.sleep(RETRY_S)
                continue
            if self.serving.closed:  # meanwhile; whoever closed it leaves
                return
            self._join_error = ""
            joined_at = monotonic()
            try:
                async with asyncio.TaskGroup() as member:
                    member.create_task(self._heartbeats())
                    member.create_task(self._follow())
                    member.create_task(self._watch_fence())
                    member.create_task(
                        self._clocks.run(self.link, f"/internal/shards/{self.name}/clocks?epoch={self.epoch}")
                    )
            except* FencedError as errors:
                self._drop_partitions()
                if not self.serving.closed:  # else no rejoin: partitions assigned now would end with the process
                    self._check_duplicate_name(joined_at, errors.exceptions[0])

    async def _join(self) -> None:
        body = {"name": self.name, "addresses": self._addresses, "version": __version__}
        answer = await self.link.request("POST", "/internal/shards", body, await self._redis_leader())
        await self._terms.accept(answer)
        self.epoch = int(answer["epoch"])
        self.serving.confirm(scheduler_at=monotonic())
        log.info("joined as %s, epoch %d", self.name, self.epoch)

    async def _redis_leader(self) -> dict[str, Any]:
        """Return term and leader in this shard's Redis as query parameters; empty if Redis does not answer."""
        try:
            term, leader = await self._redis.mget(TERM_KEY, LEADER_KEY)
        except (RedisError, OSError):
            stop_if_cancelled()
            return {}
        return {"redis_term": int(term or 0)} | ({"redis_leader": json.loads(leader)["id"]} if leader else {})

    def _log_join_failure(self, error: PsError) -> None:
        """Log a failed join, unless the same reason was logged within the last minute."""
        if self._join_error != error.code or monotonic() - self._join_error_logged_at > LOG_INTERVAL_S:
            log.warning("cannot join: %s", error)
            self._join_error, self._join_error_logged_at = error.code, monotonic()

    def _drop_partitions(self) -> None:
        """Drop all partitions: the scheduler, or a newer process of this name, has taken them away."""
        self.epoch = 0
        self.serving.end()
        for name, view in self._views.items():
            self._views[name] = replace(view, owned={})
            self._runtime.feed(self._views[name])

    def _check_duplicate_name(self, joined_at: float, reason: Exception) -> None:
        """Raise ConflictError if fenced again soon after joining: two processes of one name keep fencing each other."""
        if monotonic() - joined_at < LEASE_S and self._fenced:
            hint = "give each shard a name of its own: --name, or PARAMSERVER_NAME"
            raise problem("conflict", f"another process is running under the name '{self.name}'", hint=hint)
        self._fenced = True
        log.warning("membership ended, rejoining: %s", reason)

    async def _heartbeats(self) -> None:
        while True:
            self._kick.clear()
            sent_at = monotonic()
            try:
                answer = await self.link.request("PUT", f"/internal/shards/{self.name}", self._heartbeat())
                await self._terms.accept(answer)
            except (FencedError, NotFoundError) as error:
                if await self._terms.is_current(error):
                    raise _as_fenced(error) from error
                await asyncio.sleep(RETRY_S)
                continue
            except PsError as error:
                self._log_failed_heartbeat(error)
                await asyncio.sleep(RETRY_S)
                continue
            self.serving.confirm(scheduler_at=sent_at)  # confirmed as of the time the request was sent
            try:
                async with asyncio.timeout(max(0.0, sent_at + HEARTBEAT_S - monotonic())):
                    await self._kick.wait()
            except TimeoutError:
                pass

    def _log_failed_heartbeat(self, error: PsError) -> None:
        """Log an error if all repetitions will fail like this one: within its lease, the shard is taken for dead."""
        if not isinstance(error, RequestError | AuthError):
            log.debug("heartbeat failed: %s", error)
        elif monotonic() - self._refusal_logged_at > REFUSAL_LOG_INTERVAL_S:
            self._refusal_logged_at = monotonic()
            held = sum(1 for _ in self._runtime.core.partitions())
            log.error("the scheduler refuses the heartbeats of this shard, with %d partitions: %s", held, error)

    def _heartbeat(self) -> dict[str, Any]:
        core = self._runtime.core
        lost = self._runtime.lost = {key: token for key, token in self._runtime.lost.items() if core.owns(key, token)}
        never_stored = [LostRow(k.model.name, k.model.generation, k.index, token, False) for k, token in lost.items()]
        return {
            "epoch": self.epoch,
            "metrics": self._metrics(),
            "partitions": list(core.partitions()),
            "cuts": list(core.cuts()),
            "released": list(core.released()),
            "lost": [*never_stored, *core.given_up()],
            "memory": self.memory.document(),
            "loads": self._runtime.loads.rates(),
        }

    def _metrics(self) -> dict[str, Any]:
        metrics = self._telemetry.rates()
        if degraded := self._runtime.degraded:
            metrics["degraded"] = degraded[:300]
        if self._runtime.storage.redis_away:
            metrics["redis_away"] = True
        return metrics

    async def _watch_fence(self) -> None:
        """Check the fence key in Redis each second; raises FencedError if this epoch is fenced."""
        timeout_s: float | None = FENCE_S
        while True:
            stop_if_cancelled()
            asked_at = monotonic()
            try:
                async with asyncio.timeout(timeout_s) as limit, self._redis.pipeline(transaction=False) as pipe:
                    pipe.get(TERM_KEY)
                    pipe.hget(FENCE_KEY, self.name)
                    pipe.info("server")
                    pipe.info("replication")
                    term, fence, server, replication = await pipe.execute()
                if replication.get("role") == "slave":  # nothing is written here, which would tell
                    raise ReadOnlyError("it has become a replica")
            except (RedisError, OSError) as error:
                await leave_after(error, self._redis)
                if limit.expired():  # it may only be slow: ask again with the client's own timeout
                    timeout_s = None
                    self._runtime.storage.leave_idle(error)
                    continue
                timeout_s = FENCE_S
                self._runtime.storage.redis_failed(error)
            else:
                timeout_s = FENCE_S
                self._runtime.storage.redis_answered(str(server["run_id"]))
                if fence is not None and int(fence) >= self.epoch:
                    raise problem("fenced", f"epoch {self.epoch} of shard '{self.name}' is fenced in Redis")
                if term is not None:  # an emptied Redis has lost its fences too, so it confirms nothing
                    self.serving.confirm(redis_at=asked_at)
                    if self._terms.adopt(int(term)):
                        self._turn_to_successor()
            await asyncio.sleep(HEARTBEAT_S)

    async def _follow(self) -> None:
        while True:
            self._resync.clear()
            try:
                await race(self._read_feed(), self._resync.wait())
            except (FencedError, NotFoundError) as error:
                if await self._terms.is_current(error):
                    raise _as_fenced(error) from error
            except (PsError, TimeoutError, ValueError) as error:
                self._log_unheard(str(error) or type(error).__name__)
            await asyncio.sleep(RETRY_S)

    def _log_unheard(self, why: str) -> None:
        """Log that the feed has ended, at most once a minute."""
        if monotonic() - self._unheard_logged_at > LOG_INTERVAL_S:
            log.warning("nothing is heard from a scheduler: the feed of %s ended: %s", self.link.url, why)
            self._unheard, self._unheard_logged_at = True, monotonic()

    async def _read_feed(self) -> None:
        untold = dict(self._views)
        async with aclosing(self.link.feed(self.name, self.epoch)) as documents:
            async for document in documents:
                self._take(document)
                self.followed = True
                if self._unheard:
                    self._unheard = False
                    log.warning("%s is followed again", document[SOURCE_URL])
                if document["type"] == "model":
                    untold.pop(document["name"], None)
                elif document["type"] == "ping":  # the first follows the complete state: the others were deleted
                    for name, view in untold.items():
                        self._take({**document, "type": "gone", "model": name, "generation": view.model.generation})
                    untold = {}

    def _take(self, document: Mapping[str, Any]) -> None:
        self._terms.check(document)
        self._directory.update(document)
        kind = document["type"]
        feed = self._runtime.feed
        if kind == "map":
            feed(MapChanged(self._directory.map_epoch))
        elif kind == "model":
            known = self._directory.models[document["name"]]
            if known.key.generation == document["generation"]:
                view = ModelView.from_document(document, self.name, known.spec, known.layout)
                self._views[document["name"]] = view
                feed(view)
        elif kind == "commit":
            feed(CommitDecided.from_document(document))
        elif kind == "roster":
            model = ModelKey(document["model"], int(document["generation"]))
            feed(RosterChanged(model, {w: int(epoch) for w, (epoch, _) in document["workers"].items()}))
        elif kind == "gone":
            name = document["model"]
            self._views.pop(name, None)
            self._telemetry.forget(name)
            feed(ModelGone(ModelKey(name, int(document["generation"]))))

    def obey(self, term: int) -> None:
        """Adopt the term of a leader's request; raises Unavailable (`no_leader`) if a newer leader is known."""
        if self._terms.check_request(term):
            self._turn_to_successor()

    def _turn_to_successor(self) -> None:
        self.resync()
        self.report()

    # -- used by `Stopping`

    def cuts(self) -> dict[ModelKey, int | None]:
        """Return the clock of each model's newest cut that all its owners have stored."""
        return {known.key: known.cut for known in self._directory.models.values()}

    async def drain(self, *, cut: bool) -> tuple[int, int]:
        """Ask the scheduler to move all partitions away. Raises PsError.

        Returns how many shards can take them, and how many this shard has by the scheduler's map, of which the feed may
        not have told yet. With `cut`, synchronous models at level `applied` are to be stored where they stand as well.
        """
        asked = {"epoch": self.epoch, "cut": int(cut)}
        answer = await self.link.request("POST", f"/internal/shards/{self.name}/drain", params=asked)
        return int(answer["targets"]), int(answer["partitions"])

    async def leave(self, *, stored: bool) -> bool:
        """Tell the scheduler that this shard leaves, so that its partitions are reassigned at once.

        With `stored`, only if no model loses a commit by that; False if one would: it is being stored, ask again.
        Waits for a join that is under way.  Raises PsError.
        """
        async with self._joining:
            if not self.epoch:
                return True
            asked = {"epoch": self.epoch, "stored": int(stored)}
        try:
            answer = await self.link.request("DELETE", f"/internal/shards/{self.name}", params=asked)
        except (FencedError, NotFoundError) as error:  # it has left, and the answer was lost; or it is taken for dead
            log.info("deregistered already: %s", error)
            return True
        return bool(answer.get("left", True))


def _as_fenced(error: PsError) -> PsError:
    """Return the FencedError that ends this membership; a NotFoundError (unknown shard) is turned into one."""
    return error if isinstance(error, FencedError) else problem("fenced", error.detail)
