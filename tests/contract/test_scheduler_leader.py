"""Several schedulers: one leads, the others forward to it, and training continues whatever happens to the leader."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import numpy as np
import pytest
from redis import Redis
from safetensors.numpy import save_file
from tests.refusals import refused_with
from tests.waiting import eventually

import paramserver as ps

from .processes import Nodes, Patient, leader, nodes, process_name, signal_to, summing_model, unique

pytestmark = pytest.mark.process

TAKE_OVER_S = 5.0
"""The promised bound: after `kill -9` of the leader another one leads within this time."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two schedulers, either of which tests may kill and restart, and two shards."""
    with nodes(tmp_path_factory.mktemp("nodes"), shards=2, schedulers=2) as running:
        yield running


def term_of(cluster: Nodes, index: int) -> int:
    """The term that the scheduler of that index reports, as soon as it reports one."""

    def asked() -> int:
        found = cluster.http.get(f"{cluster.urls[index]}/status", timeout=1.0)
        return int(found.json()["cluster"]["term"]) if found.status_code == 200 else 0

    return eventually(asked, what="a leader")


@contextmanager
def started_again(cluster: Nodes, index: int) -> Iterator[None]:
    """Start the scheduler of that index again, which ends in the block: later tests need it, whatever fails."""
    try:
        yield
    finally:
        cluster.kill(process_name(index))
        cluster.start_scheduler(index)


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
    name = summing_model(cluster, "async")
    for url in cluster.urls:
        with httpx.Client(transport=Patient(), base_url=url, timeout=30.0) as http:
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
    """Each time a leader is killed the other leads the same cluster within 5 s, and no worker sees an error."""
    name, cluster_id = summing_model(cluster), cluster.get("/map")["cluster"]

    def in_time(last: list[float]) -> bool:
        return len(last) == 2 and max(last) < TAKE_OVER_S

    with Training(",".join(cluster.urls), name, 2).running() as training:
        took_s: list[float] = []
        while not in_time(took_s[-2:]) and len(took_s) < 5:  # more often, if the machine stood still
            old = leader(cluster)
            term = term_of(cluster, old)
            with started_again(cluster, old):
                cluster.kill(process_name(old))
                killed_s = time.monotonic()
                assert term_of(cluster, 1 - old) > term
                took_s.append(time.monotonic() - killed_s)
                training.goes_on()
            assert cluster.get("/map")["cluster"] == cluster_id
    assert in_time(took_s[-2:]), took_s
    values = cluster.post("/pull", {"model": name})["params"]["w"]
    version = cluster.get(f"/models/{name}")["clock"]
    assert values == [float(values[0])] * 5
    assert version >= min(training.done)


def test_a_leader_that_is_told_to_stop_hands_over_at_once(cluster: Nodes) -> None:
    """After SIGTERM of the leader another one leads within 2 s: no lease, renewed every second, expires as soon."""
    took_s: list[float] = []
    while not took_s or (took_s[-1] >= 2.0 and len(took_s) < 3):  # again, if the machine stood still meanwhile
        old = leader(cluster)
        term = term_of(cluster, old)
        with started_again(cluster, old):
            signal_to(cluster, old, signal.SIGTERM)
            told_s = time.monotonic()
            eventually(lambda old=old, term=term: term_of(cluster, 1 - old) > term)  # type: ignore[misc]
            took_s.append(time.monotonic() - told_s)
            assert cluster.processes[process_name(old)].wait(20) == 0
    assert took_s[-1] < 2.0, took_s


def test_a_paused_leader_says_nothing_before_it_asked(cluster: Nodes) -> None:
    """A leader that was paused past its lease and replaced answers as a standby when it resumes."""
    name = summing_model(cluster)
    old = leader(cluster)
    process = cluster.processes[process_name(old)]
    with Training(",".join(cluster.urls), name, 2).running() as training:
        with cluster.paused(process_name(old)):
            term = term_of(cluster, 1 - old)
            training.goes_on(within_s=30.0)
        found = cluster.http.get(f"{cluster.urls[old]}/status")
        # Its first answer after the pause is the new leader's, or 503 if it could not ask one.
        assert found.status_code == 503 or found.json()["cluster"]["term"] == term
        assert term_of(cluster, old) == term
        training.goes_on()
    assert process.poll() is None
    assert leader(cluster) == 1 - old


@pytest.mark.parametrize("work", ["restore", "files"])
def test_a_paused_leader_sets_nothing_once_its_successor_leads(cluster: Nodes, work: str) -> None:
    """A leader that is paused amid setting partitions does not go on with it over what the next one acknowledged.

    It restores a model, or sets the first values from a file, and the next one has done so, too.
    """
    name, size, old = unique("m"), 1 << 16, leader(cluster)
    (cluster.folder / "state").mkdir(exist_ok=True)
    save_file({"w": np.zeros(size, np.float32)}, cluster.folder / "state" / "first")
    params = {"w": {"shape": [size], "init": {"kind": "file", "path": "first"}}}
    path, body = "/models", {"name": name, "params": params, "optimizer": {"name": "sum"}, "partitions": 64}
    if work == "restore":
        cluster.post(path, body, status=201)
        cluster.post(f"/models/{name}/checkpoints", {"name": "c"}, status=201)
        path, body = f"/models/{name}/restore", {"checkpoint": "c"}
    term, shards = term_of(cluster, old), [cluster.processes[s] for s in cluster.shard_ports]
    for shard in shards:
        shard.send_signal(signal.SIGSTOP)
    with suppress(httpx.ReadTimeout):  # the first few partitions are sent
        cluster.http.post(cluster.urls[old] + path, json=body, timeout=1.5)
    signal_to(cluster, old, signal.SIGSTOP)
    try:
        for shard in shards:
            shard.send_signal(signal.SIGCONT)
        later = eventually(lambda: max(0, term_of(cluster, 1 - old) - term), what="the next leader") + term
        eventually(lambda: cluster.http.post(cluster.urls[1 - old] + path, json=body).is_success, what=work)
        with ps.connect(cluster.urls[1 - old]) as client:
            version = client.model(name).push({"w": np.ones(size, np.float32)}).version
    finally:
        signal_to(cluster, old, signal.SIGCONT)
    eventually(lambda: term_of(cluster, old) == later, what="the old one's end")

    with ps.connect(cluster.url) as client:
        with refused_with("version_not_reached"):  # for so long something may still change
            client.model(name).pull(min_version=version + 1, wait_s=1.0)
        assert set(client.model(name).pull()["w"]) == {1.0}
    cluster.call("DELETE", f"/models/{name}")


def test_redis_away_keeps_the_leader(cluster: Nodes) -> None:
    """While Redis is stopped longer than a lease the leader answers heartbeats, and its term continues afterwards."""
    name = summing_model(cluster, "async")
    before = leader(cluster)
    term = cluster.get("/status")["cluster"]["term"]
    worker = cluster.post(f"/models/{name}/workers", {"name": "w0", "lease_s": 60}, status=201)["worker"]
    with cluster.paused("redis"):
        stopped_s = time.monotonic()
        while time.monotonic() - stopped_s < 5.0:
            for url in cluster.urls:
                beat = cluster.http.put(f"{url}/models/{name}/workers/{worker}", json={"epoch": 1})
                assert beat.status_code == 200, beat.text
        assert cluster.get("/status")["cluster"]["redis"] == "away"
    eventually(lambda: cluster.get("/status")["cluster"]["redis"] == "ok", what="the return of Redis")
    assert leader(cluster) == before
    status: Any = cluster.get("/status")["cluster"]
    assert status["term"] == term


def test_an_emptied_redis_is_written_anew_by_the_leader(cluster: Nodes) -> None:
    """After FLUSHALL the leader starts a new term and writes its models to Redis again."""
    name = summing_model(cluster, "async")
    before, term = leader(cluster), cluster.get("/status")["cluster"]["term"]
    with Redis.from_url(cluster.redis_url) as plain:
        plain.flushall()
        eventually(lambda: plain.hexists("ps:state", f"model:{name}"), what="the state's return")
        assert int(plain.get("ps:term") or 0) > term
    assert leader(cluster) == before
    assert cluster.post("/push", {"model": name, "grads": {"w": [1.0] * 5}}, status=200)["state"] == "applied"
