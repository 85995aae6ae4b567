"""First values from a file, when the file is gone and values are needed again."""

from pathlib import Path

import numpy as np
import pytest
from redis import Redis
from safetensors.numpy import save_file

from .processes import eventually, nodes

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def test_a_trained_model_waits_for_its_file(tmp_path: Path) -> None:
    """Redis is emptied and a shard dies: the model says what it lacks; with the file back, only that is set."""
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
        aside.rename(file)

        eventually(lambda: cluster.get("/models/m")["state"] == "ready", within_s=60.0)
        pulled = cluster.post("/pull", {"model": "m", "wait_s": 10})["params"]["w"]
        assert pulled == [0.0, 1.0, 2.0, 3.0, 104.0, 105.0, 106.0, 107.0]
