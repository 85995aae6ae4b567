"""Simulated nodes around the real cores: what Redis keeps, a scheduler, a shard; each may die after any effect."""

from collections.abc import Callable, Mapping
from typing import Any

from paramserver.core import scheduler_io as io
from paramserver.core import shard_io as sio
from paramserver.core.layout import Layout
from paramserver.core.scheduler import SchedulerCore
from paramserver.core.shard import ShardCore
from paramserver.core.spec import ModelSpec
from paramserver.errors import NotFoundError, PsError, problem
from paramserver.testing.shard_driver import SnapshotShelf, perform
from paramserver.testing.world import Answer, Call, World
from paramserver.types import ModelKey, PartitionKey


class SimRedis:
    """What outlives every crash: the scheduler's fields, the owner tokens and the snapshots."""

    def __init__(self) -> None:
        self.term = 0
        self.state: dict[str, Any] = {}
        self.tokens: dict[PartitionKey, int] = {}
        self.shelf = SnapshotShelf()

    def store(self, term: int, fields: Mapping[str, Any]) -> bool:
        """Write fields if the term is still the newest."""
        if term < self.term:
            return False
        for name, value in fields.items():
            if value is None:
                self.state.pop(name, None)
            else:
                self.state[name] = value
        return True


class Node:
    """A process: it performs effects one after the other, and may die after each."""

    def __init__(self, world: World, name: str, *, crashes: bool = True) -> None:
        self.world, self.name, self.crashes = world, name, crashes
        self.up = False
        self.deaths = 0
        self._free_at = 0.0
        self._numbers = 0
        self._waiting: dict[int, Answer] = {}

    def start(self) -> None:
        """Begin anew, with nothing but what Redis holds."""
        raise NotImplementedError

    def crash(self) -> None:
        """Die now; start again after a while."""
        self.up = False
        self.deaths += 1
        self._waiting.clear()
        self._free_at = 0.0
        self.world.after(self.world.rng.uniform(*self.world.faults.down_s), f"start {self.name}", self.start)

    def later(self, delay_s: float, what: str, action: Callable[[], None]) -> None:
        """Do something later, unless this process has died by then."""
        life = self.deaths

        def act() -> None:
            if self.up and self.deaths == life:
                action()

        self.world.after(delay_s, f"{self.name}: {what}", act)

    def in_turn(self, what: str, action: Callable[[], None]) -> None:
        """Do something after everything that is to be done before it; the process may die right after."""

        def act() -> None:
            action()
            if self.crashes and self.up and self.world.chance(self.world.faults.crash):
                self.crash()

        self._free_at = max(self._free_at, self.world.now) + self.world.rng.uniform(1e-5, 2e-3)
        self.later(self._free_at - self.world.now, what, act)

    def number(self, answer: Answer) -> int:
        """A number for a request whose outcome goes to `answer`."""
        self._numbers += 1
        self._waiting[self._numbers] = answer
        return self._numbers

    def answer(self, request: int, outcome: Any) -> None:
        """The outcome of a request."""
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            waiting(outcome)


class SimScheduler(Node):
    """The scheduler's core over simulated Redis."""

    def __init__(self, world: World, redis: SimRedis) -> None:
        super().__init__(world, "scheduler")
        self.redis = redis
        self.commits: dict[tuple[int, int, int], Any] = {}
        """(generation, timeline, t) -> list, as published: never two lists for one commit."""

    def start(self) -> None:
        """Read everything back under a new term."""
        self.redis.term += 1
        self.term = self.redis.term
        self.core = SchedulerCore.restore(self.redis.state, self.world.now, self.term)
        self.feeds: dict[str, Callable[[Mapping[str, Any]], None]] = {}
        self.up = True
        self._tick()

    def _tick(self) -> None:
        self.handle(io.Tick())
        self.later(0.25, "tick", self._tick)

    def handle(self, event: io.Event) -> None:
        """One event, and its effects in their order."""
        for effect in self.core.handle(event, self.world.now):
            self.in_turn(type(effect).__name__, lambda effect=effect: self._perform(effect))  # type: ignore[misc]

    def _perform(self, effect: io.Effect) -> None:
        match effect:
            case io.Store(fields):
                if not self.redis.store(self.term, fields):
                    self.crash()
            case io.SetTokens(tokens):
                for key, token in tokens:
                    self.redis.tokens[key] = token
            case io.Publish(document):
                self._seen(document)
                for feed in list(self.feeds.values()):
                    feed(document)
            case io.Reply(request, outcome):
                self.answer(request, outcome)
            case _:
                raise AssertionError(f"the simulation has no {effect}")

    def _seen(self, document: Mapping[str, Any]) -> None:
        if document["type"] == "commit":
            key = (document["generation"], document["timeline"], document["t"])
            before = self.commits.setdefault(key, document["contributions"])
            assert before == document["contributions"], f"commit {key} was published with two lists"

    def ask(self, make: Callable[[int], io.Event]) -> Call:
        """A request to the scheduler."""

        def deliver(answer: Answer) -> None:
            if self.up:
                self.handle(make(self.number(answer)))

        return Call(f"scheduler {make(0).__class__.__name__}", deliver)

    def model(self, name: str) -> Call:
        """A request for the model's document: its owners and where it stands."""

        def deliver(answer: Answer) -> None:
            if self.up:
                try:
                    answer(self.core.read.model(name))
                except PsError as e:
                    answer(e)

        return Call(f"scheduler GET {name}", deliver)


class SimShard(Node):
    """A shard's core with its feed, its heartbeats and its snapshots."""

    def __init__(self, world: World, name: str, redis: SimRedis, scheduler: SimScheduler, *, crashes: bool) -> None:
        super().__init__(world, name, crashes=crashes)
        self.redis, self.scheduler = redis, scheduler

    def start(self) -> None:
        """Join with nothing owned."""
        self.core = ShardCore()
        self.epoch = 0
        self.views: dict[str, sio.ModelView] = {}
        self.layouts: dict[ModelKey, Layout] = {}
        self._stream = 0
        self._stream_at = 0.0
        self.up = True
        self._join()

    def _join(self) -> None:
        self.epoch = 0
        self._stream += 1
        joined = self.scheduler.ask(lambda r: io.JoinShard(r, self.name, [f"http://{self.name}"]))
        life = self.deaths

        def answered(outcome: Any) -> None:
            if not self.up or life != self.deaths:
                return
            if isinstance(outcome, PsError):
                self._join()
                return
            self.epoch = outcome["epoch"]
            self._heartbeat(self.epoch)
            self._follow()

        self.world.send(joined, answered)

    def _heartbeat(self, epoch: int, *, again: bool = True) -> None:
        if not self.epoch or epoch != self.epoch:
            return
        partitions = [list(p) for p in self.core.partitions()]
        cuts = [list(c) for c in self.core.cuts()]
        released = [list(r) for r in self.core.released()]
        beat = self.scheduler.ask(lambda r: io.ShardHeartbeat(r, self.name, epoch, {}, partitions, cuts, released))

        def answered(outcome: Any) -> None:
            if self.up and epoch == self.epoch and isinstance(outcome, PsError) and outcome.code in _REJOIN:
                for view in list(self.views.values()):
                    self._view(sio.ModelView(**{f: getattr(view, f) for f in view.__slots__} | {"owned": {}}))
                self._join()

        self.world.send(beat, answered)
        if again:
            self.later(1.0, "heartbeat", lambda: self._heartbeat(epoch))

    def _follow(self) -> None:
        """Open the feed: documents come in order until it is cut; then open it again."""
        self._stream += 1
        stream, epoch, life = self._stream, self.epoch, self.deaths

        def alive() -> bool:
            return self.up and life == self.deaths and stream == self._stream and epoch == self.epoch

        def document(doc: Mapping[str, Any]) -> None:
            if not alive():
                return
            if self.world.chance(self.world.faults.feed_cut):
                self.later(0.3, "feed again", self._follow)
                self._stream += 1
                return
            self._stream_at = max(self._stream_at, self.world.now + self.world.delay())
            self.later(
                self._stream_at - self.world.now, f"feed {doc['type']}", lambda: self._take(doc) if alive() else None
            )

        def deliver(answer: Answer) -> None:
            if not self.scheduler.up:
                return

            def opened(outcome: Any) -> None:
                if isinstance(outcome, PsError):
                    return
                self.scheduler.feeds[self.name] = document
                for doc in outcome["documents"]:
                    document(doc)

            self.scheduler.handle(io.OpenFeed(self.scheduler.number(opened), self.name, epoch))

        self.world.after(self.world.delay(), f"{self.name} opens its feed", lambda: deliver(lambda _: None))
        self._watch(stream, self.scheduler.deaths)

    def _watch(self, stream: int, deaths: int) -> None:
        """A feed whose scheduler has died, or that was never opened, is opened again."""

        def check() -> None:
            if stream != self._stream or not self.epoch:
                return
            if self.scheduler.deaths != deaths or self.scheduler.feeds.get(self.name) is None:
                self._follow()
            else:
                self._watch(stream, deaths)

        self.later(1.0, "feed check", check)

    def _take(self, doc: Mapping[str, Any]) -> None:
        match doc["type"]:
            case "map":
                self.handle(sio.MapChanged(doc["map_epoch"]))
            case "model":
                key = ModelKey(doc["name"], doc["generation"])
                spec = ModelSpec.parse(doc["spec"])
                layout = self.layouts.setdefault(key, Layout(spec))
                self._view(sio.ModelView.from_document(doc, self.name, spec, layout))
            case "commit":
                self.handle(sio.CommitDecided.from_document(doc, ModelKey(doc["model"], doc["generation"])))
            case "roster":
                workers = {w: (v[0], v[1]) for w, v in doc["workers"].items()}
                self.handle(sio.RosterChanged(ModelKey(doc["model"], doc["generation"]), workers, doc["live_workers"]))
            case "gone":
                self.handle(sio.ModelGone(ModelKey(doc["model"], doc["generation"])))

    def _view(self, view: sio.ModelView) -> None:
        self.views[view.model.name] = view
        self.handle(view)

    def handle(self, event: sio.Event) -> None:
        """One event, and its effects in their order."""
        for effect in self.core.handle(event, self.world.now):
            self.in_turn(type(effect).__name__, lambda effect=effect: self._perform(effect))  # type: ignore[misc]
        due = self.core.deadline(self.world.now)
        if due is not None:
            self.later(max(1e-4, due - self.world.now), "tick", lambda: self.handle(sio.Tick()))

    def _perform(self, effect: sio.Effect) -> None:
        slow = self.world.rng.uniform(1e-4, 0.05)
        match effect:
            case sio.Reply(request, outcome):
                self.answer(request, outcome)
            case sio.Apply(job, tasks):
                done = sio.Applied(job, tuple(perform(t) for t in tasks))
                self.later(slow, "applied", lambda: self.handle(done))
            case sio.LoadPartition(key, token):
                self.later(slow, "loaded", lambda: self.handle(self._load(effect, key, token)))
            case sio.StoreSnapshot(capture):
                self.later(slow, "stored", lambda: self.handle(self._store(effect, capture)))
            case sio.Report():
                self._heartbeat(self.epoch, again=False)
            case sio.Resync():
                self._follow()
            case sio.AskWorker(request, model, worker):
                self.later(slow, "asked", lambda: self.handle(self._ask(request, model, worker)))

    def _load(self, effect: sio.LoadPartition, key: PartitionKey, token: int) -> sio.Event:
        return sio.PartitionLoaded(key, token, self.redis.shelf.load(effect))

    def _store(self, effect: sio.StoreSnapshot, capture: sio.Capture) -> sio.Event:
        if self.redis.tokens.get(capture.key) != capture.token:
            return sio.SnapshotFailed(capture.key, capture.token, capture.version, effect.urgent)
        self.redis.shelf.save(effect)
        return sio.SnapshotStored(capture.key, capture.token, capture.version, effect.urgent)

    def _ask(self, request: int, model: ModelKey, worker: str) -> sio.Event:
        if not self.scheduler.up:
            return sio.WorkerAnswered(request, None, error=problem("no_leader", "the scheduler is down"))
        try:
            found = self.scheduler.core.read.worker(model.name, worker, self.world.now)
        except NotFoundError:
            return sio.WorkerAnswered(request, None)
        return sio.WorkerAnswered(request, int(found["epoch"]), int(found["rank"]), bool(found["alive"]))

    def ask(self, what: str, make: Callable[[int], sio.Event]) -> Call:
        """A request to this shard."""

        def deliver(answer: Answer) -> None:
            if self.up:
                self.handle(make(self.number(answer)))

        return Call(f"{self.name} {what}", deliver)


_REJOIN = ("fenced", "unknown_node")
