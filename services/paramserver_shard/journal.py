"""The journals of partitions in Redis: one stream each of the commands that were executed, fenced by the owner token.

Keys of partition `{NAME.GENERATION/INDEX}`: `…:journal`, a stream whose entry `LSN-0` holds `h` (format, CRC-32 and a
msgpack head) and `d` (the arrays, end to end), and `…:lsn`, the last lsn, which shows when the end of the stream is
lost.  Snapshots truncate its beginning (`snapshot_store`).

A group commit is one script call for many partitions, or several calls in turn.  For each partition the script compares
the owner token, skips entries that are there already, so that a write that timed out is simply repeated, and appends
the rest.  It also sets `…:lsn` if nothing is left to append: WAITAOF, which may follow, waits only for what its own
connection has written, and the repetition may be on another one.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import msgpack
import numpy as np
from redis.asyncio import Redis
from zlib_ng import zlib_ng

from paramserver.core.ranges import of_bytes
from paramserver.core.shard.journal import JournalEntry
from paramserver.errors import PsError, problem
from paramserver.limits import JOURNAL_SCRIPT_BYTES, MIB, PARTITION_BYTES_MAX
from paramserver.types import AnyArray, PartitionKey, Token
from paramserver_node.redis import partition_key, token_text, transfer_timeout
from paramserver_shard.scripts import Script, ScriptRunner

FORMAT: Final = "1.2"
"""Format of an entry; a new field raises it."""
_INLINE_BYTES: Final = 1 * MIB
"""Groups of at most this size are encoded on the event loop, larger ones in a thread."""
_PAGE_BYTES: Final = 16 * MIB
_PAGE_ENTRIES_MAX: Final = 1024
_PAGE_GROWTH: Final = 4
"""The next page may have at most this many times as many entries: large ones may follow small ones."""

_Page = Sequence[tuple[bytes, dict[bytes, bytes]]]

# KEYS: for each partition token, lsn, journal.  ARGV: for each partition its owner token, the number of entries, and
# (lsn, head, data) of each.  Returns one verdict per partition.
_APPEND: Final = """
local out, at = {}, 1
for k = 1, #KEYS, 3 do
  local count, first = tonumber(ARGV[at + 1]), at + 2
  local owner = redis.call('GET', KEYS[k])
  local last = tonumber(redis.call('GET', KEYS[k + 1]) or '0')
  if not owner or owner < ARGV[at] then
    out[#out + 1] = 1
  elseif owner > ARGV[at] then
    out[#out + 1] = 2
  elseif tonumber(ARGV[first]) > last + 1 then
    out[#out + 1] = 3
  else
    local newest = last
    for i = first, first + 3 * count - 1, 3 do
      if tonumber(ARGV[i]) == newest + 1 then
        redis.call('XADD', KEYS[k + 2], ARGV[i] .. '-0', 'h', ARGV[i + 1], 'd', ARGV[i + 2])
        newest = newest + 1
      end
    end
    redis.call('SET', KEYS[k + 1], string.format('%d', newest))
    out[#out + 1] = tonumber(ARGV[first + 3 * (count - 1)]) > newest and 3 or 0
  end
  at = first + 3 * count
end
return out
"""


# A write, because a Redis that is full or read-only still answers PING.
_PROBE: Final = "redis.call('SET', KEYS[1], '', 'PX', 1) return 0"


class Verdict(IntEnum):
    """The result of appending one partition's entries."""

    WRITTEN = 0
    EMPTIED = 1
    """Redis has an older owner token or none: it was emptied or rolled back, and the leader will seed it again."""
    FENCED = 2
    """Another owner has taken the partition."""
    GAP = 3
    """Redis lacks earlier entries that it once had: only a new snapshot can replace them."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries of one partition under one token, in order and without gaps."""

    key: PartitionKey
    token: Token
    entries: Sequence[JournalEntry]


class Journal:
    """Writes and reads the streams.  Raises RedisError or OSError when Redis does not answer; callers retry."""

    def __init__(self, redis: Redis, scripts: ScriptRunner) -> None:
        """`redis` is a client without timeouts of its own, like that of `scripts`."""
        self._redis = redis
        self._scripts = scripts

    async def append(self, batches: Sequence[Batch], *, fsync: bool) -> list[Verdict]:
        """Append these batches, with `fsync` wait until they are on disk, and return one verdict for each.

        Raises as `ScriptRunner.run` does.  The outcome of all batches is unknown then, and the caller repeats their
        entries before any later ones.
        """
        size = sum(e.nbytes for b in batches for e in b.entries)
        inline = size <= _INLINE_BYTES
        scripts, of = _encoded(batches) if inline else await asyncio.to_thread(_encoded, batches)
        results = await self._scripts.run(scripts, fsync=fsync, size_bytes=size)
        verdicts = [Verdict.WRITTEN] * len(batches)
        for number, verdict in zip(of, (v for result in results for v in result), strict=True):
            verdicts[number] = verdicts[number] or Verdict(verdict)  # the first one says why the rest was not written
        return verdicts

    async def probe(self, *, fsync: bool) -> None:
        """Check that entries can be written now.  Raises as `append` does if not."""
        await self._scripts.run([Script(_PROBE, ["ps:probe"], [])], fsync=fsync)

    async def read(self, key: PartitionKey, after: int) -> list[JournalEntry]:
        """Return all entries above lsn `after`, checked.  Raises CorruptState if one is damaged or missing."""
        async with transfer_timeout(0):
            text = await self._redis.get(partition_key(key, "lsn"))
        try:
            last = 0 if text is None else int(text)
        except ValueError:
            raise _damaged(key, f"its last number is {text!r:.30}") from None
        if last < after:
            raise _damaged(key, f"it ends at {last}, but a snapshot has {after}")
        stream = partition_key(key, "journal")
        entries: list[JournalEntry] = []
        count = 1
        while last > after + len(entries):
            start = f"({after + len(entries)}-0"
            async with transfer_timeout(PARTITION_BYTES_MAX):  # one entry can hold a whole partition
                page: _Page = await self._redis.xrange(stream, min=start, count=count)  # type: ignore[assignment]
            if not page:
                break
            entries += await asyncio.to_thread(_decoded_page, key, after + len(entries) + 1, page)
            size = sum(len(fields[b"h"]) + len(fields[b"d"]) for _, fields in page)
            count = max(1, min(_PAGE_GROWTH * count, _PAGE_ENTRIES_MAX, _PAGE_BYTES * len(page) // max(1, size)))
        if last != after + len(entries):
            raise _damaged(key, f"it ends at {after + len(entries)}, but {last} were written")
        async with transfer_timeout(PARTITION_BYTES_MAX):
            more = await self._redis.xrange(stream, min=f"({last}-0", count=1)
        if more:
            raise _damaged(key, f"there are entries behind the last one, {last}")
        return entries


def _damaged(key: PartitionKey, what: str) -> PsError:
    return problem("corrupt_state", f"the journal of partition {key} cannot be read: {what}")


def _encoded(batches: Sequence[Batch]) -> tuple[list[Script], list[int]]:
    """Build the script calls that write the batches, split so that none blocks Redis for long.

    Also returns the batch number of each verdict of these calls: a batch that is split over several has one in each.
    """
    out: list[Script] = []
    of: list[int] = []
    room = 0
    for number, batch in enumerate(batches):
        count_at = 0  # index of this batch's entry count in the newest call's args; 0: not begun there
        for entry in batch.entries:
            if room <= 0:
                out.append(Script(_APPEND, [], []))
                room, count_at = JOURNAL_SCRIPT_BYTES, 0
            keys, args = out[-1].keys, out[-1].args
            if not count_at:
                keys.extend(partition_key(batch.key, name) for name in ("token", "lsn", "journal"))
                args.extend((token_text(batch.token), 0))
                count_at = len(args) - 1
                of.append(number)
            args.extend((entry.lsn, *encode(entry)))
            args[count_at] += 1
            room -= entry.nbytes
    return out, of


def encode(entry: JournalEntry) -> tuple[bytes, bytes | memoryview]:
    """Encode an entry as its two fields `h` and `d`."""
    arrays = [np.ascontiguousarray(a) for a in entry.arrays]
    head = msgpack.packb(
        {
            "key": str(entry.key),
            "lsn": entry.lsn,
            "token": entry.token,
            "kind": entry.kind,
            "head": dict(entry.head),
            "arrays": [[a.dtype.str, a.nbytes] for a in arrays],
        },
        default=np.ndarray.tobytes,  # ranges
    )
    views = [a.data.cast("B") if a.nbytes else memoryview(b"") for a in arrays]
    data = views[0] if len(views) == 1 else b"".join(views)
    return msgpack.packb([FORMAT, zlib_ng.crc32(data, zlib_ng.crc32(head)), head]), data


def decode(key: PartitionKey, lsn: int, fields: dict[bytes, bytes]) -> JournalEntry:
    """Decode an entry that `encode` wrote.  Raises CorruptState if it is damaged or of another format."""
    try:
        stored, checksum, head = msgpack.unpackb(fields[b"h"])
        data = fields[b"d"]
    except (KeyError, TypeError, ValueError, msgpack.UnpackException) as e:
        raise _damaged(key, f"entry {lsn} is damaged ({str(e) or type(e).__name__})") from None
    if stored != FORMAT:
        raise _damaged(key, f"entry {lsn} has format {stored!r:.20}, this version reads {FORMAT}")
    if not isinstance(head, bytes) or zlib_ng.crc32(data, zlib_ng.crc32(head)) != checksum:
        raise _damaged(key, f"entry {lsn} does not match its checksum")
    document = msgpack.unpackb(head, strict_map_key=False)
    if document["key"] != str(key) or document["lsn"] != lsn:
        raise _damaged(key, f"entry {lsn} belongs to {document['key']}, {document['lsn']}")
    arrays: list[AnyArray] = []
    at = 0
    for dtype, size in document["arrays"]:
        arrays.append(np.frombuffer(data[at : at + size], dtype))
        at += size
    entry_head = document["head"]
    if entry_head.get("ranges") is not None:
        entry_head["ranges"] = of_bytes(entry_head["ranges"])
    return JournalEntry(key, document["token"], lsn, document["kind"], entry_head, tuple(arrays))


def _decoded_page(key: PartitionKey, first: int, page: _Page) -> list[JournalEntry]:
    out: list[JournalEntry] = []
    for lsn, (name, fields) in enumerate(page, first):
        if name != f"{lsn}-0".encode():
            raise _damaged(key, f"entry {lsn} is missing, {name.decode(errors='replace')} follows")
        out.append(decode(key, lsn, fields))
    return out
