"""The scheduler's durable state in Redis: small JSON documents in one hash, written under the leader's term.

Keys: `ps:term` (counts the schedulers that started on this Redis), `ps:state` (field -> JSON document), `ps:written`
(number of the last write, so that one that timed out cannot be done late, over a newer one), and for each partition
`{NAME.GENERATION/INDEX}:token` (its owner token as 20 digits, which the owner's writes are compared with).
One write is one Lua script: all of it or none of it, and nothing once a newer scheduler has started.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from paramserver.errors import problem
from paramserver.types import PartitionKey, Token

TERM_KEY: Final = "ps:term"
STATE_KEY: Final = "ps:state"
WRITTEN_KEY: Final = "ps:written"
FORMAT: Final = 1

# KEYS: term, state, written, then the token keys.  ARGV: term, number of this write, number of fields to set,
# (field, document)..., number of fields to delete, field..., then one token for each token key ('' deletes it).
# 1: done, 0: a newer scheduler has started, -1: Redis has lost the state (it was emptied), so a partial write would
# leave half of it.
_WRITE: Final = """
local stored = redis.call('GET', KEYS[1])
if not stored or tonumber(stored) < tonumber(ARGV[1]) then return -1 end
if tonumber(stored) > tonumber(ARGV[1]) then return 0 end
local last = redis.call('GET', KEYS[3])
if last and last >= ARGV[2] then return 1 end
redis.call('SET', KEYS[3], ARGV[2])
local at = 3
for i = 1, tonumber(ARGV[at]) do
  redis.call('HSET', KEYS[2], ARGV[at + 1], ARGV[at + 2])
  at = at + 2
end
at = at + 1
for i = 1, tonumber(ARGV[at]) do
  redis.call('HDEL', KEYS[2], ARGV[at + 1])
  at = at + 1
end
for i = 4, #KEYS do
  at = at + 1
  if ARGV[at] == '' then redis.call('DEL', KEYS[i]) else redis.call('SET', KEYS[i], ARGV[at]) end
end
return 1
"""


class Deposed(Exception):
    """Raised when a newer scheduler has started on this Redis: this one must stop deciding."""


class StateStore:
    """Reads the state once at start, then writes what changed.  Used by one task at a time."""

    def __init__(self, redis: Redis, timeout_s: float = 2.0) -> None:
        self._redis = redis
        self._timeout_s = timeout_s
        self._script = redis.register_script(_WRITE)
        self._fields: dict[str, str] = {}
        """All of `ps:state` as it stands, so that an emptied Redis gets everything back."""
        self._tokens: dict[str, str] = {}
        self.term = 0
        self._writes = 0

    async def open(self) -> dict[str, Any]:
        """Take a new term and return the documents that the last scheduler left, by field.

        Raises Unavailable (`storage_unavailable`) while Redis does not answer, CorruptState if a document cannot be
        read or is of a newer format.
        """
        try:
            async with asyncio.timeout(self._timeout_s * 5):
                self.term = int(await self._redis.incr(TERM_KEY))
                raw = await self._redis.hgetall(STATE_KEY)
        except (RedisError, OSError, TimeoutError) as e:
            raise _unavailable(e) from e
        self._fields = {_text(k): _text(v) for k, v in raw.items()}
        documents: dict[str, Any] = {}
        for field, text in self._fields.items():
            try:
                document = json.loads(text)
                if document["format"] != FORMAT:
                    raise ValueError(f"format {document['format']}")
            except (ValueError, KeyError, TypeError) as e:
                raise problem("corrupt_state", f"field '{field}' of {STATE_KEY} in Redis cannot be read: {e}") from e
            documents[field] = document
        return documents

    async def write(
        self,
        documents: Mapping[str, Mapping[str, Any] | None],
        tokens: Iterable[tuple[PartitionKey, Token | None]] = (),
    ) -> None:
        """Set (or with None delete) fields and owner tokens, all at once.

        Raises Unavailable (`storage_unavailable`) if Redis did not say that it was done: it may have been, so the
        caller repeats the same write before any other.  Raises Deposed if a newer scheduler has started.
        """
        new_tokens = {f"{{{key}}}:token": "" if t is None else f"{t:020d}" for key, t in tokens}
        new_fields = {
            f: None if d is None else json.dumps({**d, "format": FORMAT}, separators=(",", ":"))
            for f, d in documents.items()
        }
        try:
            async with asyncio.timeout(self._timeout_s):
                done = await self._run(new_fields, new_tokens)
                if done < 0:
                    done = await self._restore(new_fields, new_tokens)
        except (RedisError, OSError, TimeoutError) as e:
            _stop_if_cancelled()
            raise _unavailable(e) from e
        _stop_if_cancelled()
        if done == 0:
            raise Deposed(f"a newer scheduler than term {self.term} has started on this Redis")
        self._keep(new_fields, new_tokens)

    async def ping(self) -> bool:
        """Whether Redis answers now."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._redis.ping()
        except (RedisError, OSError, TimeoutError):
            _stop_if_cancelled()
            return False
        _stop_if_cancelled()
        return True

    async def _restore(self, fields: Mapping[str, str | None], tokens: Mapping[str, str]) -> int:
        """Redis was emptied: give it everything this scheduler knows, with the new write on top."""
        await self._redis.set(TERM_KEY, str(self.term))
        return await self._run({**self._fields, **fields}, {**self._tokens, **tokens})

    async def _run(self, fields: Mapping[str, str | None], tokens: Mapping[str, str]) -> int:
        sets = [(f, text) for f, text in fields.items() if text is not None]
        gone = [f for f, text in fields.items() if text is None]
        self._writes += 1
        args: list[Any] = [self.term, f"{self.term:010d}{self._writes:012d}", len(sets)]
        for field, text in sets:
            args += (field, text)
        args += (len(gone), *gone, *tokens.values())
        return int(await self._script(keys=[TERM_KEY, STATE_KEY, WRITTEN_KEY, *tokens], args=args))

    def _keep(self, fields: Mapping[str, str | None], tokens: Mapping[str, str]) -> None:
        for field, text in fields.items():
            if text is None:
                self._fields.pop(field, None)
            else:
                self._fields[field] = text
        for key, token in tokens.items():
            if token:
                self._tokens[key] = token
            else:
                self._tokens.pop(key, None)


def _stop_if_cancelled() -> None:
    """The client uses `asyncio.wait_for`, which before Python 3.12 loses a cancellation that comes with an answer."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _unavailable(cause: BaseException) -> Exception:
    return problem(
        "storage_unavailable",
        f"Redis does not answer: {cause or type(cause).__name__}",
        hint="is it running, and reachable from the scheduler? The same request may be sent again",
    )
