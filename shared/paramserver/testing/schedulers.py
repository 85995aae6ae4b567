"""A simulated scheduler: a standby until it gets the lease in Redis, then the leader until another one takes over."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paramserver.core.scheduler import io
from paramserver.core.scheduler.core import SchedulerCore
from paramserver.core.shard.effects import PulledPart
from paramserver.errors import PsError, problem
from paramserver.testing.contents import Contents
from paramserver.testing.nodes import Node
from paramserver.testing.storage import Number, SimRedis, Verdict
from paramserver.testing.world import Answer, Call, World
from paramserver.types import PartitionKey, Token

Document = Mapping[str, Any]
TICK_S = 0.5
RETRY_S = 0.25
EMPTIED_S = 10.0
"""Time that a leader has to refill an emptied Redis before a standby takes over without any state."""
ONCE = (io.JoinShard, io.StartRestore, io.RestoreFinished, io.DeleteModel, io.LeaseTask)
"""Events never delivered twice.  Restores are among them because the leading process does them without a network,
deletions because a late copy would delete the next model of that name, and requests for a task because a late copy
would free the one that the worker has got."""


@dataclass
class Ledger:
    """The commits that any scheduler has published; asserts that none has two lists of contributions."""

    commits: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    revisions: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """(generation, timeline, t) -> revision of the settings that the commit names."""
    made_s: dict[tuple[int, int, int], float] = field(default_factory=dict)
    """When each was published first."""
    restored: set[tuple[int, int]] = field(default_factory=set)
    """(generation, timeline) of those on which a restore has set anything."""
    contents: Contents = field(default_factory=Contents)
    begun: dict[Token, tuple[int, int]] = field(default_factory=dict)
    """Owner token -> (its timeline, the clock at which that began), as last published."""
    skipped: dict[tuple[int, int], float] = field(default_factory=dict)
    """(partition, timeline) -> by what its version is beyond its value, once state was lost that only Redis had."""

    def note(self, document: Document, now: float) -> None:
        """Record a published document.  A model's document includes commits, even those whose leader died before it
        could publish them."""
        for _, token, *_ in document.get("owners", ()):
            self.begun[token] = document["timeline"], document["began"]
        for commit in [document] if document["type"] == "commit" else document.get("commits", ()):
            key = (document["generation"], commit["timeline"], commit["t"])
            self.revisions[key] = commit["revision"]
            self.made_s.setdefault(key, now)
            before = self.commits.setdefault(key, commit["contributions"])
            assert before == commit["contributions"], f"commit {key} was published with two lists"

    def check_steps(self, part: PulledPart, value: float, lost: bool) -> None:
        """Assert that each version of a partition is one step; if state was `lost`, each since its timeline began."""
        (timeline, began), skipped = self.begun[part.incarnation], part.version - value
        what = f"partition {part.partition}: {value} after {part.version} commits"
        assert lost or not skipped, what
        if lost and part.version > began:
            before = self.skipped.setdefault((part.partition, timeline), skipped)
            assert skipped == before, f"{what}, and other ones on timeline {timeline}, which began at {began}"

    def sums(self, generation: int, timeline: int) -> int:
        """Return the number of commits of that timeline that have contributions."""
        return sum(at[:2] == (generation, timeline) and bool(listed) for at, listed in self.commits.items())

    def undone(self, generation: int) -> dict[int, float]:
        """Return clock -> for how long its timeline went on, of commits with contributions that were made again."""
        made = [at for at, listed in self.commits.items() if at[0] == generation and listed]
        again = {(line, t) for _, line, t in made if any(other[2] == t and other[1] > line for other in made)}
        end_s = {line: max(s for at, s in self.made_s.items() if at[1] == line) for line, _ in again}
        return {t: end_s[line] - self.made_s[generation, line, t] for line, t in again}


@dataclass
class _Batch:
    """What one event has decided, not stored yet, and the effects that wait for that."""

    fields: dict[str, Any] = field(default_factory=dict)
    tokens: dict[PartitionKey, Token] = field(default_factory=dict)
    fences: dict[str, int] = field(default_factory=dict)
    effects: list[io.Effect] = field(default_factory=list)


class SimScheduler(Node):
    """The scheduler's core over simulated Redis."""

    def __init__(self, world: World, name: str, redis: SimRedis, ledger: Ledger) -> None:
        super().__init__(world, name, redis)
        self.ledger = ledger
        self.leading = False
        self.seen_term = 0
        """The highest term it knows of; kept in memory only."""

    @property
    def leads(self) -> bool:
        """Whether it runs, and by its own knowledge leads."""
        return self.up and self.leading

    def start(self) -> None:
        """Start as a standby; once nobody leads, load the state from Redis and lead under a new term."""
        self.up, self.leading = True, False
        self.seen_term, self._missing_since_s = 0, None
        self._answered_s = (float("inf"), float("-inf"), 0.0)
        self._reset()
        self._beat(self.deaths)

    def _reset(self) -> None:
        self.feeds: dict[str, Callable[[Document], None]] = {}
        self._queue: deque[_Batch] = deque()
        self._writing = False
        self._refilling = False
        """Redis was emptied and is not refilled yet."""
        self._writes = 0
        self._acknowledged: Number = (0, 0)
        """Number of the newest write of this term that Redis has acknowledged."""
        self._storage_down = False
        self._confirmed = True
        """Whether its lease has been renewed since its last pause."""
        self._deferred: list[Callable[[], None]] = []

    # --- the lease

    _missing_since_s: float | None
    _answered_s: tuple[float, float, float]
    """(since when Redis has answered without a gap, when it last answered, until when it then had the lease)."""

    def _beat(self, life: int) -> None:
        if life != self.deaths:
            return
        self.later(1.0 if self.leading else 0.5, "lease", lambda: self._beat(life))
        if self.leading:
            self._renew()
            return
        patient = self._missing_since_s is None or self.world.now - self._missing_since_s < EMPTIED_S
        seen, answered_s = self.seen_term, self._answered_s

        def work(redis: SimRedis) -> Any:
            lease_s = redis.lease_until_s
            return redis.term, lease_s, redis.acquire_lease(self.name, seen, patient, answered_s, self.world.now)

        self.ask_redis("take", work, self._lease_answered)

    def _lease_answered(self, answer: Any) -> None:
        if answer is None or self.leading:
            return
        term, lease_s, outcome = answer
        since_s, last_s, before_s = self._answered_s
        gapless = self.world.now - last_s <= 2.0 and lease_s >= before_s
        self._answered_s = (since_s if gapless else self.world.now, self.world.now, lease_s)
        if isinstance(outcome, str):
            if term < self.seen_term and self._missing_since_s is None:
                self._missing_since_s = self.world.now
            elif term >= self.seen_term:
                self.seen_term, self._missing_since_s = term, None
            return
        self._reset()
        self.leading = True
        self.term, fields = outcome
        self.seen_term = self.term
        self.core = SchedulerCore.restore(fields, self.world.now, self.term)
        self._tick(self.term)

    def _renew(self) -> None:
        term = self.term

        def renewed(answer: tuple[Verdict, int] | None) -> None:
            if not self.leading or term != self.term:
                return
            if answer is None:
                self._storage("no answer to a renewal")
                return
            verdict, known = answer
            self.seen_term = max(self.seen_term, known)
            if verdict is Verdict.FENCED:
                self._step_down()
                return
            self._confirmed = True
            self._storage("")
            if verdict is Verdict.EMPTIED:
                self._data_lost()
            deferred, self._deferred = self._deferred, []
            for action in deferred:
                action()

        acknowledged = self._acknowledged
        self.ask_redis("renew", lambda redis: redis.renew(self.name, term, acknowledged, self.world.now), renewed)

    def _data_lost(self) -> None:
        """Begin a new term, in which everything is written again."""
        if not self._refilling:
            self._refilling = True
            self._writes, self._acknowledged = 0, (0, 0)
            self.term = self.seen_term = self.term + 1
            self._tick(self.term)
            self.handle(io.RedisEmptied(self.term, {key for batch in self._queue for key in batch.tokens}))

    def _step_down(self) -> None:
        self.leading = False
        for request in list(self._waiting):
            self.answer(request, _no_leader())
        self._reset()

    def pause(self, seconds: float) -> None:
        """Pause; afterwards, renew the lease before answering anything."""
        super().pause(seconds)
        self.later(0.0, "was paused", self._recheck_lease)

    def _recheck_lease(self) -> None:
        if self.leading:
            self._confirmed = False
            self._renew()

    def _storage(self, reason: str) -> None:
        if self._storage_down != bool(reason):
            self._storage_down = bool(reason)
            self.handle(io.StorageChanged(reason))

    # --- events and effects

    def _tick(self, term: int) -> None:
        if self.leading and term == self.term:
            self.handle(io.Tick())
            for feed in list(self.feeds.values()):
                feed({"type": "ping", "term": self.term})
            self.later(TICK_S, "tick", lambda: self._tick(term))

    def handle(self, event: io.Event) -> None:
        """Handle one event; effects are performed once its decisions are stored, except replies that need not wait."""
        if not self._confirmed:
            self._deferred.append(lambda: self.handle(event))
            return
        batch = _Batch()
        for effect in self.core.handle(event, self.world.now):
            match effect:
                case io.Store(fields, tokens, fences):
                    batch.fields.update(fields)
                    batch.tokens.update(tokens)
                    batch.fences.update(fences)
                case io.Reply(waits=False):
                    self._do(effect)
                case _:
                    batch.effects.append(effect)
        decided = batch.fields or batch.tokens or batch.fences
        if decided or (self._queue and batch.effects):
            self._queue.append(batch)
            self._write()
        else:
            for effect in batch.effects:
                self._do(effect)

    def _write(self) -> None:
        if self._writing or not self._queue:
            return
        self._writing = True
        term, queue, count, full = self.term, self._queue, len(self._queue), self._refilling
        self._writes += 1
        number, acknowledged = (term, self._writes), self._acknowledged
        merged = _Batch()
        for batch in self._queue:
            merged.fields.update(batch.fields)
            merged.tokens.update(batch.tokens)
            merged.fences.update(batch.fences)

        def written(verdict: Verdict | None) -> None:
            if queue is not self._queue:
                return  # from an earlier term as leader
            if verdict is Verdict.FENCED and term == self.term:
                self._step_down()
            elif verdict is not Verdict.DONE:
                if verdict is None:
                    self._storage("no answer to a write")
                self._writing = False
                if verdict is Verdict.EMPTIED and term == self.term:
                    self._data_lost()
                self.later(RETRY_S, "write again", self._write)
            else:
                for _ in range(count):
                    for effect in queue.popleft().effects:
                        self._do(effect)
                self._writing = False
                self._refilling &= not full
                if term == self.term:
                    self._acknowledged = number
                self._storage("")
                self._write()

        changes = merged.fields, merged.tokens, merged.fences
        work = lambda redis: redis.write(self.name, number, acknowledged, *changes, full)  # noqa: E731
        self.ask_redis("write", work, written)

    def _do(self, effect: io.Effect) -> None:
        term = self.term
        self.in_turn(
            type(effect).__name__, lambda: self._perform(effect) if self.leading and term <= self.term else None
        )

    def _perform(self, effect: io.Effect) -> None:
        match effect:
            case io.Publish(document):
                self.ledger.note(document, self.world.now)
                for feed in list(self.feeds.values()):
                    feed(document)
            case io.Reply(request, outcome):
                if isinstance(outcome, Mapping):
                    for document in outcome.get("documents", ()):
                        self.ledger.note(document, self.world.now)
                self.answer(request, outcome)
            case io.WriteCheckpoint(model, name):
                # Files are not simulated: a checkpoint only serves to request a cut.
                self.handle(io.CheckpointFailed(model, name, problem("storage_unavailable", "there is no disk")))
            case io.ForgetOthers():
                self._forget(effect, self.term)
            case _:
                raise AssertionError(f"the simulation has no {effect}")

    def _forget(self, effect: io.ForgetOthers, term: int) -> None:
        def forgotten(done: bool | None) -> None:
            if not done and self.leading and self.term == term:  # a new term begins by doing this itself
                self.later(RETRY_S, "forget again", lambda: self._forget(effect, term))

        self.ask_redis("forget", lambda redis: redis.forget(effect.concerns), forgotten)

    # --- requests

    def ask(self, source: str, make: Callable[[int], io.Event]) -> Call:
        """Return a request to this scheduler."""

        def take(answer: Answer) -> None:
            if self.leading:
                self.handle(make(self.number(answer)))
            else:
                answer(_no_leader())

        what = make(0)
        return self.call(type(what).__name__, source, take, once=isinstance(what, ONCE))

    def tell(self, source: str, event: io.Event) -> Call:
        """Return a message to this scheduler whose event has no outcome."""

        def take(answer: Answer) -> None:
            if self.leading:
                self.handle(event)
            answer(None)

        return self.call(type(event).__name__, source, take)

    def query(self, source: str, what: str, read: Callable[[SchedulerCore], Any]) -> Call:
        """Return a read-only request."""

        def take(answer: Answer) -> None:
            if not self.leading or not self._confirmed:
                answer(_no_leader())
                return
            try:
                answer(read(self.core))
            except PsError as e:
                answer(e)

        return self.call(what, source, take)


def _no_leader() -> PsError:
    return problem("no_leader", "this scheduler does not lead")
