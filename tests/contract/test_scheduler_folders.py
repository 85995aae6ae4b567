"""Schedulers with folders of their own: whose checkpoints are served, and a state that must not begin anew."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from redis import Redis
from safetensors.numpy import load
from tests.servers import running_redis
from tests.waiting import eventually

from paramserver_node import tokens

from .processes import START_S, Nodes, leader, process_name, signal_to, summing_model

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def nodes_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two schedulers with separate state directories, as on two machines, and a shard, all with a secret."""
    folder, secret = tmp_path_factory.mktemp("apart"), tokens.new_key()
    (folder / "secret").write_text(secret)
    with pytest.MonkeyPatch.context() as patch, running_redis(folder / "redis") as url:
        patch.setenv("PARAMSERVER_SECRET_FILE", str(folder / "secret"))
        patch.setenv("PARAMSERVER_TOKEN", tokens.make(secret.encode(), "admin"))
        cluster = Nodes(folder, url, 1, schedulers=2)
        try:
            cluster.start_scheduler()
            start_other(cluster)
            cluster.start_shard("shard-0")
            yield cluster
        except BaseException:
            print(cluster.logs())
            raise
        finally:
            cluster.stop()


@pytest.fixture
def apart(nodes_apart: Nodes) -> tuple[Nodes, list[Path]]:
    """The cluster, whose first scheduler leads, and its two folders of checkpoints."""
    if leader(nodes_apart) == 1:
        end(nodes_apart, 1)
    if nodes_apart.processes["scheduler-1"].poll() is not None:
        eventually(lambda: leader(nodes_apart) == 0, what="the first scheduler's leading")
        start_other(nodes_apart)
    return nodes_apart, [nodes_apart.folder / state / "checkpoints" for state in ("state", "other")]


def start_other(cluster: Nodes) -> None:
    """Start the second scheduler."""
    cluster.start_scheduler(1, "--state-dir", str(cluster.folder / "other"))


def end(cluster: Nodes, index: int) -> None:
    """Stop a scheduler, and wait until it has ended."""
    signal_to(cluster, index, signal.SIGTERM)
    cluster.processes[process_name(index)].wait(START_S)


def test_a_checkpoint_is_had_from_the_scheduler_that_wrote_it(apart: tuple[Nodes, list[Path]]) -> None:
    """Schedulers with separate folders both serve and restore a checkpoint, and remove others from both."""
    cluster, folders = apart
    reader = {"authorization": f"Bearer {tokens.make((cluster.folder / 'secret').read_bytes(), 'reader')}"}
    name = summing_model(cluster, "async")
    cluster.call("PATCH", f"/models/{name}", {"checkpoint": {"keep": 1}}, status=200)
    cluster.post("/push", {"model": name, "grads": {"w": [1.0] * 5}}, status=200)
    made = cluster.post(f"/models/{name}/checkpoints", status=201)
    assert made["scheduler"] == "scheduler"
    cluster.post("/push", {"model": name, "grads": {"w": [1.0] * 5}}, status=200)

    end(cluster, 0)
    path = f"/models/{name}/checkpoints/{made['name']}/model.safetensors"
    other = cluster.urls[1]
    eventually(lambda: leader(cluster) == 1)
    eventually(lambda: cluster.http.get(other + path).json()["code"] == "unavailable", within_s=30.0)
    one = f"/models/{name}/checkpoints/{made['name']}"
    assert cluster.http.delete(other + one).json()["code"] == "unavailable"
    cluster.start_scheduler()
    assert leader(cluster) == 1
    # The leader learns from its next lease renewal that the other scheduler is back.
    eventually(lambda: cluster.http.get(other + path).status_code == 200)
    files = [cluster.http.get(u + path, headers=reader) for u in cluster.urls]
    assert [f.status_code for f in files] == [200, 200]
    assert load(files[0].content)["w"].tolist() == load(files[1].content)["w"].tolist() == [1.0] * 5
    assert cluster.get(path.replace("model.safe", "../model.safe"), status=405)
    assert not (folders[1] / name / made["name"]).exists()

    cluster.post(f"/models/{name}/restore", {"checkpoint": "latest"}, status=200)
    assert cluster.post("/pull", {"model": name})["params"]["w"] == [1.0] * 5
    assert not (folders[1] / name / made["name"]).exists(), "no copy stays"
    cluster.post("/push", {"model": name, "grads": {"w": [1.0] * 5}}, status=200)
    cluster.post(f"/models/{name}/checkpoints", status=201)
    eventually(lambda: not any((f / name / made["name"]).exists() for f in folders), what="the removal")
    (last,) = cluster.get(f"/models/{name}/checkpoints")["items"]
    shutil.copytree(last["path"], folders[0] / name / last["name"])  # as one that an earlier version fetched
    cluster.call("DELETE", f"/models/{name}/checkpoints/{last['name']}", status=204)
    assert not any((f / name / last["name"]).exists() for f in folders)
    assert cluster.get(f"/models/{name}/checkpoints")["items"] == []


def test_what_the_rule_deleted_while_a_scheduler_was_away_is_deleted_when_it_leads(
    apart: tuple[Nodes, list[Path]],
) -> None:
    """A checkpoint that `keep` removed from the list while the scheduler that wrote it was down does not stay there."""
    cluster, folders = apart
    name = summing_model(cluster, "async")
    cluster.call("PATCH", f"/models/{name}", {"checkpoint": {"keep": 1}}, status=200)
    cluster.post("/push", {"model": name, "grads": {"w": [1.0] * 5}}, status=200)
    old = cluster.post(f"/models/{name}/checkpoints", status=201)
    end(cluster, 0)
    eventually(lambda: leader(cluster) == 1)
    path = f"{cluster.urls[1]}/models/{name}/checkpoints"
    new = cluster.http.post(path).json()
    assert [c["name"] for c in cluster.http.get(path).json()["items"]] == [new["name"]]
    assert (folders[0] / name / old["name"]).exists()

    cluster.start_scheduler()
    end(cluster, 1)
    eventually(lambda: leader(cluster) == 0, within_s=30.0)

    eventually(lambda: not (folders[0] / name / old["name"]).exists(), what="the removal")
    assert (folders[1] / name / new["name"]).exists()


def test_files_of_a_checkpoint_are_those_of_the_model_that_lists_it(apart: tuple[Nodes, list[Path]]) -> None:
    """A checkpoint folder that an earlier model of the same name left at a scheduler is not served for a later one."""
    cluster, folders = apart
    name = summing_model(cluster, "async")
    path = f"/models/{name}/checkpoints/final/model.safetensors"
    earlier, spec = [f / name / "final" for f in folders], cluster.get(f"/models/{name}")["spec"]
    cluster.post("/push", {"model": name, "grads": {"w": [1.0] * 5}}, status=200)
    cluster.post(f"/models/{name}/checkpoints", {"name": "final"}, status=201)
    cluster.call("DELETE", f"/models/{name}")
    assert load(cluster.http.get(path).content)["w"].tolist() == [1.0] * 5, "a checkpoint outlives its model"
    cluster.post("/models", spec, status=201)
    assert cluster.get(path, status=404)["code"] == "unknown_checkpoint"

    earlier[1].parent.mkdir(parents=True)
    earlier[0].rename(earlier[1])  # as if the other scheduler had led then
    cluster.post("/push", {"model": name, "grads": {"w": [2.0] * 5}}, status=200)
    cluster.post(f"/models/{name}/checkpoints", {"name": "final"}, status=201)
    end(cluster, 0)
    eventually(lambda: leader(cluster) == 1)
    cluster.start_scheduler()

    for url in cluster.urls:
        # The leader learns from its next lease renewal that the other scheduler is back.
        eventually(lambda url=url: cluster.http.get(url + path).is_success)  # type: ignore[misc]
        assert load(cluster.http.get(url + path).content)["w"].tolist() == [2.0] * 5
    shutil.rmtree(earlier[0])
    shutil.copytree(earlier[1], earlier[0])
    assert cluster.get(path, status=404)["code"] == "unknown_checkpoint"
    shutil.rmtree(earlier[1])
    assert cluster.post(f"/models/{name}/restore", {"checkpoint": "final"}, status=404)


def test_an_empty_redis_is_refused_where_a_state_is_expected(tmp_path: Path) -> None:
    """With --expect-state and an empty Redis a scheduler exits, names the option and writes nothing."""
    with running_redis(tmp_path / "redis") as url, Redis.from_url(url) as plain:
        lone = Nodes(tmp_path, url, 0)
        own = ("--port", str(lone.port), "--redis", url, "--state-dir", str(tmp_path / "state"), "--expect-state")
        lone.start("scheduler", "paramserver_scheduler", *own)
        assert lone.processes["scheduler"].wait(START_S) == 1
        assert "--expect-state" in lone.logs()
        assert plain.get("ps:term") is None
        lone.start_scheduler()
        lone.stop()
        lone.start("scheduler", "paramserver_scheduler", *own)
        with httpx.Client(base_url=lone.url, timeout=30.0) as http:
            eventually(lambda: http.get("/readyz").status_code == 200, within_s=START_S)
        lone.stop()
