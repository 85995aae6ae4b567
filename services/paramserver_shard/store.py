"""Snapshots of partitions in Redis: written under the owner token, read back by whoever owns the partition next.

A snapshot is one byte stream (a msgpack head, then the arrays) cut into blocks of at most 4 MiB, each under its own key
with its CRC-32 in the manifest.  The manifest, a JSON list of at most two snapshots, newest first, is switched last, by
a script that compares the partition's owner token: an owner that was replaced cannot switch it.

Keys of partition `{NAME.GENERATION/INDEX}`: `…:token`, `…:manifest`, `…:pending` (snapshots whose blocks may exist but
which no manifest names), `…:snap:VERSION-TOKEN-N:I`.
"""

import asyncio
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack
import numpy as np
from redis.asyncio import Redis
from zlib_ng import zlib_ng

from paramserver.errors import problem
from paramserver.limits import SNAPSHOT_BLOCK_BYTES, SNAPSHOT_BYTES_PER_S
from paramserver.types import AnyArray, PartitionKey, Token
from paramserver_shard.buffers import BufferPool

FORMAT: Final = 1
KEPT: Final = 2
_ALIGN: Final = 64

# KEYS: token, manifest, pending.  ARGV: owner token, new manifest, the snapshot it now names.
_SWITCH: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2])
redis.call('SREM', KEYS[3], ARGV[3])
return 1
"""


@dataclass(frozen=True, slots=True)
class Stored:
    """One snapshot, read back and checked."""

    version: int
    token: Token
    head: Mapping[str, Any]
    arrays: tuple[AnyArray, ...]
    newest: bool
    """False: the newest one was damaged and this is the one before."""


class Budget:
    """Spreads writes over time: at most `bytes_per_s`, counted over all partitions of this shard."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float]) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at = 0.0

    async def spend(self, size_bytes: int) -> None:
        """Waits until `size_bytes` more may be written."""
        now = self._clock()
        start = max(now, self._free_at)
        self._free_at = start + size_bytes / self._bytes_per_s
        if start > now:
            await asyncio.sleep(start - now)


class SnapshotStore:
    """The snapshots of this shard's partitions.  Raises RedisError when Redis does not answer; callers retry."""

    def __init__(
        self, redis: Redis, pool: BufferPool, clock: Callable[[], float], bytes_per_s: float = SNAPSHOT_BYTES_PER_S
    ) -> None:
        self._redis = redis
        self._pool = pool
        self._budget = Budget(bytes_per_s, clock)
        self._writing = asyncio.Lock()
        self._saves = 0
        self._switch = redis.register_script(_SWITCH)

    async def save(
        self,
        key: PartitionKey,
        token: Token,
        version: int,
        cut: int | None,
        pinned: int | None,
        head: Mapping[str, Any],
        arrays: Sequence[AnyArray],
    ) -> bool:
        """Stores one snapshot; False if `token` is no longer the partition's owner token (nothing was switched).

        `cut` is the clock by which a cut is found again; the cut at clock `pinned` is kept in any case.  One snapshot
        is written at a time, within the budget.
        """
        async with self._writing:
            manifest = await self._manifest(key)
            self._saves += 1  # a version may be stored twice, with other windows: never over the blocks of the first
            name = f"{version}-{token}-{self._saves}"
            await self._sweep(key, manifest)
            stream_bytes = _stream_bytes(head, arrays)
            count = -(-stream_bytes // SNAPSHOT_BLOCK_BYTES)
            await self._redis.sadd(_key(key, "pending"), f"{name}:{count}")
            checksums: list[int] = []
            blocks = _blocks(head, arrays)
            while (made := await asyncio.to_thread(_next_block, blocks)) is not None:
                block, checksum = made
                await self._budget.spend(len(block))
                await self._redis.set(_key(key, f"snap:{name}:{len(checksums)}"), block)
                checksums.append(checksum)
            entry = {
                "format": FORMAT,
                "version": version,
                "token": token,
                "cut": cut,
                "name": name,
                "bytes": stream_bytes,
                "crc32": checksums,
            }
            older = [e for e in manifest if pinned is not None and e["cut"] == pinned] or manifest
            kept = [entry, *older][:KEPT]
            switched = await self._switch(
                keys=[_key(key, "token"), _key(key, "manifest"), _key(key, "pending")],
                args=[_token_text(token), json.dumps(kept), f"{name}:{count}"],
            )
            if not switched:
                await self._delete_blocks(key, name, count)
                return False
            for old in manifest:
                if all(old["name"] != e["name"] for e in kept):
                    await self._delete_blocks(key, str(old["name"]), len(old["crc32"]))
            return True

    async def load(self, key: PartitionKey, cut: int | None = None) -> Stored | None:
        """The newest good snapshot, or that of the cut at clock `cut`; None where there is none at all.

        Raises CorruptState when there are snapshots but none of those asked for is whole.
        """
        manifest = await self._manifest(key)
        wanted = [e for e in manifest if cut is None or e["cut"] == cut]
        for entry in wanted:
            stored = await self._read(key, entry, newest=entry is manifest[0])
            if stored is not None:
                return stored
        if wanted or (cut is not None and manifest):
            which = f"the cut at clock {cut} of" if cut is not None else "the snapshots of"
            raise problem("corrupt_state", f"{which} partition {key} cannot be read back whole")
        return None

    async def _manifest(self, key: PartitionKey) -> list[dict[str, Any]]:
        text = await self._redis.get(_key(key, "manifest"))
        if text is None:
            return []
        try:
            entries = json.loads(text)
            if all(e["format"] == FORMAT and isinstance(e["crc32"], list) and e["name"] for e in entries):
                return list(entries)
        except (ValueError, TypeError, KeyError):
            pass
        raise problem("corrupt_state", f"the manifest of partition {key} cannot be read")

    async def _read(self, key: PartitionKey, entry: Mapping[str, Any], newest: bool) -> Stored | None:
        stream = self._pool.take_bytes(int(entry["bytes"]))
        at = 0
        for i, checksum in enumerate(entry["crc32"]):
            block = await self._redis.get(_key(key, f"snap:{entry['name']}:{i}"))
            if not isinstance(block, bytes) or zlib_ng.crc32(block) != checksum or at + len(block) > stream.size:
                return None
            stream[at : at + len(block)] = np.frombuffer(block, np.uint8)
            at += len(block)
        if at != stream.size:
            return None
        head, body = _decode_head(stream)
        arrays: list[AnyArray] = []
        for dtype, size in head["arrays"]:
            # Each array gets memory of its own, so that a later version frees what it no longer shares.
            array = self._pool.take_bytes(size)
            array[:] = stream[body : body + size]
            arrays.append(array.view(dtype))
            body += size
        return Stored(int(entry["version"]), int(entry["token"]), head["head"], tuple(arrays), newest)

    async def _sweep(self, key: PartitionKey, manifest: Sequence[Mapping[str, Any]]) -> None:
        """Deletes blocks that a writer left behind before it could switch the manifest."""
        named = {e["name"] for e in manifest}
        for member in await self._redis.smembers(_key(key, "pending")):
            text = member.decode() if isinstance(member, bytes) else str(member)
            name, _, count = text.rpartition(":")
            if name not in named:
                await self._delete_blocks(key, name, int(count))
            await self._redis.srem(_key(key, "pending"), text)

    async def _delete_blocks(self, key: PartitionKey, name: str, count: int) -> None:
        if count:
            await self._redis.unlink(*(_key(key, f"snap:{name}:{i}") for i in range(count)))


def _key(key: PartitionKey, name: str) -> str:
    return f"{{{key}}}:{name}"


def _token_text(token: Token) -> str:
    return f"{token:020d}"


def _encode_head(head: Mapping[str, Any], arrays: Sequence[AnyArray]) -> bytes:
    packed = msgpack.packb({"format": FORMAT, "head": head, "arrays": [[a.dtype.str, a.nbytes] for a in arrays]})
    size = 4 + len(packed)
    return b"".join((struct.pack("<I", len(packed)), packed, bytes(-size % _ALIGN)))


def _decode_head(stream: np.ndarray[Any, np.dtype[np.uint8]]) -> tuple[dict[str, Any], int]:
    (size,) = struct.unpack("<I", stream[:4].tobytes())
    head = msgpack.unpackb(stream[4 : 4 + size].tobytes(), strict_map_key=False)
    if head.get("format") != FORMAT:
        raise problem("corrupt_state", f"a snapshot has format {head.get('format')}, not {FORMAT}")
    return head, 4 + size + (-(4 + size) % _ALIGN)


def _stream_bytes(head: Mapping[str, Any], arrays: Sequence[AnyArray]) -> int:
    return len(_encode_head(head, arrays)) + sum(a.nbytes for a in arrays)


def _blocks(head: Mapping[str, Any], arrays: Sequence[AnyArray]) -> Iterator[bytes]:
    """The stream in pieces of at most SNAPSHOT_BLOCK_BYTES."""
    block = bytearray()
    for piece in (memoryview(_encode_head(head, arrays)), *(a.data.cast("B") for a in arrays)):
        at = 0
        while at < len(piece):
            room = SNAPSHOT_BLOCK_BYTES - len(block)
            block += piece[at : at + room]
            at += room
            if len(block) == SNAPSHOT_BLOCK_BYTES:
                yield bytes(block)
                block.clear()
    if block:
        yield bytes(block)


def _next_block(blocks: Iterator[bytes]) -> tuple[bytes, int] | None:
    """The next block with its checksum; copying and summing 4 MiB is too long for the event loop."""
    block = next(blocks, None)
    return None if block is None else (block, zlib_ng.crc32(block))
