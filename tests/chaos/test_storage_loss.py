"""Redis is emptied, Redis loses its newest writes, and everything except a checkpoint is lost."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from tests.waiting import eventually

import paramserver as ps

from .busy import JOURNALED, Busy
from .cluster import chaos_cluster
from .keeper import Plan

pytestmark = [pytest.mark.process, pytest.mark.slow]

Start = Callable[..., Busy]
TAIL_BYTES = 20_000


def test_an_emptied_redis_is_seeded_from_memory(start: Start) -> None:
    """FLUSHALL during training loses nothing, nor does a shard's death once Redis has snapshots again."""
    run = start(Plan(shards=2))
    c = run.cluster
    with redis.Redis(port=c.redis_port) as connection:
        for _ in range(2):
            c.recorder.fault("FLUSHALL")
            connection.flushall()
            c.until_healthy()
            assert connection.exists("ps:term")
    run.look()
    run.assert_kept(shards_died=False, acknowledged=1)
    until_stored(run, {})
    c.kill("shard-0")
    c.until_healthy()
    run.finish()
    run.assert_kept(shards_died=True)


def manifests(run: Busy) -> dict[str, bytes | None]:
    """Return what Redis has as the list of snapshots of each partition of each model."""
    with redis.Redis(port=run.cluster.redis_port) as connection:
        models = [(k.name, run.cluster.get(f"/models/{k.name}")) for k in run.kinds]
        keys = [f"{{{name}.{m['generation']}/{p['index']}}}:manifest" for name, m in models for p in m["partitions"]]
        return dict(zip(keys, connection.mget(keys), strict=True))


def until_stored(run: Busy, before: dict[str, bytes | None]) -> None:
    """Wait until every partition has a snapshot that it had not `before`."""
    what = "a new snapshot of every partition"
    eventually(lambda: all(m and m != before.get(key) for key, m in manifests(run).items()), what=what)


def test_a_redis_that_comes_back_without_its_last_writes(start: Start) -> None:
    """If Redis restarts without the end of its append-only file, the living shards store the lost writes again."""
    run = start(Plan(shards=2), JOURNALED)
    c = run.cluster
    (file,) = (c.folder / "nodes" / "redis" / "appendonlydir").glob("*.incr.aof")
    eventually(lambda: file.stat().st_size > 2 * TAIL_BYTES, what="enough in the file")
    c.kill("redis", hold=True)
    size = file.stat().st_size
    with file.open("r+b") as aof:
        aof.truncate(size - TAIL_BYTES)
    c.recorder.fault(f"{TAIL_BYTES} of {size} bytes of the AOF are gone")
    c.start("redis")
    c.until_healthy()
    run.look()
    run.assert_kept(shards_died=False, acknowledged=1)

    until_stored(run, manifests(run))  # and with that, what was lost
    c.kill("shard-0")
    c.until_healthy()
    run.finish()
    run.assert_kept(shards_died=True)


SCHEDULES: dict[str, Any] = {
    "warmup": ps.Constant(warmup=6),
    "steps": ps.StepDecay(step_size=3, gamma=0.1),
    "both": ps.Cosine(t_max=4, warmup=3),
}


MODELS = [
    (f"{mode}-{schedule}-{keeper}", mode, schedule, keeper)
    for mode in ("async", "sync")
    for schedule in SCHEDULES
    for keeper in ("client", "cluster")
]
"""Name, mode, schedule and keeper of the checkpoint of each model that is restored."""


def test_a_checkpoint_is_restored_where_nothing_else_is_left(tmp_path: Path) -> None:
    """After the loss of all nodes and volumes, training continues from a checkpoint with bit-identical values, also in
    the middle of warm-ups and schedules, whether the client or the cluster wrote it."""
    rng = np.random.default_rng(3)
    gradients = [{"w": rng.normal(size=(40, 25)).astype(np.float32)} for _ in range(8)]
    before, after = {}, {}
    with chaos_cluster(tmp_path / "one", Plan(shards=2)) as first:
        for name, mode, schedule, keeper in MODELS:
            model = first.client.create_model(
                name,
                {"w": (40, 25)},
                optimizer=ps.Adam(lr=0.1, schedule=SCHEDULES[schedule]),
                consistency=ps.Sync() if mode == "sync" else ps.Async(),
                partitions=4,
            )
            before[name] = train(model, gradients[:4])
            if keeper == "client":
                model.checkpoint(tmp_path / "saved" / name)
            else:
                shutil.copytree(model.save("saved")["path"], tmp_path / "saved" / name)
            after[name] = train(model, gradients[4:])
    shutil.rmtree(tmp_path / "one")

    with chaos_cluster(tmp_path / "two", Plan(shards=3)) as second:
        for name, _, _, keeper in MODELS:
            if keeper == "client":
                restored = second.client.restore(tmp_path / "saved" / name, partitions=5)
            else:
                folder = tmp_path / "two" / "nodes" / "state" / "checkpoints" / name / "saved"
                shutil.copytree(tmp_path / "saved" / name, folder)
                body = {"checkpoint": "saved", "partitions": 5}
                assert second.http.post(f"{second.urls[0]}/models/{name}/restore", json=body, timeout=30).is_success
                restored = second.client.model(name)
            np.testing.assert_array_equal(restored.pull()["w"], before[name], name)
            np.testing.assert_array_equal(train(restored, gradients[4:]), after[name], name)


def train(model: ps.Model, gradients: list[Any]) -> Any:
    """Push these gradients one after the other and return the resulting values."""
    if model.info()["spec"]["consistency"]["mode"] == "async":
        for g in gradients:
            model.push(g)
        return model.pull()["w"]
    with model.worker() as w:
        for g in gradients:
            w.step(g)
        return w.pull()["w"]
