"""What the scheduler keeps: across its own death, while Redis is away, and in checkpoints."""

import os
import resource
import signal
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from redis import Redis
from redis.exceptions import ResponseError
from safetensors.numpy import load_file, save_file
from tests.servers import running_redis
from tests.waiting import eventually

from paramserver import checkpoint

from .processes import Nodes, nodes, summing_model, unique

pytestmark = pytest.mark.process

NO_SHARD = "No shard is alive: start one with paramserver-shard, or a whole cluster with psctl up"


def joined(cluster: Nodes, model: str) -> tuple[str, int]:
    """Join a worker; return its name and its epoch, which is not the first in a cluster that deleted many models."""
    answer = cluster.post(f"/models/{model}/workers", {"name": "w0", "lease_s": 60}, status=201)
    return answer["worker"], answer["epoch"]


def train(cluster: Nodes, model: str, worker: str, epoch: int, first: int, last: int) -> None:
    """Run one worker's synchronous iterations [first, last); gradient t is t + 1 everywhere."""
    for t in range(first, last):
        push = {"model": model, "grads": {"w": [t + 1.0] * 5}, "worker": worker, "epoch": epoch, "seq": t, "clock": t}
        cluster.post("/push", push, status=202)
        report = {"worker": worker, "epoch": epoch, "clock": t + 1, "wait_s": 30}
        assert cluster.post(f"/models/{model}/clock", report)["released"] is True


def pull(cluster: Nodes, model: str, version: int) -> list[float]:
    """The values of parameter w at that version or later."""
    values: list[float] = cluster.post("/pull", {"model": model, "min_version": version, "wait_s": 30})["params"]["w"]
    return values


def test_a_restart_keeps_everything(cluster: Nodes) -> None:
    """After SIGKILL and a restart the scheduler has models, epochs, clocks, tasks and runs, and training continues."""
    name = summing_model(cluster)
    worker, epoch = joined(cluster, name)
    cluster.post(f"/models/{name}/tasks", {"dataset": "d", "size": 30, "task_size": 10}, status=201)
    lease = {"worker": worker, "epoch": epoch, "dataset": "d"}
    task = cluster.post(f"/models/{name}/tasks/lease", lease)["task"]
    cluster.post(f"/models/{name}/tasks/{task['id']}/done", {"worker": worker, "epoch": epoch})
    run = cluster.post("/runs", {"model": name, "entry": "a.b:c"}, status=201)["id"]
    train(cluster, name, worker, epoch, 0, 3)
    cluster.post(f"/models/{name}/checkpoints", {"name": "before"}, status=201)
    before = cluster.get(f"/models/{name}")
    term = cluster.get("/status")["cluster"]["term"]

    cluster.kill("scheduler")
    cluster.start_scheduler()

    after = cluster.get(f"/models/{name}")
    for key in ("generation", "revision", "timeline", "clock", "spec"):
        assert after[key] == before[key], key
    assert [p["incarnation"] for p in after["partitions"]] == [p["incarnation"] for p in before["partitions"]]
    assert cluster.get("/status")["cluster"]["term"] > term
    assert [c["name"] for c in cluster.get(f"/models/{name}/checkpoints")["items"]] == ["before"]
    assert run in [r["id"] for r in cluster.get("/runs")["items"]]
    left = cluster.post(f"/models/{name}/tasks/lease", lease)["task"]
    assert left["start"] == task["start"] + 10
    train(cluster, name, worker, epoch, 3, 5)
    assert pull(cluster, name, 5) == [15.0] * 5
    again = cluster.post(f"/models/{name}/workers", {"name": "w0"}, status=201)
    assert again["epoch"] == epoch + 1


def test_redis_away_stops_decisions_only(cluster: Nodes) -> None:
    """While Redis is stopped, decisions are 503 with Retry-After; reads, heartbeats, feeds and async pushes go on.

    One that came before this was known is in doubt.
    """
    name = summing_model(cluster, "async")
    worker, epoch = joined(cluster, name)
    beat = f"/models/{name}/workers/{worker}"
    with cluster.http.stream("GET", "/events", timeout=10.0) as stream:
        lines = stream.iter_lines()
        next(lines)
        with cluster.paused("redis"):
            new = {"params": {"w": {"shape": [5]}}}
            told = cluster.post("/models", new | {"name": unique("m")}, status=503)
            assert told["code"] == "in_doubt", "it is stored once Redis is back"
            cluster.call("PUT", beat, {"epoch": epoch, "clock": 1}, status=200)
            assert cluster.get(f"/models/{name}")["name"] == name
            assert cluster.post("/push", {"model": name, "grads": {"w": [1.0] * 5}}, status=200)["state"] == "applied"
            status = eventually(lambda: next(s for s in [cluster.get("/status")] if s["cluster"]["redis"] == "away"))
            assert status["cluster"]["state"] == "degraded"
            assert cluster.get("/readyz", status=200)
            refused = cluster.http.post("/models", json=new | {"name": unique("m")})
            assert (refused.status_code, refused.json()["code"]) == (503, "storage_unavailable")
            assert int(refused.headers["retry-after"]) >= 1
            for line in lines:
                if line == ": ping":
                    break
    eventually(lambda: cluster.get("/status")["cluster"]["redis"] == "ok")
    cluster.call("PATCH", f"/models/{name}", {"consistency": {"lag": "scale"}}, status=200)


def test_a_restore_that_redis_interrupts_is_over(cluster: Nodes) -> None:
    """A restore during which Redis stops is 503, and succeeds when it is repeated with Redis back."""
    name = summing_model(cluster, "async")
    cluster.post(f"/models/{name}/checkpoints", {"name": "mine"}, status=201)
    with cluster.paused("redis"):
        refused = cluster.post(f"/models/{name}/restore", {"checkpoint": "mine"}, status=503)
    assert refused["code"] == "storage_unavailable"
    eventually(lambda: cluster.get("/status")["cluster"]["redis"] == "ok")
    cluster.post(f"/models/{name}/restore", {"checkpoint": "mine"}, status=200)


def test_a_run_that_redis_has_not_confirmed_is_in_doubt(cluster: Nodes) -> None:
    """Who begins a run as Redis stops is told to look first: it begins once Redis is back, and again would be 409."""
    name = summing_model(cluster, "async")
    with cluster.paused("redis"):
        told = cluster.post("/runs", {"model": name, "entry": "a.b:c"}, status=503)
    assert (told["code"], told["retryable"]) == ("in_doubt", False)
    assert "look first" in told["hint"]
    (run,) = [r["id"] for r in cluster.get("/runs")["items"] if r["model"] == name]
    with Redis.from_url(cluster.redis_url) as plain:
        eventually(lambda: plain.hexists("ps:state", f"run:{run}"), what="the run in Redis")
    eventually(lambda: cluster.get("/status")["cluster"]["redis"] == "ok")
    cluster.post("/runs", {"model": name, "entry": "a.b:c"}, status=409)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux sets limits of a process that runs")
def test_a_redis_whose_disk_was_full_starts_again(tmp_path: Path) -> None:
    """Once the disk has room again, the leader has Redis rewrite its file, in which a write may have left a hole."""
    with nodes(tmp_path, shards=0) as cluster, Redis.from_url(cluster.redis_url) as plain:
        pid = cluster.redis_pid
        began = int(plain.info("persistence")["aof_rewrites"])

        def rewrites() -> int:
            found = plain.info("persistence")
            return 0 if found["aof_rewrite_in_progress"] else int(found["aof_rewrites"]) - began

        plain.bgrewriteaof()  # a file that Redis has appended to since its start has no holes
        eventually(rewrites, what="a rewrite")
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        values = {f"key-{i}": b"x" * 30_000 for i in range(100)}
        with pytest.raises(ResponseError, match="MISCONF"):
            deque(plain.set(*item) for item in values.items())
        eventually(lambda: "File too large" in str(cluster.get("/status")["cluster"]["problems"]), what="a problem")
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        eventually(lambda: rewrites() == 2, what="another rewrite")
        eventually(lambda: cluster.get("/status")["cluster"]["problems"] == [NO_SHARD], what="the end of the problem")
        plain.set("after", 1)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        with running_redis(tmp_path / "redis", int(cluster.redis_url.rsplit(":", 1)[1].split("/")[0])):
            assert plain.dbsize() > 2
            eventually(lambda: cluster.get("/status")["cluster"]["redis"] == "ok")


@pytest.mark.parametrize("partitions", [1, 4])
def test_a_checkpoint_continues_anywhere(cluster: Nodes, partitions: int) -> None:
    """Adam restored into a model with other partitions continues exactly as the original does."""
    name, copy = unique("m"), unique("copy")
    params = {"dense/w": {"shape": [2, 3]}, "b": {"shape": [], "dtype": "float16"}}
    spec = {"name": name, "params": params, "optimizer": {"name": "adam", "lr": 0.1}, "partitions": 3}
    cluster.post("/models", spec, status=201)

    def push(model: str, seq: int) -> None:
        grads: dict[str, Any] = {"dense/w": [[seq, 1.0, -1.0], [0.5, -seq, 2.0]], "b": 0.25}
        body = {"model": model, "grads": grads, "worker": "me", "epoch": 1, "seq": seq}
        assert cluster.post("/push", body, status=200)["state"] == "applied"

    def values(model: str) -> Any:
        return cluster.post("/pull", {"model": model, "dtype": "float32"})["params"]

    for seq in range(3):
        push(name, seq)
    at_checkpoint = values(name)
    made = cluster.post(f"/models/{name}/checkpoints", {"name": "mine"}, status=201)
    push(name, 3)

    held = load_file(Path(made["path"]) / checkpoint.PARAMS)
    np.testing.assert_array_equal(held["dense/w"], np.array(at_checkpoint["dense/w"], np.float32))
    assert (held["b"].dtype.name, held["b"].shape) == ("float16", ())
    assert checkpoint.read(made["path"]).versions == [3, 3, 3]

    body = {"checkpoint": "mine", "as": copy, "partitions": partitions}
    restored = cluster.post(f"/models/{name}/restore", body, status=201)
    assert len(restored["partitions"]) == partitions
    assert values(copy) == at_checkpoint
    push(copy, 3)
    assert values(copy) == values(name)

    cluster.post(f"/models/{name}/restore", {"checkpoint": "mine"}, status=200)
    assert values(name) == at_checkpoint
    cluster.call("DELETE", f"/models/{name}", status=204)
    cluster.post(f"/models/{name}/restore", {"checkpoint": "latest"}, status=201)
    assert values(name) == at_checkpoint


def test_a_damaged_checkpoint_is_not_restored(cluster: Nodes) -> None:
    """Restoring a damaged checkpoint is refused with the file's name, and the model keeps its values."""
    name = summing_model(cluster, "async")
    made = cluster.post(f"/models/{name}/checkpoints", {"name": "mine"}, status=201)
    cluster.post("/push", {"model": name, "grads": {"w": [1.0] * 5}}, status=200)
    file = Path(made["path"]) / checkpoint.PARAMS
    file.write_bytes(file.read_bytes()[:-1] + b"\x07")

    refused = cluster.post(f"/models/{name}/restore", {"checkpoint": "mine"}, status=503)
    assert refused["code"] == "corrupt_state"
    assert checkpoint.PARAMS in refused["detail"]
    assert pull(cluster, name, 1) == [1.0] * 5


def test_checkpoints_are_kept_by_rule(cluster: Nodes) -> None:
    """With a checkpoint at each clock and `keep: 2`, the last two stay, and the one with the best metric."""
    rule = {"every_clocks": 1, "every_minutes": 0, "keep": 2, "metric": "accuracy", "best": "max"}
    name = summing_model(cluster, checkpoint=rule)
    worker, epoch = joined(cluster, name)
    names = []
    for t, accuracy in enumerate([0.5, 0.9, 0.6, 0.7, 0.8]):
        cluster.post(f"/models/{name}/metrics", {"metrics": {"accuracy": accuracy}, "clock": t})
        train(cluster, name, worker, epoch, t, t + 1)

        def written(n: int = t + 1) -> Any:
            cluster.call("PUT", f"/models/{name}/workers/{worker}", {"epoch": epoch})
            items = cluster.get(f"/models/{name}/checkpoints")["items"]
            return items and items[-1]["clock"] == n and items[-1]

        names.append(eventually(written)["name"])

    kept = [c["name"] for c in cluster.get(f"/models/{name}/checkpoints")["items"]]
    assert kept == [names[1], names[3], names[4]]
    folder = cluster.folder / "state" / "checkpoints" / name
    eventually(lambda: sorted(p.name for p in folder.iterdir()) == sorted(kept))


def test_checkpoints_outlive_their_model(cluster: Nodes) -> None:
    """A model created again under its name neither replaces nor removes its predecessor's checkpoints."""
    name = unique("m")
    spec = {"name": name, "params": {"w": {"shape": [5]}}, "optimizer": {"name": "sum"}, "checkpoint": {"keep": 1}}
    folder = cluster.folder / "state" / "checkpoints" / name

    cluster.post("/models", spec, status=201)
    cluster.post("/push", {"model": name, "grads": {"w": [1.0] * 5}})
    cluster.post(f"/models/{name}/checkpoints", {"name": "final"}, status=201)
    ruled = cluster.post(f"/models/{name}/checkpoints", status=201)["name"]
    cluster.call("DELETE", f"/models/{name}")
    cluster.post("/models", spec, status=201)

    refused = cluster.post(f"/models/{name}/checkpoints", {"name": "final"}, status=409)
    assert refused["code"] == "conflict"
    for _ in range(2):
        newest = cluster.post(f"/models/{name}/checkpoints", status=201)["name"]
    kept = {"final": 1, ruled: 1, newest: 0}
    eventually(lambda: {p.name for p in folder.iterdir()} == kept.keys(), what="only what the rule drops is removed")
    assert {name: checkpoint.read(folder / name).versions[0] for name in kept} == kept


def test_values_come_from_a_file(cluster: Nodes) -> None:
    """`init.kind: file` reads a safetensors file in the state directory; a missing one fails the creation."""
    (cluster.folder / "state").mkdir(exist_ok=True)
    save_file({"w": np.arange(5, dtype=np.float32)}, cluster.folder / "state" / "first.safetensors")
    param = {"shape": [5], "init": {"kind": "file", "path": "first.safetensors"}}
    name = unique("m")

    cluster.post("/models", {"name": name, "params": {"w": param, "b": {"shape": [2]}}, "partitions": 2}, status=201)
    pulled = cluster.post("/pull", {"model": name, "wait_s": 10})
    assert pulled["params"] == {"w": [0.0, 1.0, 2.0, 3.0, 4.0], "b": [0.0, 0.0]}
    assert pulled["version"] == 0
    param["init"] = {"kind": "file", "path": "nothing.safetensors"}
    other = unique("m")
    refused = cluster.http.post("/models", json={"name": other, "params": {"w": param}})
    assert refused.status_code == 422, refused.text
    cluster.get(f"/models/{other}", status=404)
