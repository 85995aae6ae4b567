"""Several schedulers: one leads, the others forward to it, and training continues whatever happens to the leader."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from redis import Redis
from safetensors.numpy import load

import paramserver as ps
from paramserver_node import redis_server, tokens

from .processes import Nodes, eventually, nodes, unique

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

TAKE_OVER_S = 5.0
"""The promised bound: after `kill -9` of the leader another one leads within this time."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two schedulers, either of which tests may kill and restart, and two shards."""
    with nodes(tmp_path_factory.mktemp("nodes"), shards=2, schedulers=2) as running:
        yield running


def leader(cluster: Nodes) -> int:
    """The index of the scheduler that leads, according to the first one that answers."""
    for url in cluster.urls:
        try:
            found = cluster.http.get(f"{url}/status", timeout=2.0)
        except httpx.HTTPError:
            continue
        if found.status_code == 200:
            schedulers = [n for n in found.json()["nodes"] if n["role"] == "scheduler"]
            (active,) = [n["addresses"][0] for n in schedulers if n["state"] == "active"]
            return cluster.urls.index(active)
    raise AssertionError("nobody leads")


def term_of(cluster: Nodes, index: int) -> int:
    """The term that the scheduler of that index reports, as soon as it reports one."""

    def asked() -> int:
        found = cluster.http.get(f"{cluster.urls[index]}/status", timeout=1.0)
        return int(found.json()["cluster"]["term"]) if found.status_code == 200 else 0

    return eventually(asked, within_s=10.0, what="a leader")


def process_name(index: int) -> str:
    """The name that `Nodes` gives the scheduler of that index."""
    return f"scheduler-{index}" if index else "scheduler"


def signal_to(cluster: Nodes, index: int, number: signal.Signals) -> None:
    """Send a signal to the scheduler of that index."""
    os.kill(cluster.processes[process_name(index)].pid, number)


def model(cluster: Nodes, mode: str = "sync") -> str:
    """Create a model of five elements that adds up what is pushed; return its name."""
    name = unique("m")
    spec = {
        "name": name,
        "params": {"w": {"shape": [5]}},
        "optimizer": {"name": "sum"},
        "consistency": {"mode": mode},
        "partitions": 2,
    }
    eventually(lambda: cluster.call("POST", "/models", spec)["name"] == name, what="the model")
    return name


class Training:
    """Workers of the SDK that push ones in every iteration until they are stopped."""

    def __init__(self, urls: str, model: str, workers: int) -> None:
        self.done = [0] * workers
        """Finished iterations of each worker."""
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._urls, self._model = urls, model
        self._threads = [threading.Thread(target=self._work, args=(i,), daemon=True) for i in range(workers)]

    def _work(self, index: int) -> None:
        try:
            with ps.connect(self._urls) as client, client.model(self._model).worker(name=f"w{index}") as worker:
                while not self._stop.is_set():
                    worker.push({"w": np.ones(5, np.float32)})
                    worker.clock()
                    self.done[index] += 1
        except BaseException as e:  # reported by the test
            self.errors.append(e)

    def goes_on(self, within_s: float = 20.0) -> None:
        """Wait until every worker has finished two more iterations."""
        goal = [n + 2 for n in self.done]

        def reached() -> bool:
            assert not self.errors, self.errors
            return all(n >= g for n, g in zip(self.done, goal, strict=True))

        eventually(reached, within_s=within_s, what="the training's going on")

    @contextmanager
    def running(self) -> Iterator["Training"]:
        """Train while the block runs; fail if a worker saw an error."""
        for thread in self._threads:
            thread.start()
        try:
            self.goes_on()
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(60.0)
        assert self.errors == []


def test_one_leads_and_the_other_hands_on(cluster: Nodes) -> None:
    """Both schedulers answer alike: reads, decisions, pushes, long polls, feeds and server-sent events."""
    assert {cluster.http.get(f"{u}/readyz").status_code for u in cluster.urls} == {200}
    first = leader(cluster)
    nodes_seen = {(n["name"], n["state"]) for n in cluster.get("/status")["nodes"] if n["role"] == "scheduler"}
    assert nodes_seen == {(process_name(first), "active"), (process_name(1 - first), "standby")}
    name = model(cluster, "async")
    for url in cluster.urls:
        with httpx.Client(base_url=url, timeout=30.0) as http:
            assert http.get(f"/models/{name}").json()["name"] == name
            assert http.post("/push", json={"model": name, "grads": {"w": [1.0] * 5}}).json()["state"] == "applied"
            assert http.post(f"/models/{name}/workers", json={}).status_code == 201
            assert http.get("/models/nothing").json()["code"] == "unknown_model"
            epoch = http.get("/map").json()["map_epoch"]
            waited_from = time.monotonic()
            http.get("/map", params={"since": epoch, "wait_s": 1})
            assert time.monotonic() - waited_from >= 0.9
            for path, first_bytes in (("/events", b"event: map"), ("/internal/feed", b'{"type":"map"')):
                with http.stream("GET", path) as stream:
                    assert next(stream.iter_bytes()).startswith(first_bytes)
            big = http.post("/models", content=b'{"x": "' + b"y" * (5 << 20) + b'"}')
            assert big.json()["code"] == "too_large"
    assert cluster.post("/pull", {"model": name, "min_version": 2, "wait_s": 10})["params"]["w"] == [2.0] * 5


def test_kill_of_the_leader_twice_in_a_row(cluster: Nodes) -> None:
    """Each time a leader is killed the other scheduler leads within 5 s, and no worker sees an error."""
    name = model(cluster)
    with Training(",".join(cluster.urls), name, 2).running() as training:
        for _ in range(2):
            old = leader(cluster)
            term = term_of(cluster, old)
            cluster.kill(process_name(old))
            killed_s = time.monotonic()
            assert term_of(cluster, 1 - old) > term
            assert time.monotonic() - killed_s < TAKE_OVER_S
            training.goes_on()
            cluster.start_scheduler(old)
    values = cluster.post("/pull", {"model": name})["params"]["w"]
    version = cluster.get(f"/models/{name}")["clock"]
    assert values == [float(values[0])] * 5
    assert version >= min(training.done)


def test_a_leader_that_is_told_to_stop_hands_over_at_once(cluster: Nodes) -> None:
    """After SIGTERM of the leader another one leads within 2 s, well before the lease would expire."""
    old = leader(cluster)
    term = term_of(cluster, old)
    signal_to(cluster, old, signal.SIGTERM)
    told_s = time.monotonic()
    eventually(lambda: term_of(cluster, 1 - old) > term, within_s=TAKE_OVER_S)
    assert time.monotonic() - told_s < 2.0
    assert cluster.processes[process_name(old)].wait(20) == 0
    cluster.start_scheduler(old)


def test_a_paused_leader_says_nothing_before_it_asked(cluster: Nodes) -> None:
    """A leader that was paused past its lease and replaced answers as a standby when it resumes."""
    name = model(cluster)
    old = leader(cluster)
    process = cluster.processes[process_name(old)]
    with Training(",".join(cluster.urls), name, 2).running() as training:
        signal_to(cluster, old, signal.SIGSTOP)
        try:
            term = term_of(cluster, 1 - old)
            training.goes_on(within_s=30.0)
        finally:
            signal_to(cluster, old, signal.SIGCONT)
        found = cluster.http.get(f"{cluster.urls[old]}/status")
        # Its first answer after the pause is the new leader's, or 503 if it could not ask one.
        assert found.status_code == 503 or found.json()["cluster"]["term"] == term
        assert term_of(cluster, old) == term
        training.goes_on()
    assert process.poll() is None
    assert leader(cluster) == 1 - old


def test_redis_away_keeps_the_leader(cluster: Nodes) -> None:
    """While Redis is stopped longer than a lease the leader answers heartbeats, and its term continues afterwards."""
    name = model(cluster, "async")
    before = leader(cluster)
    term = cluster.get("/status")["cluster"]["term"]
    worker = cluster.post(f"/models/{name}/workers", {"name": "w0"}, status=201)["worker"]
    pid = redis_server.serving_pid(int(cluster.redis_url.rsplit(":", 1)[1].split("/")[0]))
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        stopped_s = time.monotonic()
        while time.monotonic() - stopped_s < 5.0:
            for url in cluster.urls:
                beat = cluster.http.put(f"{url}/models/{name}/workers/{worker}", json={"epoch": 1})
                assert beat.status_code == 200, beat.text
        assert cluster.get("/status")["cluster"]["redis"] == "away"
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: cluster.get("/status")["cluster"]["redis"] == "ok", within_s=5.0)
    assert leader(cluster) == before
    status: Any = cluster.get("/status")["cluster"]
    assert status["term"] == term


def test_an_emptied_redis_is_written_anew_by_the_leader(cluster: Nodes) -> None:
    """After FLUSHALL the leader starts a new term and writes its models to Redis again within 5 s."""
    name = model(cluster, "async")
    before, term = leader(cluster), cluster.get("/status")["cluster"]["term"]
    with Redis.from_url(cluster.redis_url) as plain:
        plain.flushall()
        eventually(lambda: plain.hexists("ps:state", f"model:{name}"), within_s=5.0, what="the state's return")
        assert int(plain.get("ps:term") or 0) > term
    assert leader(cluster) == before
    assert cluster.post("/push", {"model": name, "grads": {"w": [1.0] * 5}}, status=200)["state"] == "applied"


@contextmanager
def apart(folder: Path) -> Iterator[tuple[Nodes, list[Path]]]:
    """Two schedulers with separate state directories, as on two machines, and a shard.

    Yields them and the two folders of checkpoints. The first scheduler leads.
    """
    with redis_server.running(folder / "redis") as url:
        cluster = Nodes(folder, url, 1, schedulers=2)
        try:
            cluster.start_scheduler()
            cluster.start_scheduler(1, "--state-dir", str(folder / "other"))
            cluster.start_shard("shard-0")
            yield cluster, [folder / "state" / "checkpoints", folder / "other" / "checkpoints"]
        except BaseException:
            print(cluster.logs())
            raise
        finally:
            cluster.stop()


def test_a_checkpoint_is_had_from_the_scheduler_that_wrote_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers with separate folders both serve and restore a checkpoint, and expired ones are removed from both."""
    secret = tokens.new_key()
    (tmp_path / "secret").write_text(secret)
    monkeypatch.setenv("PARAMSERVER_SECRET_FILE", str(tmp_path / "secret"))
    monkeypatch.setenv("PARAMSERVER_TOKEN", tokens.make(secret.encode(), "admin"))
    reader = {"authorization": f"Bearer {tokens.make(secret.encode(), 'reader')}"}
    with apart(tmp_path) as (cluster, folders):
        name = model(cluster, "async")
        cluster.call("PATCH", f"/models/{name}", {"checkpoint": {"keep": 1}}, status=200)
        cluster.post("/push", {"model": name, "grads": {"w": [1.0] * 5}}, status=200)
        made = cluster.post(f"/models/{name}/checkpoints", status=201)
        assert made["scheduler"] == "scheduler"
        cluster.post("/push", {"model": name, "grads": {"w": [1.0] * 5}}, status=200)

        signal_to(cluster, 0, signal.SIGTERM)
        cluster.processes["scheduler"].wait(20)
        path = f"/models/{name}/checkpoints/{made['name']}/model.safetensors"
        other = cluster.urls[1]
        eventually(lambda: leader(cluster) == 1)
        eventually(lambda: cluster.http.get(other + path).json()["code"] == "unavailable", within_s=30.0)
        cluster.start_scheduler()
        assert leader(cluster) == 1
        # The leader learns from its next lease renewal that the other scheduler is back.
        eventually(lambda: cluster.http.get(other + path).status_code == 200, within_s=10.0)
        files = [cluster.http.get(u + path, headers=reader) for u in cluster.urls]
        assert [f.status_code for f in files] == [200, 200]
        assert load(files[0].content)["w"].tolist() == load(files[1].content)["w"].tolist() == [1.0] * 5
        assert cluster.get(path.replace("model.safe", "../model.safe"), status=404)
        assert not (folders[1] / name / made["name"]).exists()

        cluster.post(f"/models/{name}/restore", {"checkpoint": "latest"}, status=200)
        assert cluster.post("/pull", {"model": name})["params"]["w"] == [1.0] * 5
        assert (folders[1] / name / made["name"]).exists()
        cluster.post("/push", {"model": name, "grads": {"w": [1.0] * 5}}, status=200)
        cluster.post(f"/models/{name}/checkpoints", status=201)
        eventually(lambda: not any((f / name / made["name"]).exists() for f in folders), what="the removal")
        assert len(cluster.get(f"/models/{name}/checkpoints")["items"]) == 1


def test_files_of_a_checkpoint_are_those_of_the_model_that_lists_it(tmp_path: Path) -> None:
    """A checkpoint folder that an earlier model of the same name left at a scheduler is not served for a later one."""
    with apart(tmp_path) as (cluster, folders):
        name = model(cluster, "async")
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
        signal_to(cluster, 0, signal.SIGTERM)
        cluster.processes["scheduler"].wait(20)
        cluster.start_scheduler()
        eventually(lambda: leader(cluster) == 1)

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
    with redis_server.running(tmp_path / "redis") as url, Redis.from_url(url) as plain:
        lone = Nodes(tmp_path, url, 0)
        own = ("--port", str(lone.port), "--redis", url, "--state-dir", str(tmp_path / "state"), "--expect-state")
        lone.start("scheduler", "paramserver_scheduler", *own)
        assert lone.processes["scheduler"].wait(20) == 1
        assert "--expect-state" in lone.logs()
        assert plain.get("ps:term") is None
        lone.start_scheduler()
        lone.stop()
        lone.start("scheduler", "paramserver_scheduler", *own)
        http = httpx.Client(base_url=lone.url)
        eventually(lambda: http.get("/readyz").status_code == 200)
        http.close()
        lone.stop()
