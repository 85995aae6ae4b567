"""Journaled pushes survive killed shards and a stopped Redis; a stopping shard stores everything first."""

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis as redis_client
from tests.waiting import eventually

from .processes import START_S, Nodes, nodes, summing_model, unique

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

CELLS = 10


@pytest.fixture
def always(cluster: Nodes) -> Iterator[None]:
    """A Redis that has a write on its disk before it answers; that of the tests cannot offer `fsynced` without."""
    with redis_client.Redis.from_url(cluster.redis_url) as r:
        r.config_set("appendfsync", "always")
        try:
            yield
            cluster.empty()  # without it what is at `fsynced` could be neither stored nor handed over
        finally:
            r.config_set("appendfsync", "everysec")


def made(cluster: Nodes, ack: str = "journaled", **fields: Any) -> str:
    """Create a model of ten numbers that adds up what is pushed; return its name."""
    return summing_model(cluster, "async", CELLS, **{"ack": ack, "partitions": 4} | fields)


class Pusher:
    """Adds one to every number again and again, and repeats each push under its id until it is acknowledged."""

    def __init__(self, cluster: Nodes, name: str, worker: str = "w") -> None:
        self.acknowledged = 0
        self.sent = 0
        self.codes: set[str] = set()
        """Error codes of the refusals."""
        self.slowest_s = 0.0
        self._urls = [f"http://127.0.0.1:{port}" for port in cluster.shard_ports.values()]
        self._name, self._worker = name, worker
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Pusher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(90)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with httpx.Client(timeout=4.0) as http:  # a stopped process accepts connections and never answers
            while not self._over.is_set():
                self.sent += 1
                began = time.monotonic()
                while not self._push(http, self.sent):
                    if time.monotonic() - began > 60:
                        return
                    self._over.wait(0.05)
                self.acknowledged = self.sent
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def _push(self, http: httpx.Client, seq: int) -> bool:
        body = {"model": self._name, "grads": {"w": [1.0] * CELLS}, "worker": self._worker, "epoch": 1, "seq": seq}
        self._urls.append(self._urls.pop(0))
        try:
            answer = http.post(f"{self._urls[0]}/push", json=body)
        except httpx.HTTPError:
            return False
        if answer.status_code != 200:
            assert answer.json()["retryable"], answer.text
            assert answer.status_code != 503 or "retry-after" in answer.headers, answer.text
            self.codes.add(answer.json()["code"])
        return answer.status_code == 200

    def reach(self, count: int, within_s: float = 60.0) -> None:
        """Wait until so many pushes are acknowledged."""
        eventually(lambda: self.acknowledged >= count, within_s=within_s, what=f"{count} acknowledged pushes")


def pull(cluster: Nodes, name: str) -> list[float]:
    """The ten numbers from the first shard that answers, or an empty list."""
    for port in cluster.shard_ports.values():
        try:
            answer = httpx.post(f"http://127.0.0.1:{port}/pull", json={"model": name}, timeout=15)
        except httpx.HTTPError:
            continue
        if answer.status_code == 200:
            values: list[float] = answer.json()["params"]["w"]
            return values
    return []


def exact(cluster: Nodes, name: str, count: int) -> None:
    """Assert that every number is `count`: no push was lost or applied twice."""
    assert eventually(lambda: pull(cluster, name), within_s=START_S, what="an answer") == [float(count)] * CELLS


def ready(cluster: Nodes, name: str) -> bool:
    return httpx.get(f"http://127.0.0.1:{cluster.shard_ports[name]}/readyz").status_code == 200


@pytest.mark.usefixtures("always")
def test_killed_shards_lose_no_acknowledged_push(cluster: Nodes) -> None:
    """While a worker pushes, each shard is killed and restarted, and every push is applied exactly once."""
    name = made(cluster, "fsynced")
    with Pusher(cluster, name) as pusher:
        for victim in ("shard-1", "shard-0"):
            pusher.reach(pusher.acknowledged + 2)
            cluster.kill(victim)
            cluster.start_shard(victim)
            eventually(partial(ready, cluster, victim), within_s=START_S, what="the shard's return")
        pusher.reach(pusher.acknowledged + 2)
    exact(cluster, name, pusher.acknowledged)


def test_a_shard_that_is_told_to_stop_hands_over_everything(cluster: Nodes) -> None:
    """A shard that gets SIGTERM under load is not ready, hands over its partitions and exits with 0 within 25 s."""
    name = made(cluster, "applied")
    with Pusher(cluster, name) as pusher:
        pusher.reach(20)
        process = cluster.processes["shard-1"]
        with cluster.paused("scheduler"):  # so that nothing is handed over before the shard is found not ready
            process.send_signal(signal.SIGTERM)
            probe = f"http://127.0.0.1:{cluster.shard_ports['shard-1']}/readyz"
            told = {"status": "not ready", "reason": "this shard is stopping"}
            eventually(lambda: httpx.get(probe).json() == told, within_s=15, what="being not ready")
            assert httpx.get(probe, timeout=30).status_code == 503
        began = time.monotonic()
        process.wait(25)
        assert process.returncode == 0
        assert time.monotonic() - began < 15, "what cannot be handed over is stored after 15 s"
        pusher.reach(pusher.acknowledged + 10)
    try:
        exact(cluster, name, pusher.acknowledged)
        owners = {p["shard"] for p in cluster.get(f"/models/{name}")["partitions"]}
        assert owners == {"shard-0"}
        assert not cluster.get("/map")["shards"].get("shard-1", {"alive": False})["alive"]
    finally:
        cluster.start_shard("shard-1")
        eventually(lambda: ready(cluster, "shard-1"), within_s=START_S)


def test_a_stopped_shard_never_answers_for_what_others_own(cluster: Nodes) -> None:
    """A shard paused past its lease and replaced never answers with outdated values when it resumes."""
    name = made(cluster)
    with Pusher(cluster, name) as pusher:
        pusher.reach(5)
        with cluster.paused("shard-1"):
            eventually(
                lambda: {p["shard"] for p in cluster.get(f"/models/{name}")["partitions"]} == {"shard-0"},
                within_s=40,
                what="the take-over",
            )
            pusher.reach(pusher.acknowledged + 1)  # each other one asks the stopped shard first, for 4 s
            with redis_client.Redis.from_url(cluster.redis_url) as r:
                assert int(r.hget("ps:fence", "shard-1") or 0) >= 1
            floor = pusher.acknowledged
        for _ in range(20):
            answer = httpx.post(
                f"http://127.0.0.1:{cluster.shard_ports['shard-1']}/pull", json={"model": name}, timeout=15
            )
            if answer.status_code == 200:
                assert min(answer.json()["params"]["w"]) >= floor
            else:
                assert answer.status_code in (421, 503), answer.text
        eventually(lambda: ready(cluster, "shard-1"), within_s=60)
    exact(cluster, name, pusher.acknowledged)


@pytest.mark.usefixtures("always")
def test_fsynced_is_refused_where_redis_keeps_no_file(cluster: Nodes) -> None:
    """Without an append-only file pushes of level `fsynced` are 503, their model's own or asked for; not with one.

    Nor is a model of that level made.
    """
    name, synced = made(cluster), made(cluster, "fsynced")
    body = {"grads": {"w": [1.0] * CELLS}, "ack": "fsynced", "worker": "w", "epoch": 1, "seq": 1}
    url = f"http://127.0.0.1:{cluster.shard_ports['shard-0']}/push"
    with redis_client.Redis.from_url(cluster.redis_url) as r:
        r.config_set("appendonly", "no")
        try:
            spec = {"name": unique("m"), "ack": "fsynced", "params": {"w": {"shape": [2]}}}
            refused = cluster.post("/models", spec, status=422)
            assert refused["code"] == "not_built"
            assert "appendonly" in refused["hint"]
            with ThreadPoolExecutor() as both:  # each takes the 10 s after which what is not durable is refused
                answers = both.map(lambda model: cluster.http.post(url, json=body | {"model": model}), (synced, name))
            for answer in answers:
                assert (answer.status_code, answer.json().get("code")) == (503, "storage_unavailable"), answer.text
                assert "retry-after" in answer.headers
        finally:
            r.config_set("appendonly", "yes")
    for model in (synced, name):
        again = partial(httpx.post, url, json=body | {"model": model}, timeout=30)
        eventually(lambda push=again: push().status_code == 200, within_s=60)  # type: ignore[misc]
        exact(cluster, model, 1)
    cluster.post("/models", spec, status=201)


def test_redis_away_refuses_what_it_cannot_keep(cluster: Nodes) -> None:
    """While Redis is stopped journaled pushes are 503 with Retry-After and `applied` ones go on; no push is lost."""
    name = made(cluster)
    plain = made(cluster, "applied")
    with Pusher(cluster, name) as pusher, Pusher(cluster, plain, "p") as other:
        pusher.reach(5)
        with cluster.paused("redis"):
            eventually(lambda: "storage_unavailable" in pusher.codes, within_s=40, what="a refusal")
            at = pusher.acknowledged
            other.reach(other.acknowledged + 10)
            assert pusher.acknowledged == at
        pusher.reach(pusher.acknowledged + 10)
    exact(cluster, name, pusher.acknowledged)
    exact(cluster, plain, other.acknowledged)


def stopped_and_started(cluster: Nodes) -> None:
    """Stop the only shard with SIGTERM, which must exit with 0 within 25 s, and start it again."""
    process = cluster.processes["shard-0"]
    process.send_signal(signal.SIGTERM)
    process.wait(25)
    assert process.returncode == 0
    cluster.start_shard("shard-0")


def test_the_last_shard_stores_everything_before_it_goes(lone: Nodes) -> None:
    """A shard without a successor stores applied and buffered pushes on SIGTERM and has them after its restart."""
    name = made(lone, "applied", consistency={"mode": "buffered", "count": 1000, "interval_ms": 600_000})
    plain = made(lone, "applied")
    url = f"http://127.0.0.1:{lone.shard_ports['shard-0']}/push"
    for model in (name, plain):
        for seq in range(1, 4):
            body = {"model": model, "grads": {"w": [1.0] * CELLS}, "worker": "w", "epoch": 1, "seq": seq}
            assert lone.http.post(url, json=body).status_code in (200, 202)
    stopped_and_started(lone)
    exact(lone, plain, 3)
    answer = lone.http.post(url, json={**body, "model": name})
    assert (answer.status_code, answer.json()["duplicate"]) == (202, True), answer.text


def clocks(cluster: Nodes, name: str, worker: dict[str, Any], first: int, last: int, timeline: int) -> None:
    """Run one worker's synchronous iterations [first, last), each of which adds one to every number."""
    for t in range(first, last):
        me = {"worker": worker["worker"], "epoch": worker["epoch"], "timeline": timeline}
        cluster.post("/push", me | {"model": name, "grads": {"w": [1.0] * CELLS}, "seq": t, "clock": t}, status=202)
        report = me | {"clock": t + 1, "wait_s": 30}
        assert cluster.post(f"/models/{name}/clock", report)["released"]


def test_a_synchronous_model_that_rests_loses_nothing_with_its_only_shard(lone: Nodes) -> None:
    """A synchronous model at `applied` loses no clock if its only shard stops, or is killed once its cut is stored."""
    name = made(lone, "applied", consistency={"mode": "sync"})
    worker = lone.post(f"/models/{name}/workers", {"name": "w0", "lease_s": 60}, status=201)
    clocks(lone, name, worker, 0, 4, timeline=0)
    stopped_and_started(lone)
    exact(lone, name, 4)

    document = lone.get(f"/models/{name}")
    assert (document["clock"], document["cut"], document["timeline"]) == (4, 4, 1)
    clocks(lone, name, worker, 4, 7, timeline=1)
    eventually(lambda: lone.get(f"/models/{name}")["cut"] == 7, within_s=30, what="a cut of what rests")
    lone.kill("shard-0")
    lone.start_shard("shard-0")
    exact(lone, name, 7)


def test_the_budget_does_not_hold_up_the_last_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only shard of a synchronous model at `applied` keeps its newest clock, though its budget is long spent."""
    monkeypatch.setenv("PARAMSERVER_SNAPSHOT_MIB_PER_S", "0.001")
    with nodes(tmp_path, shards=1) as cluster:
        params = {"w": {"shape": [CELLS]}, "more": {"shape": [1 << 15]}}  # 128 KiB, which the budget lets pass in 128 s
        name = made(cluster, "applied", consistency={"mode": "sync"}, params=params)
        worker = cluster.post(f"/models/{name}/workers", {"name": "w0", "lease_s": 60}, status=201)
        clocks(cluster, name, worker, 0, 4, timeline=0)
        assert cluster.get(f"/models/{name}")["cut"] is None
        stopped_and_started(cluster)
        exact(cluster, name, 4)
        assert cluster.get(f"/models/{name}")["cut"] == 4
