"""Snapshots of partitions in Redis: written under the owner token, read back by the partition's next owner.

A snapshot is one byte stream (`snapshot_format`) cut into blocks of at most 4 MiB, each under its own key with its
CRC-32 in the manifest. The manifest names two snapshots, newest first, or three (see `kept_snapshots`), and is
switched last, by a script that compares the partition's owner token: an owner that was replaced cannot switch it. The
same script trims the journal up to the oldest of them, so the whole journal after each of them is kept.

Keys of partition `{NAME.GENERATION/INDEX}`: `…:token`, `…:manifest`, `…:saved` (version of the newest snapshot; shows
that a missing manifest was lost), `…:pending` (snapshots whose blocks may exist but which no manifest names),
`…:snap:VERSION-TOKEN-N:I`, and those of the journal (`journal`).
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

import numpy as np
from redis.asyncio import Redis
from zlib_ng import zlib_ng

from paramserver.core.partition_state import LoadedState
from paramserver.core.shard.retention import KEPT, kept_snapshots
from paramserver.errors import problem
from paramserver.limits import SNAPSHOT_BLOCK_BYTES
from paramserver.types import AnyArray, PartitionKey, Token
from paramserver_node.crash import crash_point
from paramserver_node.redis import partition_key, token_text
from paramserver_shard.buffers import SMALL_BYTES, BufferPool
from paramserver_shard.pacing import Budget, Line
from paramserver_shard.scripts import Script, ScriptRunner
from paramserver_shard.snapshot_format import (
    FORMAT,
    blocks_of,
    decode_head,
    encode_head,
    from_stored,
    next_block,
    pack_manifest,
    read_manifest,
)

# KEYS: token, manifest, pending, saved, lsn, journal, then the blocks. ARGV: owner token, new manifest, the member of
# `pending` for the new snapshot, its version, its lsn, the first journal entry to keep ('' keeps all), then members of
# `pending` for the snapshots that the new manifest no longer names: they are swept even if nobody learns of the switch.
# Without a journal, the last lsn is the new snapshot's: after a return to a cut that is lower than before.
_SWITCH: Final = """
local owner = redis.call('GET', KEYS[1])
if not owner or owner < ARGV[1] then return 1 end
if owner > ARGV[1] then return 2 end
for i = 7, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then return 3 end
end
redis.call('SET', KEYS[2], ARGV[2])
redis.call('SREM', KEYS[3], ARGV[3])
for i = 7, #ARGV do redis.call('SADD', KEYS[3], ARGV[i]) end
redis.call('SET', KEYS[4], ARGV[4])
local journaled = redis.call('EXISTS', KEYS[6]) == 1
if not journaled or tonumber(ARGV[5]) > tonumber(redis.call('GET', KEYS[5]) or '0') then
  redis.call('SET', KEYS[5], ARGV[5])
end
if ARGV[6] ~= '' then redis.call('XTRIM', KEYS[6], 'MINID', '=', ARGV[6]) end
return 0
"""

# KEYS: token, pending, then the blocks. ARGV: owner token, the member of `pending` for the abandoned snapshot.
_DELETE_ABANDONED: Final = """
local owner = redis.call('GET', KEYS[1])
if owner and owner > ARGV[1] then return 2 end
redis.call('SREM', KEYS[2], ARGV[2])
for i = 3, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 0
"""


class SaveResult(IntEnum):
    """Result of saving a snapshot."""

    STORED = 0
    EMPTIED = 1
    """Redis has an older owner token or none: it was emptied or reverted; the leader will write new tokens."""
    FENCED = 2
    """The partition has a newer owner."""
    BLOCKS_GONE = 3
    """Redis lost blocks before the manifest was switched; the snapshot must be stored again."""


class SnapshotStore:
    """The snapshots of this shard's partitions. Raises RedisError or OSError when Redis does not answer."""

    def __init__(
        self,
        redis: Redis,
        scripts: ScriptRunner,
        pool: BufferPool,
        clock: Callable[[], float],
        bytes_per_s: float,
    ) -> None:
        self._redis = redis
        self._scripts = scripts
        self._pool = pool
        self._budget = Budget(bytes_per_s, clock)
        self._storing, self._loading = Line(SNAPSHOT_BLOCK_BYTES), Line(SNAPSHOT_BLOCK_BYTES)
        self._damaged: set[tuple[PartitionKey, str]] = set()
        self._saves = 0

    @property
    def clients(self) -> tuple[Redis, Redis]:
        """The clients of Redis in use."""
        return self._redis, self._scripts.redis

    def hurry(self) -> None:
        """Write as fast as Redis takes it from now on, because the process is about to stop."""
        self._budget.lift()

    async def save(
        self,
        key: PartitionKey,
        token: Token,
        version: int,
        head: Mapping[str, Any],
        arrays: Sequence[AnyArray],
        *,
        lsn: int = 0,
        cut: int | None = None,
        pinned: int | None = None,
        urgent: bool = False,
        fsync: bool = False,
    ) -> SaveResult:
        """Store one snapshot; unless this returns `STORED`, the manifest is unchanged.

        The caller stores one snapshot of a partition at a time (see `SnapshotPlan`).

        `cut` is the clock under which a cut is found again; the cut at clock `pinned` is kept in any case, and beside
        a snapshot that is no cut another one, too. An urgent snapshot does not wait for the budget. With `fsync`,
        `STORED` means on disk, and this raises what `ScriptRunner.run` raises.
        """
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.mget(partition_key(key, "manifest"), partition_key(key, "saved"))
            pipe.smembers(partition_key(key, "pending"))
            (text, saved), pending = await pipe.execute()
        if fsync:  # before anything is written
            await self._scripts.settle()
        found = _entries(key, text, saved)
        manifest = [e for e in found if (key, e["name"]) not in self._damaged]
        self._saves += 1  # a version may be stored twice, with other windows; keep the first one's blocks
        name = f"{version}-{token}-{self._saves}"
        await self._delete_abandoned(key, token, found, pending)
        packed = encode_head(head, arrays)
        size = len(packed) + sum(a.nbytes for a in arrays)
        checksums = await self._write_blocks(key, name, size, blocks_of(packed, arrays), urgent=urgent)
        entry = {
            "format": FORMAT,
            "version": version,
            "token": token,
            "lsn": lsn,
            "cut": cut,
            "name": name,
            "bytes": size,
            "crc32": checksums,
        }
        snapshots = [entry, *manifest]
        kept = [snapshots[i] for i in kept_snapshots([e["cut"] for e in snapshots], pinned)]
        displaced = [old for old in found if all(old["name"] != e["name"] for e in kept)]
        result = await self._switch(key, token, kept, displaced, fsync=fsync)
        if result is not SaveResult.STORED:
            await self._delete_blocks(key, name, len(checksums))
            await self._redis.srem(partition_key(key, "pending"), _member(entry))
            return result
        self._damaged.difference_update((key, old["name"]) for old in displaced)
        await self._delete_abandoned(key, token, kept, map(_member, displaced))
        return result

    async def _switch(
        self,
        key: PartitionKey,
        token: Token,
        manifest: Sequence[Mapping[str, Any]],
        displaced: Sequence[Mapping[str, Any]],
        *,
        fsync: bool,
    ) -> SaveResult:
        """Replace the manifest, if the first of its entries is wholly written and `token` is still the owner's.

        `displaced` become pending with that, so that the next save deletes them if this one does not get to it.
        """
        new = manifest[0]
        keep_from = f"{min(e['lsn'] for e in manifest) + 1}-0" if len(manifest) >= KEPT else ""
        names = ("token", "manifest", "pending", "saved", "lsn", "journal")
        keys = [partition_key(key, n) for n in names] + _blocks(key, new["name"], len(new["crc32"]))
        args = [token_text(token), pack_manifest(manifest), _member(new), new["version"], new["lsn"], keep_from]
        args += map(_member, displaced)
        crash_point("shard.snapshot_before_switch")
        (result,) = await self._scripts.run([Script(_SWITCH, keys, args)], fsync=fsync)
        crash_point("shard.snapshot_after_switch")
        return SaveResult(result)

    async def _write_blocks(
        self, key: PartitionKey, name: str, size_bytes: int, blocks: Iterator[bytes], *, urgent: bool
    ) -> list[int]:
        """Write the blocks of a snapshot, `size_bytes` in all, and add it to `pending`; returns their CRC-32s."""
        count = -(-size_bytes // SNAPSHOT_BLOCK_BYTES)
        checksums: list[int] = []
        for i in range(count):
            # Making the blocks of a small partition is faster than waking a thread, and there may be thousands.
            inline = size_bytes <= SMALL_BYTES
            block, checksum = next_block(blocks) if inline else await asyncio.to_thread(next_block, blocks)
            await self._budget.spend(len(block), urgent=urgent)
            async with self._storing.turn(len(block)), self._scripts.redis.pipeline(transaction=True) as pipe:
                # With each block: a new owner may have swept those before it.  Both or none, also in a full Redis.
                pipe.sadd(partition_key(key, "pending"), f"{name}:{count}")
                pipe.set(partition_key(key, f"snap:{name}:{i}"), block)
                await pipe.execute()
            checksums.append(checksum)
            crash_point("shard.snapshot_block_stored")
        return checksums

    async def has_token(self, key: PartitionKey, token: Token) -> bool:
        """Return whether Redis has this owner token or a newer one; if not, it was emptied or reverted."""
        text = await self._redis.get(partition_key(key, "token"))
        try:
            return text is not None and int(text) >= token
        except ValueError:
            raise problem("corrupt_state", f"the owner token of partition {key} is {text!r:.30}") from None

    async def last_lsns(self, keys: Sequence[PartitionKey]) -> list[int]:
        """Return the last lsn in Redis of each partition, from its journal or a snapshot; 0 if there is none."""
        values = await self._redis.mget(partition_key(key, "lsn") for key in keys) if keys else []
        return [int(v) if v is not None and v.isdigit() else 0 for v in values]

    async def manifest(self, key: PartitionKey) -> list[dict[str, Any]]:
        """Return the entries of the manifest, newest first; raises CorruptState if it is lost or damaged."""
        text, saved = await self._redis.mget(partition_key(key, "manifest"), partition_key(key, "saved"))
        return _entries(key, text, saved)

    async def read(self, key: PartitionKey, entry: Mapping[str, Any]) -> LoadedState | None:
        """Read a snapshot of the manifest; None if it is damaged.

        Raises CorruptState if it has another format, MemoryError if it does not fit into memory now.
        """
        try:
            loaded = await self._read(key, entry)
        except (ValueError, TypeError, LookupError, OverflowError):
            loaded = None
        if loaded is None:
            self._damaged.add((key, entry["name"]))
        return loaded

    async def _read(self, key: PartitionKey, entry: Mapping[str, Any]) -> LoadedState | None:
        if not 0 <= entry["bytes"] <= SNAPSHOT_BLOCK_BYTES * len(entry["crc32"]):
            return None
        stream = np.empty(entry["bytes"], np.uint8)  # not from the pool: no other buffer has this size
        at = 0
        for i, checksum in enumerate(entry["crc32"]):
            async with self._loading.turn(min(entry["bytes"], SNAPSHOT_BLOCK_BYTES)):
                block = await self._scripts.redis.get(partition_key(key, f"snap:{entry['name']}:{i}"))
            if not isinstance(block, bytes) or zlib_ng.crc32(block) != checksum or at + len(block) > stream.size:
                return None
            stream[at : at + len(block)] = np.frombuffer(block, np.uint8)
            at += len(block)
        if at != stream.size:
            return None
        head, body = decode_head(stream)
        arrays: list[AnyArray] = []
        for dtype, size in head["arrays"]:
            # Each array gets its own buffer, so that later versions can free those that they no longer share.
            array = self._pool.take_bytes(size, shared=not arrays)  # the first one is the values
            array[:] = stream[body : body + size]
            arrays.append(array.view(dtype))
            body += size
        return from_stored(head["head"], arrays)

    async def _delete_abandoned(
        self, key: PartitionKey, token: Token, manifest: Sequence[Mapping[str, Any]], pending: Iterable[bytes | str]
    ) -> None:
        """Delete pending snapshots that `manifest` does not name: abandoned before its switch, or displaced by it.

        A newer owner's unfinished snapshot looks the same, and its manifest may name it by now; so for an owner that
        was replaced the script deletes nothing.
        """
        named = {e["name"] for e in manifest}
        scripts: list[Script] = []
        for member in pending:
            text = member.decode(errors="replace") if isinstance(member, bytes) else str(member)
            name, _, count = text.rpartition(":")
            blocks = _blocks(key, name, int(count)) if count.isdecimal() and name not in named else []
            keys = [partition_key(key, "token"), partition_key(key, "pending"), *blocks]
            scripts.append(Script(_DELETE_ABANDONED, keys, [token_text(token), member]))
        if scripts:
            await self._scripts.run(scripts)

    async def _delete_blocks(self, key: PartitionKey, name: str, count: int) -> None:
        if count:
            await self._redis.unlink(*_blocks(key, name, count))


def _entries(key: PartitionKey, text: bytes | str | None, saved: bytes | str | None) -> list[dict[str, Any]]:
    """Return the entries of a manifest, newest first; raises CorruptState if it is lost or damaged."""
    if text is not None:
        return read_manifest(text, f"the manifest of partition {key}")
    if saved is not None:
        version = bytes(saved).decode(errors="replace") if isinstance(saved, bytes) else str(saved)
        raise problem("corrupt_state", f"the manifest of partition {key} is gone; version {version} was stored")
    return []


def _member(entry: Mapping[str, Any]) -> str:
    """Return the member of `pending` for the snapshot of this entry."""
    return f"{entry['name']}:{len(entry['crc32'])}"


def _blocks(key: PartitionKey, name: str, count: int) -> list[str]:
    return [partition_key(key, f"snap:{name}:{i}") for i in range(count)]
