"""The leader's lease and the list of running schedulers, in Redis.

Keys: `ps:leader` (JSON with id, place, url, term and, by Redis' clock, the time of the last renewal, 0 once released),
`ps:term` (number of leaderships; each write of a leader names its term, so a deposed leader writes nothing),
`ps:schedulers` (place -> JSON with name, url and the time it was last seen).  A place is a name, a host name and the
address listened on.  Only one process can be there, so a scheduler that finds the lease held by its own place takes it
at once.

A lease that was not renewed for 3 s is taken over only by a scheduler that has been getting answers from Redis for
1.5 s: after an outage of Redis the leader can renew its lease before another takes it.  This time begins anew if the
lease was seen with a later renewal before: Redis has come back with older data, which only the leader can make up for.
A renewal that lies in the future, because the clock of Redis' machine was put back, is like an old one.

A leader may reach Redis and be cut off from everyone else.  When it has heard of no shard for 3 s, directly or through
a standby, it says so as it renews, and a standby that hears of one, and did before that, takes over.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from paramserver import limits
from paramserver.errors import PsError, problem
from paramserver_node.redis import AWAY, LEADER_KEY, TERM_KEY, leave_after, no_state, stop_if_cancelled, trouble

SCHEDULERS_KEY: Final = "ps:schedulers"
WRITTEN_KEY: Final = "ps:written"
_NEVER_MS: Final = 1 << 53
TIMEOUT_S: Final = 1.0
"""Timeout of a request to Redis, short enough to retry it within a lease."""
DEAF_S: Final = 3.0
"""A leader that has heard of no shard for this long lets a standby take over that hears of one."""
HEARS_S: Final = 2.0
"""Hearing ends with a silence of this length, which is shorter: if all shards die, no standby hears them longer."""

# KEYS: leader, term, schedulers, written.  ARGV: place, url, name, id, lease in ms, then the script's own arguments.
# Sets `others`: all schedulers seen in the last 10 s, as JSON.
_LIST_SCHEDULERS: Final = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
redis.call('HSET', KEYS[3], ARGV[1], cjson.encode({url = ARGV[2], name = ARGV[3], seen = now}))
local held, others = redis.call('HGETALL', KEYS[3]), {}
for i = 1, #held, 2 do
  if math.abs(now - cjson.decode(held[i + 1]).seen) > 10000 then
    redis.call('HDEL', KEYS[3], held[i])
  else
    local other = cjson.decode(held[i + 1])
    others[#others + 1] = cjson.encode({name = other.name, url = other.url, age = now - other.seen})
  end
end
local function lead(term, deaf)
  local lease = cjson.encode({id = ARGV[4], place = ARGV[1], url = ARGV[2], term = term, renewed = now, deaf = deaf})
  redis.call('SET', KEYS[1], lease)
  return lease
end
local term = tonumber(redis.call('GET', KEYS[2]) or '0')
local leader = redis.call('GET', KEYS[1])
"""

# ARGV 6: highest known term, 7: '1' to lead even if Redis has lost that term, 8: '1' if Redis must hold a state,
# 9 and 10: since when Redis has answered this scheduler without a gap, and when it last did, 11: for how many ms it has
# been hearing of shards, 12: the renewal that it saw last.  What a standby hears it forwards, so a leader that says it
# hears nothing half a second after the standby began to hear is cut off from both.
_ACQUIRE: Final = (
    _LIST_SCHEDULERS
    + """
local free = not leader
if leader then
  local held = cjson.decode(leader)
  local watched = now - tonumber(ARGV[9]) >= 1500 and now - tonumber(ARGV[10]) <= 2000
    and held.renewed >= tonumber(ARGV[12])
  free = held.place == ARGV[1] or held.renewed == 0 or (watched and math.abs(now - held.renewed) > tonumber(ARGV[5]))
    or (held.deaf and held.renewed - (now - tonumber(ARGV[11])) > 500)
end
local known = tonumber(ARGV[6])
if free and (term >= known or ARGV[7] == '1') and not (term == 0 and ARGV[8] == '1') then
  term = math.max(term, known) + 1
  redis.call('SET', KEYS[2], string.format('%.0f', term))
  return {1, string.format('%.0f', term), lead(term), others, now}
end
return {0, string.format('%.0f', term), leader or '', others, now}
"""
)

# Two schedulers can come to the same term: one that must still write its state again counts it in memory, and one that
# found Redis empty begins at 1.  Such a term belongs to whoever has the lease, unless Redis has acknowledged a write of
# the other one in it: Redis has then lost that, and the other one still has the whole state.
OTHER_HOLDER: Final = """
local function other_holder(leader, id, mine, written)
  local held = leader and cjson.decode(leader)
  if not held or held.id == id or held.term < mine then return 1 end
  return (held.term > mine or written == '') and 0 or -1
end
"""

# ARGV 6: the term led, 7: number of the newest write that Redis has acknowledged, 8: '1' if it hears of no shard.
# Returns 1: renewed, 0: there is a newer leader, -1: Redis has lost the term (it was emptied) or that write (it came
# back with older data).
_RENEW: Final = (
    OTHER_HOLDER
    + _LIST_SCHEDULERS
    + """
local mine = tonumber(ARGV[6])
local standing = term > mine and 0 or other_holder(leader, ARGV[4], mine, ARGV[7])
if standing < 1 then return {standing, leader or '', others} end
leader = lead(mine, ARGV[8] == '1' or nil)
if term < mine or (redis.call('GET', KEYS[4]) or '') < ARGV[7] then return {-1, leader, others} end
return {1, leader, others}
"""
)

_RELEASE: Final = """
local leader = redis.call('GET', KEYS[1])
local held = leader and cjson.decode(leader)
if held and held.id == ARGV[2] then
  held.renewed = 0
  redis.call('SET', KEYS[1], cjson.encode(held))
end
redis.call('HDEL', KEYS[3], ARGV[1])
return 1
"""


class Deposed(Exception):
    """Raised when a newer scheduler leads on this Redis: this one must stop deciding."""


class RedisDataLost(Exception):
    """Raised when Redis has lost some or all writes of this term: the whole state must be written again."""


@dataclass(frozen=True, slots=True)
class Leader:
    """The holder of the lease."""

    id: str
    place: str
    url: str
    term: int


@dataclass(frozen=True, slots=True)
class Scheduler:
    """A running scheduler, leader or standby."""

    name: str
    url: str
    age_s: float = 0.0
    """Time since it was last seen, as of the last answer from Redis."""


class Lease:
    """One scheduler's part in the election.  Methods raise Unavailable (`storage_unavailable`) if Redis is away."""

    def __init__(self, redis: Redis, *, name: str, place: str, url: str, expect_state: bool = False) -> None:
        self.url = url
        self.name = name
        self.place = place
        self.id = secrets.token_hex(8)
        self._identity = (place, url, name, self.id, int(limits.LEADER_LEASE_S * 1000))
        self.term = 0
        """The term this scheduler leads, or last led."""
        self.written = ""
        """Number of the newest write of this term that Redis has acknowledged."""
        self.known_term = 0
        """The highest term seen."""
        self.emptied = False
        """Whether Redis had lost the known term at the last `try_acquire`."""
        self.leader: Leader | None = None
        """The holder of the lease as of the last answer from Redis."""
        self._new_leader = asyncio.Event()
        self._heard_s = self._hears_since_s = float("-inf")
        """When the last request of a shard came, directly or through another scheduler, and since when they come."""
        self._answered_ms = (_NEVER_MS, 0)
        """Since when Redis has answered without a gap, and when it last did; by Redis' clock."""
        self._renewed_ms = 0
        """The last renewal of the lease when this scheduler last saw it; by Redis' clock."""
        self.redis_away = ""
        """Why the last request to Redis failed; empty if it did not."""
        self.schedulers: tuple[Scheduler, ...] = (Scheduler(name, url),)
        """All schedulers seen within the 10 s before the last answer from Redis, by name."""
        self._expect_state = expect_state
        self._redis = redis
        self._acquire_script = redis.register_script(_ACQUIRE)
        self._renew_script = redis.register_script(_RENEW)
        self._release_script = redis.register_script(_RELEASE)

    async def try_acquire(self, *, even_if_emptied: bool = False) -> bool:
        """Take the lease if it is free, and note who leads; True if this scheduler now leads, in the new `term`.

        If Redis has lost the known term, the lease is left to the leader, which still has the state in memory, unless
        `even_if_emptied`.  Raises CorruptState if there is no state although one is expected.
        """
        hears_s = monotonic() - self._hears_since_s if self._heard_ago_s() < HEARS_S else 0.0
        before_ms = self._renewed_ms
        since = (*self._answered_ms, int(hears_s * 1000), before_ms)
        flags = [self.known_term, int(even_if_emptied), int(self._expect_state), *since]
        won, term, leader, others, now_ms = await self._run(self._acquire_script, *self._identity, *flags)
        since_ms, last_ms = self._answered_ms
        self.emptied = int(term) < self.known_term
        self.known_term = max(self.known_term, int(term))
        self._note(leader, others)
        gapless = 0 <= now_ms - last_ms <= 2000 and self._renewed_ms >= before_ms
        self._answered_ms = (since_ms if gapless else now_ms, now_ms)
        if won:
            self.term, self.written = int(term), ""
            self.hear()
        elif self._expect_state and not self.known_term:
            raise no_state()
        return bool(won)

    async def renew(self) -> None:
        """Renew the lease for 3 s.

        Raises Deposed, or RedisDataLost: the lease is renewed all the same, unless a scheduler that has begun on the
        emptied Redis holds it in this term.
        """
        term = self.term
        state = (term, self.written, int(self._heard_ago_s() > DEAF_S))
        done, leader, others = await self._run(self._renew_script, *self._identity, *state)
        self._note(leader, others)
        if term == self.term:  # else the answer is about a term that this scheduler itself has ended meanwhile
            self.check(done)

    def hear(self) -> None:
        """Note that a shard has asked for something."""
        now = monotonic()
        if self._heard_ago_s() > HEARS_S:
            self._hears_since_s = now
        self._heard_s = now

    def _heard_ago_s(self) -> float:
        return monotonic() - self._heard_s

    def check(self, done: int) -> None:
        """Raise what a script's answer says of this term: Deposed for 0, RedisDataLost for -1, nothing for 1."""
        if done == 0:
            raise Deposed(f"a newer scheduler than term {self.term} leads")
        if done < 0:
            raise RedisDataLost(f"Redis has lost term {self.term}, or the end of what was written in it")

    async def release(self) -> None:
        """Release the lease and leave the list of schedulers, so that another can lead at once."""
        await self._run(self._release_script, self.place, self.id)

    async def wait_for_successor(self, leader: Leader) -> None:
        """Wait until another holder of the lease than `leader` is known."""
        while self.leader is None or self.leader.id == leader.id:
            await self._new_leader.wait()

    def deposed_by(self, term: int) -> bool:
        """Whether another scheduler that leads in that term replaces this one, which may not have reached Redis since.

        In its own term it does, unless Redis has acknowledged a write of this one in it, and so has lost that.
        """
        return term > self.term or (term == self.term and not self.written)

    def document(self) -> str:
        """The value of `ps:leader` while this scheduler leads, without the time of renewal."""
        return json.dumps({"id": self.id, "place": self.place, "url": self.url, "term": self.term})

    async def _run(self, script: Any, *args: str | int) -> Any:
        try:
            async with answering(self._redis), asyncio.timeout(TIMEOUT_S):
                answer = await script(keys=[LEADER_KEY, TERM_KEY, SCHEDULERS_KEY, WRITTEN_KEY], args=args)
        except PsError as e:
            self.redis_away = e.detail
            raise
        self.redis_away = ""
        return answer

    def _note(self, leader: bytes, others: Sequence[bytes]) -> None:
        if leader:
            found = json.loads(leader)
            self._renewed_ms = int(found["renewed"])
            before, self.leader = self.leader, Leader(found["id"], found["place"], found["url"], int(found["term"]))
            self.known_term = max(self.known_term, self.leader.term)
            if before is None or before.id != self.leader.id:
                self._new_leader.set()
                self._new_leader = asyncio.Event()
        rows = [json.loads(o) for o in others]
        schedulers = [Scheduler(r["name"], r["url"], r["age"] / 1e3) for r in rows]
        self.schedulers = tuple(sorted(schedulers, key=lambda s: (s.name, s.url)))


@asynccontextmanager
async def answering(redis: Redis) -> AsyncIterator[None]:
    """Surround a request to Redis: raises Unavailable (`storage_unavailable`) if it does not answer in time or refuses.

    A cancellation that the client has lost is raised at the end.
    """
    try:
        yield
    except (RedisError, OSError, TimeoutError) as e:
        stop_if_cancelled()
        await leave_after(e, redis)
        away = isinstance(e, AWAY)
        check = "is it running and reachable from the scheduler?" if away else "is it full (maxmemory) or read-only?"
        hint = f"{check} The same request can be sent again"
        raise problem("storage_unavailable", trouble(e), hint=hint) from e
    stop_if_cancelled()
