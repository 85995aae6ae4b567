"""Write the stored state of one scheduler in this version's format, which the next minor version must read.

    python -m tests.golden.stored.scheduler 1

A file of an earlier format is never regenerated.
"""

import asyncio
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.servers import running_redis
from tests.unit.scheduling import SPEC, Driver

from paramserver.core.scheduler import io
from paramserver_node.redis import connect
from paramserver_scheduler.lease import Lease
from paramserver_scheduler.store import STATE_KEY, StateStore

FOLDER: Final = Path(__file__).parent


def documents() -> dict[str, Any]:
    """Return documents of every kind, by field: of a model in training and one being filled."""
    d = Driver()
    d.model(consistency={"mode": "sync"}, partitions=2)
    d.ask(partial(io.RegisterDataset, model="m", dataset="train", size=10, task_size=5))
    workers = [d.join(name, lease_s=60.0) for name in "ab"]
    for clock in (1, 2):
        for worker in workers:
            d.clock(worker, clock)
    d.lease(workers[0], "train")
    d.ask(partial(io.ReportMetrics, model="m", metrics={"loss": 0.5}, worker=workers[0]["worker"], clock=2))
    d.send(partial(io.RequestCheckpoint, model="m", name="mine"))
    d.wait(10.0)  # until the checkpoint is to be written, and the metrics are stored
    (effect,) = [e for e in d.work if isinstance(e, io.WriteCheckpoint)]
    d.do(io.CheckpointWritten(effect.model, effect.name, 10, [2, 2], "/x", scheduler="s", creation="1-2.0"))
    uploaded = {name: {"shape": [4], "init": {"kind": "upload"}} for name in "uv"}
    d.send(partial(io.CreateModel, spec={"name": "filled", "partitions": 1, "params": uploaded}, nonce="secret"))
    d.beats()
    given = [[i, o.token] for i, o in enumerate(d.core._c.models["filled"].owners)]
    d.send(partial(io.ParameterUploaded, model="filled", name="u", token="secret", given=given))
    d.send(partial(io.CreateModel, spec=SPEC | {"name": "gone"}, nonce="secret"))
    d.send(partial(io.DeleteModel, model="gone"))
    d.ask(partial(io.JoinPool, name="p", allow=["a"]))
    d.ask(partial(io.CreateRun, model="m", entry="a.b:c"))
    return {field: json.loads(text) for field, text in d.hash.items()}


async def write(url: str) -> dict[str, Any]:
    """Write the documents as a leader does; return what Redis, which was empty, has then."""
    async with connect(url) as redis:
        lease = Lease(redis, name="s", place="here", url="http://127.0.0.1:1")
        assert await lease.try_acquire()
        await StateStore(redis, lease).write(documents())
        raw: Any = await redis.hgetall(STATE_KEY)
    return {field.decode(): json.loads(raw[field]) for field in sorted(raw)}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, running_redis(Path(folder)) as running:
        found = asyncio.run(write(running))
    lines = ",\n".join(f"{json.dumps(field)}: {json.dumps(document)}" for field, document in found.items())
    (FOLDER / f"scheduler-{sys.argv[1]}.json").write_text(f"{{\n{lines}\n}}\n")
