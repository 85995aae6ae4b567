"""The scheduler's durable state in Redis: small JSON documents in one hash, written under the leader's term.

Keys: `ps:state` (field -> JSON document), `ps:written` (number of the last write, so that a write that timed out cannot
be executed late, over a newer one), `ps:fence` (shard -> highest epoch of it that must not serve any more), and for
each partition `{NAME.GENERATION/INDEX}:token` (its owner token as 20 digits, which the owner's writes are checked
against).  Each write is one Lua script: it is atomic, and does nothing once a newer leader has its term (see `lease`).
"""

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from redis.asyncio import Redis

from paramserver import limits
from paramserver.errors import problem
from paramserver.types import PartitionKey, Token
from paramserver_node.redis import FENCE_KEY, LEADER_KEY, TERM_KEY, partition_key, token_text, transfer_timeout
from paramserver_scheduler.lease import OTHER_HOLDER, WRITTEN_KEY, Deposed, Lease, answering

STATE_KEY: Final = "ps:state"
FORMAT: Final = 1
"""Format of a document.  A new field raises it: a version that does not know the field would drop it unnoticed."""
_READ: Final = (FORMAT,)
"""From the first release on a version also reads the format of the previous minor version."""
STEP_CHARS: Final = limits.MIB
"""Characters of JSON made at a time: encoding a large state must not keep the lease from being renewed."""

# KEYS: term, state, written, fence, leader, then the token keys.  ARGV: term, number of this write, the leader's lease
# if the whole state is written again (else ''), number of the last acknowledged write, the leader's id, count of fields
# to set, (field, document)..., count of fields to delete, field..., count of fences, (shard, epoch)..., then one token
# for each token key.
# Returns 1: done, 0: there is a newer leader, -1: Redis has lost the state (it was emptied) or its newest writes (it
# came back with older data), so that this write would leave an incomplete state.
_WRITE: Final = (
    OTHER_HOLDER
    + """
local stored = redis.call('GET', KEYS[1])
if stored and tonumber(stored) > tonumber(ARGV[1]) then return 0 end
local standing = other_holder(redis.call('GET', KEYS[5]), ARGV[5], tonumber(ARGV[1]), ARGV[4])
if standing < 1 then return standing end
if not stored or tonumber(stored) < tonumber(ARGV[1]) then
  if ARGV[3] == '' then return -1 end
  redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
  redis.call('SET', KEYS[1], ARGV[1])
  local clock, lease = redis.call('TIME'), cjson.decode(ARGV[3])
  lease.renewed = clock[1] * 1000 + math.floor(clock[2] / 1000)
  redis.call('SET', KEYS[5], cjson.encode(lease))
end
local last = redis.call('GET', KEYS[3])
if (last or '') < ARGV[4] then return -1 end
if last and last >= ARGV[2] then return 1 end
redis.call('SET', KEYS[3], ARGV[2])
local at = 6
for i = 1, tonumber(ARGV[at]) do
  redis.call('HSET', KEYS[2], ARGV[at + 1], ARGV[at + 2])
  at = at + 2
end
at = at + 1
for i = 1, tonumber(ARGV[at]) do
  redis.call('HDEL', KEYS[2], ARGV[at + 1])
  at = at + 1
end
at = at + 1
for i = 1, tonumber(ARGV[at]) do
  local fenced = redis.call('HGET', KEYS[4], ARGV[at + 1])
  if ARGV[at + 2] == '0' then
    redis.call('HDEL', KEYS[4], ARGV[at + 1])
  elseif not fenced or tonumber(fenced) < tonumber(ARGV[at + 2]) then
    redis.call('HSET', KEYS[4], ARGV[at + 1], ARGV[at + 2])
  end
  at = at + 2
end
for i = 6, #KEYS do
  at = at + 1
  redis.call('SET', KEYS[i], ARGV[at])
end
return 1
"""
)


class StateStore:
    """The stored state of one leader, which reads it once and then only writes.  Used by one task at a time."""

    def __init__(self, redis: Redis, lease: Lease, timeout_s: float = 2.0) -> None:
        """`redis` is a client without socket timeouts; `timeout_s` is the time for what is small."""
        self._redis = redis
        self._lease = lease
        self._timeout_s = timeout_s
        self._script = redis.register_script(_WRITE)
        self._writes = 0
        self.full_rewrite = False
        """Whether the next write begins a new term and holds the whole state."""

    @property
    def term(self) -> int:
        """The term under which this leader writes."""
        return self._lease.term

    async def open(self) -> dict[str, Any]:
        """Return the documents that the previous leader left, by field.

        Raises Unavailable (`storage_unavailable`) if Redis does not answer, CorruptState if a document cannot be read
        or has another format, Deposed if another term has begun.
        """
        # Nearly all of a large state is what workers store.
        within = transfer_timeout(limits.WORKER_STATES_MAX, timeout_s=self._timeout_s)
        async with answering(self._redis), within:
            pipe = self._redis.pipeline(transaction=True)
            pipe.get(TERM_KEY)
            pipe.hgetall(STATE_KEY)
            term, raw = await pipe.execute()
        if int(term or 0) != self.term:
            raise Deposed(f"term {int(term or 0)} has begun, this was {self.term}")
        return await asyncio.to_thread(_decoded, raw)

    def begin_new_term(self) -> bool:
        """Begin a new term because Redis was emptied: the next write must hold the whole state.

        Returns False, and changes nothing, if that write is pending already.
        """
        if self.full_rewrite:
            return False
        self.full_rewrite = True
        self._lease.term += 1
        self._lease.written = ""
        self._writes = 0
        return True

    async def write(
        self,
        documents: Mapping[str, Mapping[str, Any] | None],
        tokens: Iterable[tuple[PartitionKey, Token]] = (),
        fences: Iterable[tuple[str, int]] = (),
    ) -> None:
        """Set fields (None deletes one) and owner tokens, and raise fences (epoch 0 deletes one), atomically.

        Raises Unavailable (`storage_unavailable`) if Redis did not confirm the write.  It may have been executed, so
        the caller's next write must repeat it, possibly merged with later changes.  Raises Deposed if a newer scheduler
        leads, RedisDataLost if Redis has lost the state; call `begin_new_term` then.
        """
        new_tokens = {partition_key(key, "token"): token_text(t) for key, t in tokens}
        full_rewrite, term = self.full_rewrite, self.term
        self._writes += 1
        number = f"{term:010d}{self._writes:012d}"
        lease = self._lease.document() if full_rewrite else ""
        head: list[str | int] = [term, number, lease, self._lease.written, self._lease.id]
        new_fields = await _encoded(documents)
        size = sum([len(text) for text in new_fields.values() if text])
        # A Redis that has lost the script is sent it, with all that comes with it, another time.
        async with answering(self._redis), transfer_timeout(2 * size, timeout_s=self._timeout_s):
            done = await self._run(head, new_fields, new_tokens, dict(fences))
        self._lease.check(done)
        if term == self.term:
            self._lease.written = number
        if full_rewrite:  # otherwise leave it: `begin_new_term` may have been called during this write
            self.full_rewrite = False

    async def _run(
        self,
        head: Iterable[str | int],
        fields: Mapping[str, str | None],
        tokens: Mapping[str, str],
        fences: Mapping[str, int],
    ) -> int:
        sets = [(f, text) for f, text in fields.items() if text is not None]
        gone = [f for f, text in fields.items() if text is None]
        args: list[Any] = [*head, len(sets)]
        for field, text in sets:
            args += (field, text)
        args += (len(gone), *gone, len(fences))
        for shard, epoch in fences.items():
            args += (shard, epoch)
        args += tokens.values()
        keys = [TERM_KEY, STATE_KEY, WRITTEN_KEY, FENCE_KEY, LEADER_KEY, *tokens]
        return int(await self._script(keys=keys, args=args))


async def _encoded(documents: Mapping[str, Mapping[str, Any] | None]) -> dict[str, str | None]:
    """Return the JSON of each document, with its format; None for None."""
    texts: dict[str, str | None] = {}
    chars = 0
    for field, document in documents.items():
        text = None if document is None else json.dumps({**document, "format": FORMAT}, separators=(",", ":"))
        texts[field] = text
        chars += len(text or "")
        if chars >= STEP_CHARS:
            chars = 0
            await asyncio.sleep(0)
    return texts


def _decoded(raw: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Return the stored documents; raises CorruptState if one cannot be read."""
    documents: dict[str, Any] = {}
    for field, text in ((k.decode(), v) for k, v in raw.items()):
        try:
            document = json.loads(text)
            if document["format"] not in _READ:
                read = " and ".join(map(str, _READ))
                raise ValueError(f"it has format {document['format']}, this version reads {read}")
        except (ValueError, KeyError, TypeError) as e:
            raise problem(
                "corrupt_state",
                f"field '{field}' of {STATE_KEY} in Redis cannot be read: {e}",
                hint="start the version that wrote it, or a newer one",
            ) from e
        documents[field] = document
    return documents
