"""Initial values from a file or a client that are needed again because no snapshot of them was ever stored."""

from pathlib import Path

import numpy as np
import pytest
from redis import Redis
from safetensors.numpy import save_file
from tests.waiting import eventually

from .processes import nodes

pytestmark = pytest.mark.process


@pytest.mark.parametrize("way", ["the file", "its values"])
def test_a_trained_model_waits_for_its_file(tmp_path: Path, way: str) -> None:
    """After Redis is emptied and a shard dies, a model waits for its file; it or a PUT sets only what was lost."""
    with nodes(tmp_path, shards=2) as cluster:
        file = tmp_path / "state" / "first.safetensors"
        file.parent.mkdir(exist_ok=True)
        save_file({"w": np.arange(8, dtype=np.float32)}, file)
        param = {"shape": [8], "init": {"kind": "file", "path": file.name}}
        spec = {"name": "m", "params": {"w": param}, "optimizer": {"name": "sum"}, "partitions": 2}
        owners = [p["shard"] for p in cluster.post("/models", spec, status=201)["partitions"]]
        cluster.post("/push", {"model": "m", "grads": {"w": [100.0] * 8}}, status=200)
        aside = file.rename(file.with_suffix(".aside"))

        cluster.kill(owners[0])
        with Redis.from_url(cluster.redis_url) as plain:
            plain.flushall()
        told = eventually(lambda: cluster.get("/models/m")["files_error"], within_s=60.0)
        assert file.name in told
        assert any(told in p for p in cluster.get("/status")["cluster"]["problems"])
        if way == "the file":
            aside.rename(file)
        else:
            given = cluster.http.put("/models/m/params/w", json=list(range(8)))
            assert given.status_code == 200, given.text

        eventually(lambda: cluster.get("/models/m")["state"] == "ready", within_s=60.0)
        pulled = cluster.post("/pull", {"model": "m", "wait_s": 10})["params"]["w"]
        assert pulled == [0.0, 1.0, 2.0, 3.0, 104.0, 105.0, 106.0, 107.0]


def test_values_that_are_uploaded_again_set_only_what_was_lost(tmp_path: Path) -> None:
    """After Redis is emptied and a shard dies, a full upload sets only the values that were lost."""
    with nodes(tmp_path, shards=2) as cluster:
        params = {name: {"shape": [size], "init": {"kind": "upload"}} for name, size in (("w", 6), ("b", 2))}
        spec = {"name": "m", "params": params, "optimizer": {"name": "sum"}, "partitions": 2}

        def upload(status: int) -> None:
            token = cluster.post("/models", spec, status=status)["upload_token"]
            for name, value in (("b", [6.0, 7.0]), ("w", [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])):
                answer = cluster.http.put(f"/models/m/params/{name}", json=value, headers={"x-upload-token": token})
                assert answer.status_code == 200, answer.text

        upload(201)
        trained = {"w": [100.0] * 6, "b": [100.0] * 2}
        eventually(lambda: cluster.post("/push", {"model": "m", "grads": trained})["state"] == "applied")

        cluster.kill(cluster.get("/models/m")["partitions"][0]["shard"])
        with Redis.from_url(cluster.redis_url) as plain:
            plain.flushall()
        eventually(lambda: cluster.get("/models/m")["missing"] == ["w"], within_s=60.0)
        upload(200)

        assert eventually(lambda: cluster.post("/pull", {"model": "m", "wait_s": 10}))["params"] == {
            "w": [0.0, 1.0, 2.0, 3.0, 104.0, 105.0],
            "b": [106.0, 107.0],
        }
