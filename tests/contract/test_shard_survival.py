"""What a shard keeps and answers when it, its Redis or its scheduler dies."""

import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis as redis_client
from tests.servers import free_port
from tests.waiting import eventually

from .processes import START_S, Nodes, summing_model

pytestmark = pytest.mark.process

STOPPED_S = 60.0
"""Longest wait for the end of a shard that is told to stop; it gives up what it cannot hand over or store sooner."""


def url(cluster: Nodes, index: int) -> str:
    return f"http://127.0.0.1:{cluster.shard_ports[f'shard-{index}']}"


def push(cluster: Nodes, name: str, seq: int, shard: int = 0) -> dict[str, Any]:
    """Add one to every number, as push `seq` of one worker."""
    body = {"model": name, "grads": {"w": [1.0] * 10}, "worker": "w", "epoch": 1, "seq": seq}
    answer = cluster.http.post(f"{url(cluster, shard)}/push", json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def pull(cluster: Nodes, name: str, shard: int = 0) -> list[float]:
    """Return the ten numbers."""
    answer = cluster.http.post(f"{url(cluster, shard)}/pull", json={"model": name})
    assert answer.status_code == 200, answer.text
    values: list[float] = answer.json()["params"]["w"]
    return values


def durable(cluster: Nodes, name: str) -> int:
    """The lowest version of all partitions in Redis."""
    return min(int(p["durable_version"]) for p in cluster.get(f"/models/{name}")["partitions"])


def test_a_killed_shard_comes_back_or_is_replaced_with_its_values_and_push_ids(cluster: Nodes) -> None:
    """After SIGKILL a restarted shard serves its snapshots and knows duplicate pushes; if it stays away, the other."""
    name = summing_model(cluster, "async", 10, partitions=4)
    push(cluster, name, 1)
    push(cluster, name, 2)
    eventually(lambda: durable(cluster, name) == 2, what="the snapshots")
    cluster.kill("shard-1")
    cluster.start_shard("shard-1")
    eventually(lambda: pull(cluster, name, 1) == [2.0] * 10, within_s=START_S, what="the shard's return")
    again = push(cluster, name, 2, shard=1)
    assert (again["duplicate"], again["version"]) == (True, 2)

    cluster.kill("shard-1")
    try:
        eventually(lambda: pull(cluster, name) == [2.0] * 10, within_s=30, what="the take-over")
        assert {p["shard"] for p in cluster.get(f"/models/{name}")["partitions"]} == {"shard-0"}
        assert push(cluster, name, 2)["duplicate"] is True
        assert push(cluster, name, 3)["duplicate"] is False
        assert pull(cluster, name) == [3.0] * 10
    finally:
        cluster.start_shard("shard-1")
        eventually(lambda: httpx.get(f"{url(cluster, 1)}/readyz").status_code == 200, within_s=START_S)


def test_a_shard_that_has_left_does_not_join_again(cluster: Nodes) -> None:
    """A shard that has left does not join again while its last request is unfinished.

    It would get partitions that would be lost with it.
    """
    process, log = cluster.processes["shard-1"], cluster.folder / "shard-1.log"
    with socket.create_connection(("127.0.0.1", cluster.shard_ports["shard-1"])) as unfinished:
        unfinished.sendall(
            b"POST /push HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"
        )
        eventually(lambda: "in_flight 2.0" in httpx.get(f"{url(cluster, 1)}/metrics").text, what="the request to begin")
        process.send_signal(signal.SIGTERM)
        process.wait(STOPPED_S)
    try:
        assert "joined as" not in log.read_text().rpartition("told to stop")[2]
    finally:
        cluster.start_shard("shard-1")
        eventually(lambda: cluster.get("/map")["shards"]["shard-1"]["alive"], within_s=START_S)


def test_without_redis_pushes_go_on_and_snapshots_are_made_up_for(lone: Nodes) -> None:
    """While Redis is stopped pushes and pulls go on and the status is degraded; later all is durable."""
    name = summing_model(lone, "async", 10, partitions=4)
    push(lone, name, 1)
    with lone.paused("redis"):
        for seq in range(2, 5):
            assert push(lone, name, seq)["durable_version"] <= 1

        def degraded() -> bool:
            told = next(n for n in lone.get("/status")["nodes"] if n["role"] == "shard")["metrics"]
            return "Redis" in str(told.get("degraded")) and told.get("redis_away") is True

        eventually(degraded, within_s=30, what="the word that Redis is away")
        assert pull(lone, name) == [4.0] * 10
    eventually(lambda: durable(lone, name) == 4, within_s=30, what="the snapshots after the outage")


def test_without_redis_and_scheduler_a_shard_stops_answering(lone: Nodes) -> None:
    """Without a scheduler a shard serves pushes and pulls as long as Redis answers, and is 503 soon after that."""
    name = summing_model(lone, "async", 10, partitions=4)
    lone.kill("scheduler")
    began = time.monotonic()

    def serves() -> bool:
        return httpx.post(f"{url(lone, 0)}/pull", json={"model": name}, timeout=10).status_code == 200

    told = [serves()]
    while time.monotonic() < began + 4:
        told.append(serves())
    assert sum(told) > len(told) / 2, "Redis alone is enough"  # not each time, if the machine stands still
    assert push(lone, name, 1)["version"] == 1, "long after the scheduler's last word"
    with lone.paused("redis"):
        eventually(lambda: not serves(), within_s=20, what="the end of serving")
        answer = httpx.post(f"{url(lone, 0)}/pull", json={"model": name}, timeout=10)
        assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
        assert int(answer.headers["retry-after"]) >= 1
        assert httpx.get(f"{url(lone, 0)}/livez", timeout=30).status_code == 200
    eventually(serves, what="serving again")
    lone.start_scheduler()
    eventually(lambda: push(lone, name, 2)["version"] == 2, what="a push")


@pytest.mark.parametrize("later", [None, 3], ids=["empty", "later term"])
def test_a_shard_at_another_redis_stays_out(cluster: Nodes, tmp_path: Path, later: int | None) -> None:
    """A shard whose Redis is empty or another cluster's does not join, and its log says why once.

    It would own partitions that it can neither load nor store.
    """
    name, port = f"stray-{later}", free_port()
    other = Nodes(tmp_path, cluster.redis_url.rpartition("/")[0] + "/7", 0)
    try:
        with redis_client.Redis.from_url(other.redis_url) as r:
            r.flushdb()
            if later is not None:
                r.set("ps:term", cluster.get("/status")["cluster"]["term"] + later - 1)
                other.start_scheduler()
        own = ("--name", name, "--port", str(port), "--scheduler", cluster.url, "--redis", other.redis_url)
        cluster.start(name, "paramserver_shard", *own)
        log = cluster.folder / f"{name}.log"
        eventually(lambda: "uses a different Redis" in log.read_text(), within_s=START_S, what="the refusal")
        attempts = cluster.http.get(f"http://127.0.0.1:{port}/readyz")
        assert (attempts.status_code, "conflict" in attempts.text) == (503, True)
        assert log.read_text().count("PARAMSERVER_REDIS") == 1
        assert name not in cluster.get("/map")["shards"]
        cluster.kill(name)
        assert log.read_text().count("uses a different Redis") == 1
    finally:
        if name in cluster.processes:
            cluster.kill(name)
        other.stop()


def test_the_newest_process_of_a_name_serves(lone: Nodes) -> None:
    """A second process under a shard's name takes its place, and the first one exits."""
    name = summing_model(lone, "async", 10, partitions=4)
    first = lone.processes.pop("shard-0")
    lone.shard_ports["shard-0"] = free_port()
    lone.start_shard("shard-0")
    try:
        first.wait(START_S)
        assert first.returncode != 0
        eventually(lambda: pull(lone, name) == [0.0] * 10, within_s=30, what="the newer process' answer")
    finally:
        first.kill()
        first.wait()


def test_a_deletion_is_heard_of_by_shards_that_were_cut_off(cluster: Nodes) -> None:
    """A model that is deleted while a shard hears nothing is unknown to it once it follows a scheduler again."""
    name = summing_model(cluster, "async", 10, partitions=4)
    push(cluster, name, 1)
    with cluster.paused(*cluster.shard_ports):
        cluster.kill("scheduler")
        cluster.start_scheduler()
        cluster.call("DELETE", f"/models/{name}", status=204)

    def forgotten(shard: int) -> bool:
        answer = cluster.http.post(f"{url(cluster, shard)}/pull", json={"model": name})
        assert answer.status_code == 404, f"shard {shard}: {answer.status_code} {answer.text}"
        return bool(answer.json()["code"] == "unknown_model")

    eventually(lambda: all(map(forgotten, range(2))), what="the news of the deletion")


def test_a_shard_that_still_compiles_its_kernels_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that is told to stop while it compiles its kernels, which may take a minute, ends at once, with 0.

    It has joined nothing yet; killed later, it would pass for one that has lost what it had.
    """
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "compiled"))
    cluster = Nodes(tmp_path, "redis://127.0.0.1:1/0", shards=1)
    cluster.start_shard("shard-0")
    try:
        livez = f"http://127.0.0.1:{cluster.shard_ports['shard-0']}/livez"
        eventually(lambda: httpx.get(livez, timeout=10).status_code == 200, within_s=START_S, what="the shard's port")
        cluster.processes["shard-0"].send_signal(signal.SIGTERM)
        assert cluster.processes["shard-0"].wait(10) == 0, cluster.logs()
    finally:
        cluster.stop()


def test_a_shard_that_waits_for_a_state_that_it_expects_can_be_stopped(tmp_path: Path) -> None:
    """A shard with --expect-state handles SIGTERM while Redis is away; as a container's first process it must."""
    cluster = Nodes(tmp_path, "redis://127.0.0.1:1/0", shards=1)
    cluster.start("shard-0", "paramserver_shard", "--expect-state", "--redis", cluster.redis_url)
    try:
        eventually(lambda: "Redis does not answer" in cluster.logs(), within_s=START_S, what="the word that it is away")
        cluster.processes["shard-0"].send_signal(signal.SIGTERM)
        assert cluster.processes["shard-0"].wait(10) == 0, cluster.logs()
    finally:
        cluster.stop()
