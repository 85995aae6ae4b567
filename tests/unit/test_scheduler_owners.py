"""Ownership under any order of joins, deaths, drains, takeovers and losses of Redis: nothing is owned twice or lost.

A shard is modeled by the partitions it holds, each with the number of pushes it has taken as its value.  There may be
two leaders at once, the older one not knowing that it was deposed.
"""

import copy
import json
from collections import deque
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paramserver.core.scheduler import io
from paramserver.core.scheduler.core import SchedulerCore
from paramserver.errors import FencedError, PsError

from .scheduling import SPEC

NAMES = ("s0", "s1", "s2")
PARTITIONS = 6


class Redis:
    """A model of Redis: the leaders' state, guarded by terms, and the partitions' snapshots, guarded by tokens."""

    def __init__(self) -> None:
        self.term = 0
        self.hash: dict[str, str] = {}
        self.tokens: dict[int, int] = {}
        self.fences: dict[str, int] = {}
        self.snapshots: dict[int, int] = {}
        self.newest: dict[int, int] = {}
        """The highest token that each partition has had."""
        self.before: dict[int, int] = {}
        """Token -> the token it replaced."""

    def write(self, term: int, store: io.Store) -> bool:
        """Write all of it at once and return True, or nothing and return False if the leader is deposed."""
        if term < self.term:
            return False
        for name, doc in store.fields.items():
            self.hash.pop(name, None)
            if doc is not None:
                self.hash[name] = json.dumps(doc)
        for key, token in store.tokens:
            assert token > self.newest.get(key.index, 0), "owner tokens only grow"
            self.before[token] = self.newest.get(key.index, 0)
            self.newest[key.index] = self.tokens[key.index] = token
        for shard, epoch in store.fences:
            self.fences[shard] = epoch
        return True


@dataclass
class Held:
    """One partition in a shard's memory."""

    token: int
    value: int
    release_number: int = 0
    stored: bool = False


@dataclass
class Holder:
    """One shard process."""

    name: str
    epoch: int
    leader: "Leader"
    feed: deque[Any] = field(default_factory=deque)
    memory: dict[int, Held] = field(default_factory=dict)
    term: int = 0

    def released(self) -> list[Any]:
        """Return the release reports of the partitions that it has stored for their new owners."""
        return [
            ["m", 1, i, h.token, h.value, h.release_number, 0]
            for i, h in self.memory.items()
            if h.release_number and h.stored
        ]


class Leader:
    """A scheduler that believes it leads."""

    def __init__(self, redis: Redis, now: float) -> None:
        redis.term += 1
        self.redis, self.term, self.stopped = redis, redis.term, False
        documents = {k: json.loads(v) for k, v in redis.hash.items()}
        self.core = SchedulerCore.restore(copy.deepcopy(documents), now, self.term)
        self.followers: list[Holder] = []
        self.requests = 0

    def do(self, make: Any, now: float) -> Any:
        """Handle an event; return its reply, if any.  A deposed leader sends only replies that wait for no write."""
        self.requests += 1
        event = make(self.requests)
        effects = self.core.handle(event, now)
        store = next((e for e in effects if isinstance(e, io.Store)), None)
        reply = None
        for effect in effects:
            if isinstance(effect, io.Reply) and effect.request == self.requests and not effect.waits:
                reply = effect.outcome
        if store is not None and not self.redis.write(self.term, store):
            self.stopped = True
            return reply
        for effect in effects:
            if isinstance(effect, io.Publish) and effect.document["type"] in ("model", "map"):
                for follower in self.followers:
                    follower.feed.append(effect.document)
            elif isinstance(effect, io.Reply) and effect.request == self.requests:
                reply = effect.outcome
        return reply


class Owners(RuleBasedStateMachine):
    """Up to three shards, six partitions, a leader, and perhaps a deposed one that still believes it leads."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.redis = Redis()
        self.leader = Leader(self.redis, self.now)
        self.leaders = [self.leader]
        self.shards: dict[str, Holder] = {}
        self.floor = dict.fromkeys(range(PARTITIONS), 0)
        """The value that each partition must have."""
        self.broken: set[int] = set()
        """Tokens whose holder died; at `applied`, what it had not stored may be lost."""
        self.late: list[tuple[str, int, list[Any]]] = []
        """(shard, epoch, release reports) of heartbeats that arrive late."""
        self.mishaps = 4
        """How many more failures may happen; with too many, everything would restart before much has happened."""

    @initialize()
    def start(self) -> None:
        self._join("s0")
        spec = SPEC | {"partitions": PARTITIONS}
        self.leader.do(lambda n: io.CreateModel(n, spec, "x"), self.now)
        self._join("s1")
        for _ in range(4):
            self.go_on(set(), True)

    # --- shards

    def _join(self, name: str) -> None:
        self._break(name)
        answer = self.leader.do(lambda n: io.JoinShard(n, name, ["http://x"]), self.now)
        assert isinstance(answer, dict)
        self.shards[name] = Holder(name, answer["epoch"], self.leader)
        self._follow(self.shards[name], self.leader)

    def _break(self, name: str) -> None:
        """Remove that shard; what it has in memory is lost."""
        shard = self.shards.pop(name, None)
        if shard is not None:
            self.broken |= {h.token for h in shard.memory.values()}
            for leader in self.leaders:
                leader.followers = [f for f in leader.followers if f is not shard]
        owners = json.loads(self.redis.hash["place:m"])["owners"] if "place:m" in self.redis.hash else []
        self.broken |= {row[1] for row in owners if row[0] == name}

    def _follow(self, shard: Holder, leader: Leader) -> None:
        for other in self.leaders:
            other.followers = [f for f in other.followers if f is not shard]
        shard.leader, shard.feed = leader, deque()
        answer = leader.do(lambda n: io.OpenFeed(n, shard.name, shard.epoch), self.now)
        if isinstance(answer, dict):
            leader.followers.append(shard)
            shard.feed.extend(answer["documents"])
        elif isinstance(answer, FencedError) and leader is self.leader:
            self._join(shard.name)

    def _take(self, shard: Holder) -> None:
        """Process one document of the shard's feed."""
        doc = shard.feed.popleft()
        if doc["term"] < shard.term:
            return
        shard.term = doc["term"]
        if doc["type"] != "model":
            return
        for i, (owner, token, *options) in enumerate(doc["owners"]):
            self._own(shard, i, owner, token, options[0] if options else {}, doc["source"])

    def _own(self, shard: Holder, i: int, owner: str | None, token: int, options: Any, source: str) -> None:
        held = shard.memory.get(i)
        if owner != shard.name:
            shard.memory.pop(i, None)
            return
        if held is not None and token > held.token:
            if options.get("from") and options["from"] <= held.token:
                held.token, held.stored = token, False
                self.redis.snapshots[i] = held.value if self._may_store(i, token) else self.redis.snapshots.get(i, 0)
            else:
                held = None
        if held is None:
            held = shard.memory[i] = Held(token, self._load(i, token, options.get("source", source)))
        if held.release_number != options.get("release", 0):
            held.release_number, held.stored = options.get("release", 0), False

    def _may_store(self, i: int, token: int) -> bool:
        return self.redis.tokens.get(i) == token

    def _load(self, i: int, token: int, source: str) -> int:
        value = self.redis.snapshots.get(i, 0) if source == "snapshot" else 0
        before, lost = token, False
        while before and not lost:
            lost, before = before in self.broken, self.redis.before.get(before, 0)
        if lost:
            self.floor[i] = min(self.floor[i], value)
        assert value == self.floor[i], f"partition {i} had {self.floor[i]} pushes and is found with {value}"
        return value

    def _beat(self, shard: Holder) -> None:
        rows = [["m", 1, i, h.token, h.value, h.value, 0, 0, 0, 0] for i, h in shard.memory.items()]
        released = shard.released()
        made = lambda n: io.ShardHeartbeat(n, shard.name, shard.epoch, {}, rows, (), released)  # noqa: E731
        answer = shard.leader.do(made, self.now)
        if isinstance(answer, PsError) and shard.leader is self.leader:
            self._join(shard.name)

    # --- rules

    def some(self, data: st.DataObject) -> Holder:
        return self.shards[data.draw(st.sampled_from(sorted(self.shards)))]

    @precondition(lambda self: self.mishaps)
    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        """A new shard joins, or one that was killed restarts at once."""
        self.mishaps -= 1
        self._join(name)

    @precondition(lambda self: self.mishaps and self.shards)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        self.mishaps -= 1
        self._break(self.some(data).name)

    @precondition(lambda self: self.shards)
    @rule(data=st.data(), state=st.sampled_from(["active", "draining"]))
    def set_state(self, data: st.DataObject, state: str) -> None:
        name = self.some(data).name
        self.leader.do(lambda n: io.SetShardState(n, name, state), self.now)

    @precondition(lambda self: self.shards)
    @rule(data=st.data(), count=st.integers(1, 4))
    def hear(self, data: st.DataObject, count: int) -> None:
        """A shard reads more of its feed."""
        shard = self.some(data)
        for _ in range(min(count, len(shard.feed))):
            self._take(shard)

    @precondition(lambda self: self.shards)
    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        self._beat(self.some(data))

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def hear_what_was_said_long_ago(self, data: st.DataObject) -> None:
        """A late heartbeat arrives at the present leader."""
        name, epoch, released = self.late[data.draw(st.integers(0, len(self.late) - 1))]
        made = lambda n: io.ShardHeartbeat(n, name, epoch, {}, (), (), released)  # noqa: E731
        self.leader.do(made, self.now)

    @precondition(lambda self: self.shards)
    @rule(silent=st.sets(st.sampled_from(NAMES), max_size=2), hand_over=st.booleans())
    def go_on(self, silent: set[str], hand_over: bool) -> None:
        """All but silent shards read their feeds, take a push, store everything, and report that at once or late."""
        for shard in [s for n, s in self.shards.items() if n not in silent]:
            while shard.feed:
                self._take(shard)
            self._push(shard, 1)
            self._store(shard)
            if hand_over:
                self._beat(shard)
            else:
                self.late.append((shard.name, shard.epoch, shard.released()))

    @precondition(lambda self: self.shards)
    @rule(data=st.data(), count=st.integers(1, 3))
    def push(self, data: st.DataObject, count: int) -> None:
        self._push(self.some(data), count)

    def _push(self, shard: Holder, count: int) -> None:
        for i, h in shard.memory.items():
            fenced = self.redis.fences.get(shard.name, 0) >= shard.epoch
            if not h.release_number and not fenced and self.redis.tokens.get(i, h.token) == h.token:
                h.value += count
                self.floor[i] += count

    @precondition(lambda self: self.shards)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        """A shard stores snapshots of all its partitions, also of those to be handed over."""
        self._store(self.some(data))

    def _store(self, shard: Holder) -> None:
        for i, h in shard.memory.items():
            if self._may_store(i, h.token):
                self.redis.snapshots[i], h.stored = h.value, True

    @rule(seconds=st.sampled_from([0.5, 3.0]), silent=st.sets(st.sampled_from(NAMES), max_size=1))
    def wait(self, seconds: float, silent: set[str]) -> None:
        """Time passes with heartbeats of all but silent shards; one that is silent for long is declared dead."""
        self._wait(seconds, silent)

    def _wait(self, seconds: float, silent: set[str]) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for name in [n for n in self.shards if n not in silent]:
                if name in self.shards:
                    self._beat(self.shards[name])
            for leader in self.leaders:
                if not leader.stopped:
                    leader.do(lambda n: io.Tick(), self.now)
            for name, shard in list(self.shards.items()):
                if self.redis.fences.get(name, 0) >= shard.epoch:
                    self._break(name)

    @rule()
    def redis_is_away_for_a_moment(self) -> None:
        """Redis is away: release requests are withdrawn, and made again afterwards."""
        for reason in ("away", ""):
            self.leader.do(lambda n, reason=reason: io.StorageChanged(reason), self.now)

    @precondition(lambda self: self.mishaps)
    @rule(known=st.booleans())
    def take_over(self, known: bool) -> None:
        """Another scheduler takes over; the old one is dead (`known`), or has not noticed."""
        self.mishaps -= 1
        old, self.leader = self.leader, Leader(self.redis, self.now)
        self.leaders = [self.leader] if known else [self.leader, old]
        for shard in list(self.shards.values()):
            if known:
                self._follow(shard, self.leader)

    @precondition(lambda self: self.shards)
    @rule(data=st.data())
    def connect_anew(self, data: st.DataObject) -> None:
        """A shard's feed breaks, and it connects to the leader or to the deposed one."""
        leader = data.draw(st.sampled_from([x for x in self.leaders if not x.stopped]))
        self._follow(self.some(data), leader)

    @precondition(lambda self: self.mishaps)
    @rule()
    def empty_redis(self) -> None:
        """Redis loses everything; what no live owner has in memory is lost."""
        self.mishaps -= 1
        term = self.redis.term
        holders = {(i, h.token) for s in self.shards.values() for i, h in s.memory.items()}
        self.broken |= {t for i, t in self.redis.tokens.items() if (i, t) not in holders}
        newest, before = self.redis.newest, self.redis.before
        self.redis.__init__()  # type: ignore[misc]
        self.redis.term, self.redis.newest, self.redis.before = term + 1, newest, before
        self.leader.term = term + 1
        self.leaders = [self.leader]
        self.leader.do(lambda n: io.RedisEmptied(term + 1), self.now)
        for shard in list(self.shards.values()):
            if shard.leader is not self.leader:
                self._follow(shard, self.leader)

    # --- invariants

    @invariant()
    def at_most_one_shard_can_store_a_partition(self) -> None:
        for i, token in self.redis.tokens.items():
            able = [s.name for s in self.shards.values() if i in s.memory and s.memory[i].token == token]
            assert len(able) <= 1, f"partition {i} is in the memory of {able}"

    @invariant()
    def every_partition_has_the_owner_whose_token_is_stored(self) -> None:
        if not self.leader.core.read.models():
            return
        live = {s["name"] for s in self.leader.core.read.shards(self.now) if s["alive"]}
        for p in self.leader.core.read.model("m")["partitions"]:
            # Shards that stopped together are waited for, at most `GATHER_MAX_S`, before anything is placed.
            gathering = isfinite(self.leader.core._shards.placement._since_s)
            assert p["shard"] in live or (p["shard"] is None and (not live or gathering))
            if p["shard"] is not None:
                assert self.redis.tokens[p["index"]] == p["incarnation"]

    def teardown(self) -> None:
        """Without failures the cluster settles: no moves are left, all is served, evenly owned and has its value."""
        if not self.leader.core.read.models():
            return
        self.leaders = [self.leader]
        for name in NAMES:
            if name not in self.shards:
                self._join(name)
            shard = self.shards[name]
            self._follow(shard, self.leader)
        for _ in range(90):
            for shard in list(self.shards.values()):
                while shard.feed:
                    self._take(shard)
                self._store(shard)
            self._wait(0.5, set())
        model, lines = self.leader.core.read.model("m"), self.leader.core.read.shards(self.now)
        assert model["served"]
        active = [s for s in lines if s["state"] == "active"]
        assert not any(s["moves"] for s in lines)
        if active:  # otherwise all are draining, and no shard takes partitions
            assert max(s["partitions"] for s in active) <= -(-PARTITIONS // len(active))
            assert not any(s["partitions"] for s in lines if s["state"] == "draining")
        for p in model["partitions"]:
            assert self.shards[p["shard"]].memory[p["index"]].value == self.floor[p["index"]]


TestOwners = Owners.TestCase
TestOwners.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
