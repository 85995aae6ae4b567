"""Write the stored form of one partition in this version's format, which later versions must read.

    python -m tests.golden.stored.generate 1.3

A file of an earlier format is never regenerated.
"""

import asyncio
import base64
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
from tests.servers import running_redis

from paramserver.core.partition_state import Capture, HeldPart, PartitionState
from paramserver.core.ranges import of_pairs
from paramserver.core.shard.journal import JournalEntry
from paramserver.core.shard.window import PushMemory
from paramserver.types import ModelKey, PartitionKey, PushId, make_token
from paramserver_node import redis as node_redis
from paramserver_shard.buffers import BufferPool
from paramserver_shard.journal import Batch, Journal
from paramserver_shard.scripts import ScriptRunner
from paramserver_shard.snapshot_format import to_stored
from paramserver_shard.snapshot_store import SnapshotStore

FOLDER: Final = Path(__file__).parent
KEY: Final = PartitionKey(ModelKey("golden", 2), 1)
TOKEN: Final = make_token(3, 4)
SETTINGS: Final = {
    "revision": 5,
    "optimizer": {"name": "adam"},
    "consistency": {"mode": "buffered"},
    "params": [[1.0, None, True]],
}


def capture(version: int) -> Capture:
    """Return the partition at a version: 12 values, Adam's two slots, one buffered and one staged gradient."""
    memory = PushMemory()
    memory.record(PushId("run/w0", 2, version), None, 1234, version)
    memory.record(None, "an-idempotency-key", 99, version)
    values = (np.arange(12, dtype=np.float32) + version).astype(np.float32)
    state = PartitionState(values, (values * 0.5, values * 0.25), (version, version - 1))
    held = HeldPart(
        "run/w0", 2, -1, 0, (version, TOKEN), 0.5, of_pairs([(2, 5)]), np.arange(3, dtype=np.float16), "float16"
    )
    staged = HeldPart("run/w1", 1, version, 8, None, 1.0, None, np.arange(12, dtype=np.uint16), "bfloat16")
    exported = memory.export() | {"slots": ["m", "v"]}
    return Capture(
        state, version, 0, exported, (held,), version + 1, (staged,), key=KEY, token=TOKEN, settings=SETTINGS
    )


def entries(first: int, last: int) -> list[JournalEntry]:
    """Return journal entries of one or two arrays."""
    out = []
    for lsn in range(first, last + 1):
        head = {
            "version": lsn - 1,
            "id": ["run/w0", 2, lsn],
            "key": None,
            "crc": 7,
            "ranges": of_pairs([(0, 3)]),
            "rate": 0.1,
        }
        arrays = (np.full(3, lsn, np.float32), np.arange(lsn, dtype=np.uint16))
        out.append(JournalEntry(KEY, TOKEN, lsn, "push", head, arrays[: 1 + lsn % 2]))
    return out


async def write(url: str) -> dict[str, str]:
    """Write two snapshots and a journal; return each key in Redis with its bytes in base64."""
    redis = node_redis.connect(url)
    scripts = ScriptRunner(redis)
    await redis.set(f"{{{KEY}}}:token", f"{TOKEN:020d}")
    store = SnapshotStore(redis, scripts, BufferPool(), asyncio.get_running_loop().time, 1e12)
    await Journal(redis, scripts).append([Batch(KEY, TOKEN, entries(1, 10))], fsync=False)
    for version in (6, 7):
        taken = capture(version)
        await store.save(KEY, TOKEN, version, *to_stored(taken), lsn=taken.lsn)
    out: dict[str, str] = {}
    for key in sorted(await redis.keys("*")):
        name = key.decode() if isinstance(key, bytes) else str(key)
        if name.endswith(":journal"):  # entry by entry: DUMP would tie the file to a Redis version
            stream: Any = await redis.xrange(name)
            for lsn, fields in stream:
                for field, data in fields.items():
                    out[f"{name} {lsn.decode()} {field.decode()}"] = base64.b64encode(data).decode()
        else:
            value: Any = await redis.get(name)
            out[name] = base64.b64encode(value).decode()
    await redis.aclose()
    return out


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, running_redis(Path(folder)) as running:
        found = asyncio.run(write(running))
    (FOLDER / f"{sys.argv[1]}.json").write_text(json.dumps(found, indent=1) + "\n")
