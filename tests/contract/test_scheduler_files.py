"""Initial values from a file or a client that are needed again because no snapshot of them was ever stored."""

import numpy as np
import pytest
from redis import Redis
from safetensors.numpy import save_file
from tests.waiting import eventually

from .processes import START_S, Nodes, unique

pytestmark = pytest.mark.process


def die(cluster: Nodes, name: str) -> None:
    """Kill and restart the shard that owns the model's first partition, once Redis has nothing of it."""
    owner = cluster.get(f"/models/{name}")["partitions"][0]["shard"]
    cluster.kill(owner)
    with Redis.from_url(cluster.redis_url) as plain:
        plain.flushall()
    cluster.start_shard(owner)


def test_a_trained_model_waits_for_its_files(cluster: Nodes) -> None:
    """After Redis is emptied and a shard dies, a model waits for its files; they or a PUT set only what was lost."""
    folder, name = cluster.folder / "state", unique("m")
    folder.mkdir(exist_ok=True)
    params = {"a": [0.0, 1.0], "b": [2.0, 3.0], "c": [4.0, 5.0, 6.0, 7.0]}
    for param, values in params.items():
        save_file({param: np.array(values, np.float32)}, folder / param)
    inits = {p: {"shape": [len(v)], "init": {"kind": "file", "path": p}} for p, v in params.items()}
    spec = {"name": name, "params": inits, "optimizer": {"name": "sum"}, "partitions": 2}
    cluster.post("/models", spec, status=201)
    cluster.post("/push", {"model": name, "grads": {p: [100.0] * len(v) for p, v in params.items()}}, status=200)
    aside = {param: (folder / param).rename(folder / f"{param}.aside") for param in params}

    die(cluster, name)
    told = eventually(
        lambda: cluster.get(f"/models/{name}")["files_error"], within_s=START_S, what="the lack of a file"
    )
    assert f"{folder / 'a'}" in told or f"{folder / 'b'}" in told
    assert any(told in p for p in cluster.get("/status")["cluster"]["problems"])
    given = cluster.http.put(f"/models/{name}/params/b", json=params["b"])
    assert given.status_code == 200, given.text
    assert cluster.get(f"/models/{name}")["missing"] == ["a"]
    aside["a"].rename(folder / "a")

    eventually(
        lambda: cluster.get(f"/models/{name}")["state"] == "ready", within_s=60.0, what="the reading of the file"
    )
    pulled = cluster.post("/pull", {"model": name, "wait_s": 10})["params"]
    assert pulled == {"a": [0.0, 1.0], "b": [2.0, 3.0], "c": [104.0, 105.0, 106.0, 107.0]}


def test_values_that_are_uploaded_again_set_only_what_was_lost(cluster: Nodes) -> None:
    """After Redis is emptied and a shard dies, a full upload sets only the values that were lost."""
    name = unique("m")
    params = {name: {"shape": [size], "init": {"kind": "upload"}} for name, size in (("w", 6), ("b", 2))}
    spec = {"name": name, "params": params, "optimizer": {"name": "sum"}, "partitions": 2}

    def upload(status: int) -> None:
        token = cluster.post("/models", spec, status=status)["upload_token"]
        for param, value in (("b", [6.0, 7.0]), ("w", [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])):
            path, headers = f"/models/{name}/params/{param}", {"x-upload-token": token}
            answer = cluster.http.put(path, json=value, headers=headers)
            assert answer.status_code == 200, answer.text

    upload(201)
    trained = {"w": [100.0] * 6, "b": [100.0] * 2}
    eventually(lambda: cluster.post("/push", {"model": name, "grads": trained})["state"] == "applied")

    die(cluster, name)
    eventually(lambda: cluster.get(f"/models/{name}")["missing"] == ["w"], within_s=START_S, what="the loss")
    upload(200)

    assert eventually(lambda: cluster.post("/pull", {"model": name, "wait_s": 10}))["params"] == {
        "w": [0.0, 1.0, 2.0, 3.0, 104.0, 105.0],
        "b": [106.0, 107.0],
    }
