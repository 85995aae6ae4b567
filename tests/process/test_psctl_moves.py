"""`psctl scale` and `psctl drain` on a cluster with two schedulers: pushes go on, and none is lost."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.waiting import eventually

import paramserver as ps
from paramserver_cli import moves
from paramserver_cli.launch import Failed

from .cluster import PSCTL, Cluster, cluster, get

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of two schedulers and two shards."""
    with cluster(tmp_path_factory.mktemp("elastic"), args=("--schedulers", "2")) as running:
        yield running


def owners(running: Cluster, model: str) -> dict[str, int]:
    """Number of the model's partitions that each shard owns."""
    found = get(f"{running.url}/models/{model}").json()["partitions"]
    names = [p["shard"] for p in found]
    return {n: names.count(n) for n in sorted(set(names))}


@contextmanager
def pushing(running: Cluster, model: str) -> Iterator[None]:
    """Push ones while the block runs, then assert that every element equals the number of pushes."""
    errors: list[BaseException] = []
    over = threading.Event()
    count = 0

    def work() -> None:
        nonlocal count
        try:
            with ps.connect(running.url) as client, client.model(model).worker(name="w") as worker:
                while not over.is_set():
                    worker.push({"w": np.ones(64, np.float32)})
                    count += 1
        except BaseException as e:  # the assertion below shows it
            errors.append(e)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        eventually(lambda: count > 2 or errors, what="the first pushes")
        yield
    finally:
        over.set()
        thread.join(60.0)
    assert errors == []
    with ps.connect(running.url) as client:
        assert set(client.model(model).pull()["w"].tolist()) == {float(count)}


def test_shards_come_and_go_while_pushes_go_on(elastic: Cluster) -> None:
    """Scaled to three shards and back to two, a model's partitions are spread evenly and each push counts once.

    psctl finds the cluster by its state directory, whatever PARAMSERVER_URL says, or by its URL, even if that has
    another name for the machine.
    """
    astray = Cluster({**elastic.info, "scheduler": "http://127.0.0.1:9"})
    there = elastic.url.replace("127.0.0.1", "localhost")
    with ps.connect(elastic.url) as client:
        client.create_model("scaled", {"w": (64,)}, optimizer=ps.Sum(), partitions=8)
    with pushing(elastic, "scaled"):
        ways = (["--state-dir", str(elastic.state_dir)], ["--url", there])
        for number, parts, way in ((3, [2, 3], ways[0]), (2, [4], ways[1])):
            done = astray.psctl("scale", "shards", str(number), *way, timeout_s=150)
            assert done.returncode == 0, done.stdout + done.stderr
            assert done.stdout.splitlines()[-1] == f"{number} shards"
            assert "partitions moved" in done.stderr
            held = owners(elastic, "scaled")
            assert sorted(held) == [f"shard-{i}" for i in range(number)]
            assert set(held.values()) <= set(parts)
            assert len(elastic.present()["shards"]) == number
    left = {n["name"]: n["state"] for n in json.loads(elastic.psctl("status", "--json").stdout)["nodes"]}
    assert left.get("shard-2", "left") == "left"
    with ps.connect(elastic.url) as client:
        client.model("scaled").delete()  # partitions are balanced over all models together


def test_a_drained_shard_owns_nothing_until_it_is_wanted_again(elastic: Cluster) -> None:
    """`drain` returns when the shard owns no partition, `--undo` gives some back, and the last shard is not drained."""
    with ps.connect(elastic.url) as client:
        client.create_model("drained", {"w": (64,)}, optimizer=ps.Sum(), partitions=8)
    with pushing(elastic, "drained"):
        done = elastic.psctl("drain", "shard-1", timeout_s=150)
        assert done.returncode == 0, done.stdout + done.stderr
        assert owners(elastic, "drained") == {"shard-0": 8}
        status = elastic.psctl("status").stdout
        assert "draining" in status
        assert "leads" in status
        assert "standby" in status
        refused = elastic.psctl("drain", "shard-0")
        assert refused.returncode == 1
        assert "start one first" in refused.stderr
        assert elastic.psctl("drain", "shard-1", "--undo").returncode == 0
        eventually(lambda: owners(elastic, "drained") == {"shard-0": 4, "shard-1": 4}, within_s=60.0)
    assert elastic.psctl("drain", "shard-9").returncode == 4


def test_a_command_that_was_overtaken_ends(elastic: Cluster) -> None:
    """`drain` ends with an error if the shard is active again, `scale` if another number of shards has been set."""
    with ps.connect(elastic.url) as client:
        client.create_model("overtaken", {"w": (64,)}, optimizer=ps.Sum(), partitions=8)
        eventually(lambda: len(owners(elastic, "overtaken")) == 2, what="partitions at both shards")
        with pytest.raises(Failed, match="another command has made shard-1 active again"):
            moves.until_empty(client, ["shard-1"], 30.0)

    paused = int(elastic.present()["pids"]["shards"][0])  # so that there are never three live ones
    os.kill(paused, signal.SIGSTOP)
    try:
        shard = f"{elastic.url}/shards/shard-0"
        eventually(lambda: not get(shard).json()["alive"], within_s=60.0, what="the shard's death")
        with waiting(elastic, "scale", "shards", "3") as scale:
            eventually(lambda: len(elastic.present()["shards"]) == 3, within_s=60.0, what="the third shard")
            with waiting(elastic, "scale", "shards", "2") as other:
                assert "another command has set the number of shards to 2" in scale.communicate(timeout=60)[1]
                assert scale.returncode == 1
                os.kill(paused, signal.SIGCONT)
                assert other.communicate(timeout=100)[0] == "2 shards\n"
    finally:
        os.kill(paused, signal.SIGCONT)


@contextmanager
def waiting(running: Cluster, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A psctl command that shows what it waits for."""
    argv = [*PSCTL, *args, "--url", running.url]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        assert command.stderr is not None
        assert "partitions moved" in command.stderr.readline()
        yield command


def test_another_scheduler_takes_over(elastic: Cluster) -> None:
    """When the leader is killed, a client that was given one scheduler's URL and psctl reach the new leader."""
    with ps.connect(elastic.url) as client:
        for _ in range(2):
            found = client.status()
            term = found["cluster"]["term"]
            leads = next(n for n in found["nodes"] if n["role"] == "scheduler" and n["state"] == "active")
            index = elastic.info["schedulers"].index(leads["addresses"][0])
            old = elastic.kill("scheduler", index)
            assert client.status()["cluster"]["term"] > term
            assert elastic.psctl("status", "--url", ",".join(elastic.info["schedulers"])).returncode == 0
            eventually(partial(elastic.replaced, "scheduler", index, old), what="a new scheduler")


def test_what_has_no_room_is_refused(elastic: Cluster) -> None:
    """Scaling to more shards than the cluster has ports for is refused with the possible range, and changes nothing."""
    refused = elastic.psctl("scale", "shards", "500", "--state-dir", str(elastic.state_dir))
    assert refused.returncode == 1
    assert "room for 1 to 97" in refused.stderr
    assert len(elastic.present()["shards"]) == 2


def test_a_folder_without_a_cluster_scales_no_other_cluster(elastic: Cluster, tmp_path: Path) -> None:
    """`scale --state-dir` of a folder where nothing runs is refused; the cluster of PARAMSERVER_URL is left alone."""
    refused = elastic.psctl("scale", "shards", "1", "--state-dir", str(tmp_path / "mistyped"))
    assert (refused.returncode, "no cluster of psctl up runs in" in refused.stderr) == (1, True), refused.stderr
    with ps.connect(elastic.url) as client:
        shards = client.request("GET", "/shards")["items"]
    assert {s["state"] for s in shards if s["alive"]} == {"active"}


def test_other_clusters_are_told_the_command(elastic: Cluster, tmp_path: Path) -> None:
    """For a cluster that psctl did not start, `scale` prints commands for compose and kubectl, and waits for shards."""
    args = ("--url", elastic.url, "--state-dir", str(tmp_path), "--timeout", "1")
    done = elastic.psctl("scale", "shards", "3", *args, timeout_s=60)
    assert done.returncode == 1
    assert "echo SHARDS=3 >> .env && docker compose up -d --no-recreate" in done.stdout
    assert "kubectl -n paramserver scale statefulset shard --replicas 3" in done.stdout
    assert "2 of 3 shards" in done.stderr
