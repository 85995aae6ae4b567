"""A simulated shard: the real core with its feed, heartbeats, fence, snapshots and journal over simulated Redis."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from paramserver.core.heartbeat_rows import LostRow
from paramserver.core.layout import Layout
from paramserver.core.partition_state import LoadedState
from paramserver.core.scheduler import io
from paramserver.core.shard.core import ShardCore
from paramserver.core.shard.effects import (
    Apply,
    AskWorker,
    Effect,
    Journal,
    LoadPartition,
    PullDone,
    PushDone,
    Reply,
    Report,
    Resync,
    StoreSnapshot,
)
from paramserver.core.shard.events import (
    Applied,
    CommitDecided,
    Event,
    Journaled,
    JournalLost,
    JournalRefused,
    LoadFailed,
    MapChanged,
    ModelGone,
    ModelView,
    PartitionLoaded,
    PullReceived,
    PushReceived,
    RosterChanged,
    SnapshotDone,
    StorageChanged,
    Tick,
    WorkerAnswered,
)
from paramserver.core.shard.journal import JournalEntry
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError, problem
from paramserver.limits import SERVE_WITHOUT_CONTACT_S
from paramserver.testing.feeds import RETRY_S, Feed
from paramserver.testing.nodes import Node
from paramserver.testing.schedulers import SimScheduler
from paramserver.testing.shard_driver import check_superseded, checked_part, perform, pullable
from paramserver.testing.storage import SimRedis, Verdict
from paramserver.testing.world import Answer, Call, Delivery, World
from paramserver.types import ModelKey, PartitionKey, Token

Ownership = tuple[PartitionKey, Token]


class SimShard(Node):
    """One shard process."""

    def __init__(self, world: World, name: str, redis: SimRedis, schedulers: Sequence[SimScheduler]) -> None:
        super().__init__(world, name, redis)
        self.schedulers = list(schedulers)

    def start(self) -> None:
        """Start and join, owning nothing."""
        self.core = ShardCore(checked_part)
        self.epoch = 0
        self.term = 0
        """The highest term that a document carried."""
        self.views: dict[str, ModelView] = {}
        """The newest of each model that exists, by name."""
        self.layouts: dict[ModelKey, Layout] = {}
        self.feed: Feed | None = None
        """The one that is followed, if any."""
        self.cuts: dict[ModelKey, int | None] = {}
        """The newest cut stored on all partitions, per model that may roll back to it, as its document says."""
        self._queues: dict[Ownership, deque[JournalEntry]] = {}
        self._writing = False
        self.lost: dict[PartitionKey, Token] = {}
        """Owned partitions whose uploaded values were never stored."""
        self.hurried = False
        """Whether it stores snapshots as fast as Redis takes them."""
        self._redis_process: int | None = None
        """The process of Redis that answered last."""
        self._redis_silent = False
        """Whether it did not answer when it was last asked for the fence."""
        self._wakes_at = float("inf")
        self._confirmed_s = float("-inf")
        self.up = True
        self._join(self.deaths)
        self._fence()

    @property
    def scheduler(self) -> SimScheduler:
        """The scheduler in use."""
        return self.schedulers[0]

    def switch_scheduler(self) -> None:
        self.schedulers = [*self.schedulers[1:], self.schedulers[0]]

    @property
    def serving(self) -> bool:
        """Whether the fence key or a heartbeat has confirmed this shard recently enough to serve (semantics 6)."""
        return self.epoch > 0 and self.world.now - self._confirmed_s <= SERVE_WITHOUT_CONTACT_S

    @property
    def journaling(self) -> bool:
        """Whether any entry is not written yet."""
        return bool(self._queues)

    # --- membership

    def send(self, call: Call, on_answer: Answer) -> None:
        """Send a request; its answer is dropped if this process crashes in the meantime."""
        life = self.deaths

        def answered(outcome: Any) -> None:
            if self.up and life == self.deaths:
                self.later(0.0, f"hears {call.what}", lambda: on_answer(outcome))

        self.world.send(call, answered)

    def _join(self, life: int) -> None:
        if not self.up or life != self.deaths:
            return
        self.epoch = 0
        self.feed = None
        asked_s = self.world.now

        def answered(outcome: Any) -> None:
            if isinstance(outcome, PsError):
                self.switch_scheduler()
                self.later(RETRY_S, "join again", lambda: self._join(life))
                return
            self.epoch, self.term, self._confirmed_s = outcome["epoch"], outcome["term"], asked_s
            self._heartbeat(self.epoch)
            self.follow()

        term = None if self._redis_silent else self.redis.term
        make = lambda r: io.JoinShard(r, self.name, [f"http://{self.name}"], "", term)  # noqa: E731
        self.send(self.scheduler.ask(self.name, make), answered)

    def end_membership(self) -> None:
        """End this membership: give up all partitions and join again."""
        self.epoch, self._confirmed_s = 0, float("-inf")
        for view in list(self.views.values()):
            self._view(replace(view, owned={}, release={}))
        self._join(self.deaths)

    def _heartbeat(self, epoch: int, *, again: bool = True) -> None:
        if not self.epoch or epoch != self.epoch:
            return
        partitions, cuts, released = list(self.core.partitions()), list(self.core.cuts()), list(self.core.released())
        asked_s = self.world.now

        def answered(outcome: Any) -> None:
            if epoch != self.epoch:
                return
            if not isinstance(outcome, PsError):
                self._confirmed_s = max(self._confirmed_s, asked_s)
            elif outcome.code in ("fenced", "unknown_node"):
                self.end_membership()
            else:
                self.switch_scheduler()

        lost = [
            LostRow(k.model.name, k.model.generation, k.index, token, False)
            for k, token in self.lost.items()
            if self.core.owns(k, token)
        ]
        lost += self.core.given_up()
        metrics = {"redis_away": True} if self._redis_silent else {}
        make = lambda r: io.ShardHeartbeat(r, self.name, epoch, metrics, partitions, cuts, released, lost)  # noqa: E731
        self.send(self.scheduler.ask(self.name, make), answered)
        if again:
            self.later(1.0, "heartbeat", lambda: self._heartbeat(epoch))

    def _fence(self) -> None:
        asked_s, epoch = self.world.now, self.epoch

        def answered(found: tuple[int, int, int] | None) -> None:
            if epoch != self.epoch or not epoch:
                return
            self._redis_silent = found is None
            if found is None:
                self._storage("Redis does not answer")
                return
            fence, term, process = found
            if self._redis_process not in (None, process):
                self._check_after_restart()
            self._redis_process = process
            if fence >= epoch:
                self.end_membership()
                return
            if term:  # else it has lost its fences, too
                self._confirmed_s = max(self._confirmed_s, asked_s)
            if not self._queues:
                self._storage("")

        work = lambda redis: (redis.fences.get(self.name, 0), redis.term, redis.process)  # noqa: E731
        self.ask_redis("fence", work, answered)
        self.later(1.0, "fence", self._fence)

    def _check_after_restart(self) -> None:
        """Have partitions stored again of which a new process of Redis has lost something."""
        parts = [p for m in self.core.models.values() for p in m.partitions.values() if p.state is not None]
        known = [(p.key, p.token, p.mark.stored) for p in parts]

        def answered(found: list[int] | None) -> None:
            if found is None:
                self._redis_process = -1  # of no process, so this is done again
                return
            for (key, token, lsn), there in zip(known, found, strict=True):
                if there < lsn:
                    self.handle(JournalLost(key, token, restarted=True))

        self.ask_redis("lsns", lambda redis: [redis.store.last_lsn(key) for key, _, _ in known], answered)

    def _storage(self, reason: str) -> None:
        if self.core.durability.storage != reason:
            self.handle(StorageChanged(reason))

    # --- the feed

    def follow(self) -> None:
        """Open the feed of the scheduler in use, in place of the one before."""
        self.feed = Feed(self, self.scheduler)
        self.feed.open()

    def take(self, doc: Mapping[str, Any]) -> None:
        match doc["type"]:
            case "map":
                self.handle(MapChanged(doc["map_epoch"]))
            case "model":
                key = ModelKey(doc["name"], doc["generation"])
                self.cuts[key] = doc["cut"] if doc["spec"]["ack"] == "applied" else None
                spec = ModelSpec.parse(doc["spec"])
                layout = self.layouts.setdefault(key, Layout(spec))
                self._view(ModelView.from_document(doc, self.name, spec, layout))
            case "commit":
                self.handle(CommitDecided.from_document(doc))
            case "roster":
                workers = {w: v[0] for w, v in doc["workers"].items()}
                self.handle(RosterChanged(ModelKey(doc["model"], doc["generation"]), workers))
            case "gone":
                self.views.pop(doc["model"], None)
                self.handle(ModelGone(ModelKey(doc["model"], doc["generation"])))

    def _view(self, view: ModelView) -> None:
        self.views[view.model.name] = view
        self.handle(view)

    # --- events and effects

    def handle(self, event: Event) -> None:
        """Handle one event; its effects are performed in order."""
        before = pullable(self.core)
        effects = self.core.handle(event, self.world.now)
        check_superseded(self.core, before)
        self._check()
        for effect in effects:
            self.in_turn(type(effect).__name__, lambda effect=effect: self._perform(effect))  # type: ignore[misc]
        due = self.core.deadline()
        if due is not None and due < self._wakes_at:
            self._wakes_at = due
            self.later(max(1e-4, due - self.world.now), "tick", self._tick)

    def _check(self) -> None:
        """Assert that each partition's content is the only one of its name, and in sync its settings those of commits.

        These are the ones that the commit it took last names, and none that are newer than those of the next.  Only a
        restore brings newer ones.
        """
        ledger = self.scheduler.ledger
        for model in self.core.models.values():
            line = model.key.generation, model.timeline
            for p in model.partitions.values():
                restored = line in ledger.restored
                ledger.contents.note(model, p, restored)
                if p.state is None or p.committing or p.spec.consistency.mode != "sync" or not model.sync:
                    continue
                last, following = (ledger.revisions.get((*line, clock)) for clock in (p.clock - 1, p.clock))
                named = last in (None, p.revision) or (restored and last is not None and last < p.revision)
                assert named, f"partition {p.index} is at revision {p.revision}, not {last}"
                early = following is None or p.revision <= following or restored
                assert early, (
                    f"partition {p.index} is at revision {p.revision} before the commit that names {following}"
                )

    def _tick(self) -> None:
        self._wakes_at = float("inf")
        self.handle(Tick())

    def _perform(self, effect: Effect) -> None:
        slow = self.world.rng.uniform(1e-4, self.world.faults.compute_s)
        match effect:
            case Reply(request, outcome):
                self.answer(request, outcome if self.serving else _no_contact())
            case Apply(job, tasks):
                done = Applied(job, tuple(perform(t) for t in tasks))
                self.later(slow, "applied", lambda: self.handle(done))
            case LoadPartition():
                self._load(effect)
            case StoreSnapshot():
                self._store(effect)
            case Journal(entries):
                for entry in entries:
                    self._queues.setdefault((entry.key, entry.token), deque()).append(entry)
                self._write()
            case Report():
                self._heartbeat(self.epoch, again=False)
            case Resync():
                self.follow()
            case AskWorker(request, model, worker):
                self._ask_worker(request, model, worker)

    def _load(self, effect: LoadPartition) -> None:
        def work(redis: SimRedis) -> LoadedState | PsError:
            try:
                return redis.load(effect)
            except PsError as e:
                return e

        def done(outcome: LoadedState | PsError | None) -> None:
            if isinstance(outcome, LoadedState):
                self.lost.pop(effect.key, None)
                self.handle(PartitionLoaded(effect.key, effect.token, outcome))
            else:
                if outcome is not None and outcome.members.get("never_stored"):
                    self.lost[effect.key] = effect.token
                    self._heartbeat(self.epoch, again=False)
                error = outcome or problem("storage_unavailable", "Redis does not answer")
                self.handle(LoadFailed(effect.key, effect.token, error))

        self.ask_redis("load", work, done)

    def _store(self, effect: StoreSnapshot) -> None:
        capture = effect.capture
        pinned, view = self.cuts.get(capture.key.model), self.views.get(capture.key.model.name)

        def done(verdict: Verdict | None) -> None:
            self.handle(SnapshotDone(capture.key, capture.token, verdict is Verdict.DONE, effect.urgent))

        def switch() -> None:
            self.ask_redis("snapshot", lambda redis: redis.save(effect, pinned, view), done)

        longest = 0.0 if effect.urgent or self.hurried else self.world.faults.store_s
        if longest:  # its blocks are written before the manifest is switched
            self.later(self.world.rng.uniform(0.0, longest), "blocks stored", switch)
        else:
            switch()

    def _write(self) -> None:
        """Group commit: at most one write in flight, with all waiting entries of all partitions."""
        for ownership in [o for o in self._queues if not self.core.owns(*o)]:
            del self._queues[ownership]
        if self._writing or not self._queues:
            return
        self._writing = True
        batches = {o: tuple(q) for o, q in self._queues.items()}

        def work(redis: SimRedis) -> dict[Ownership, Verdict]:
            return {o: redis.append(*o, entries) for o, entries in batches.items()}

        def done(verdicts: dict[Ownership, Verdict] | None) -> None:
            self._writing = False
            if verdicts is None:
                self._storage("Redis does not answer")
                self.later(RETRY_S, "journal again", self._write)
                return
            self._storage("")
            stuck = False
            for (key, token), verdict in verdicts.items():
                stuck |= self._settle((key, token), verdict, batches[key, token])
            if stuck:
                self.later(RETRY_S, "journal again", self._write)
            else:
                self._write()

        self.ask_redis("journal", work, done)

    def _settle(self, ownership: Ownership, verdict: Verdict, entries: Sequence[JournalEntry]) -> bool:
        """Process the verdict on one partition's entries; return whether they must be written again."""
        queue = self._queues.get(ownership)
        if queue is None:
            return False
        if verdict is Verdict.DONE:
            for _ in entries:
                queue.popleft()
            if not queue:
                del self._queues[ownership]
            self.handle(Journaled(*ownership, entries[-1].lsn))
            return False
        if verdict is Verdict.FENCED:
            del self._queues[ownership]
            self.handle(JournalRefused(*ownership))
            return False
        if verdict is Verdict.GAP:
            self.handle(JournalLost(*ownership))
        return True

    def _ask_worker(self, request: int, model: ModelKey, worker: str) -> None:
        def done(found: Any) -> None:
            if not isinstance(found, PsError):
                answer = WorkerAnswered(request, found["epoch"], found["alive"], generation=found["generation"])
            elif found.code == "unknown_worker":
                answer = WorkerAnswered(request, None)
            else:
                self.switch_scheduler()
                answer = WorkerAnswered(request, None, error=problem("no_leader", "no scheduler answers"))
            self.handle(answer)

        read = lambda core: core.read.membership(model.name, worker, self.world.now)  # noqa: E731
        self.send(self.scheduler.query(self.name, "worker", read), done)

    # --- requests

    def ask(self, source: str, what: str, make: Callable[[int], Event]) -> Call:
        """Return a request to this shard."""
        return self._request(source, what, lambda answer: self.handle(make(self.number(answer))))

    def _request(self, source: str, what: str, take: Delivery) -> Call:
        """Return a request that `take` handles if this shard may serve."""
        return self.call(what, source, lambda answer: take(answer) if self.serving else answer(_no_contact()))

    def ask_last_push(self, source: str, what: str, event: Callable[[int], PushReceived], shards: int) -> Call:
        """Return a push that ends its worker's iteration on `shards` shards; this one reports its part of the clock."""

        def take(answer: Answer) -> None:
            def pushed(outcome: Any) -> None:
                if isinstance(outcome, PushDone):
                    self._report_clock(made, outcome, shards)
                answer(outcome)

            made = event(self.number(pushed))
            self.handle(made)

        return self._request(source, what, take)

    def _report_clock(self, push: PushReceived, done: PushDone, shards: int) -> None:
        served, indices = self.core.find_model(done.model), [p.partition for p in push.parts]
        assert push.push_id is not None
        assert push.clock is not None
        i = push.push_id
        if done.state != "staged" or served is None or not served.has_staged(indices, i.worker, i.epoch, push.clock):
            return
        name = done.model
        fields = (name.name, name.generation, i.worker, i.epoch, i.seq, push.clock + 1, done.timeline, shards)
        staged = io.ClockStaged(self.name, self.epoch, *fields)
        self.world.send(self.scheduler.tell(self.name, staged), lambda answer: None)

    def ask_commit(self, source: str, push: PushReceived, wait_s: float) -> Call:
        """Return a pull of the push's partitions once its clock is over; the outcome None means: ask the scheduler."""
        assert push.push_id is not None
        assert push.clock is not None
        i, clock, indices = push.push_id, push.clock, tuple(p.partition for p in push.parts)

        def take(answer: Answer) -> None:
            def pulled(outcome: Any) -> None:
                served = self.core.find_model(outcome.model) if isinstance(outcome, PullDone) else None
                too_early = isinstance(outcome, PsError) and outcome.code == "version_not_reached"
                if too_early or (served and not served.may_continue(indices, i.worker, i.epoch, clock)):
                    outcome = None
                answer(outcome)

            pull = PullReceived(
                push.model,
                indices,
                generation=push.generation,
                timeline=push.timeline,
                min_clock=clock + 1,
                wait_s=wait_s,
                request=self.number(pulled),
            )
            self.handle(pull)

        return self._request(source, f"commit {clock} {indices}", take)


def _no_contact() -> PsError:
    return problem("unavailable", "this shard has no contact with a scheduler or Redis")
