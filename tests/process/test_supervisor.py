"""Clusters on this machine: what `psctl up` prints, that it restarts processes, and that it leaves none behind."""

import json
import os
import shlex
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
from redis import Redis
from tests.refusals import refused_with
from tests.servers import running_redis
from tests.waiting import eventually

import paramserver as ps
from paramserver_cli.state_directory import StateDir
from paramserver_node import redis_server

from .cluster import PSCTL, Cluster, cluster, get
from .prepared import prepared

pytestmark = pytest.mark.process


def listener(port: int) -> int | None:
    """Pid of the process that listens on a TCP port, or None."""
    for c in psutil.net_connections("tcp"):
        if c.status == psutil.CONN_LISTEN and c.laddr.port == port:
            return int(c.pid)
    return None


def is_ready(url: str) -> bool:
    """Whether a node answers `/readyz` with 200."""
    return get(f"{url}/readyz").status_code == 200


def of_state(state_dir: Path) -> list[psutil.Process]:
    """A cluster's processes: those with its state directory in their command line or among their open files."""
    found = []
    for p in psutil.process_iter():
        try:
            if str(state_dir) in " ".join(p.cmdline()) or any(str(state_dir) in f.path for f in p.open_files()):
                found.append(p)
        except psutil.Error:
            continue
    return [p for p in found if p.pid != os.getpid() and p.status() != psutil.STATUS_ZOMBIE]


def port_of(url: str) -> int:
    """The port in a URL."""
    return urlsplit(url).port or 0


def test_the_printed_object_is_the_cluster(shared_cluster: Cluster) -> None:
    """`up --detach --json` prints the documented object, with the serving processes' pids in order."""
    info = shared_cluster.info

    assert list(info) == ["scheduler", "shards", "redis", "token", "pids", "state_dir", "schedulers"]
    assert info["schedulers"] == [info["scheduler"]]
    assert info["token"] is None
    assert list(info["pids"]) == ["scheduler", "shards", "redis"]
    assert info["pids"]["scheduler"] == [listener(port_of(info["scheduler"]))]
    assert info["pids"]["shards"] == [listener(port_of(u)) for u in info["shards"]]
    assert info["pids"]["redis"] == [listener(port_of(info["redis"]))]
    assert get(f"{info['scheduler']}/readyz").status_code == 200
    assert shared_cluster.present() == info


def test_a_killed_process_comes_back_at_its_address(tmp_path: Path) -> None:
    """Shard, scheduler and Redis are each restarted after a SIGKILL and serve at the same address again."""
    with cluster(tmp_path, shards=1) as running:
        for kind, url in (("shards", running.shards[0]), ("scheduler", running.url), ("redis", "")):
            old = running.kill(kind)
            eventually(partial(running.replaced, kind, 0, old), what=f"a new {kind}")
            assert not psutil.pid_exists(old)
            if url:
                eventually(partial(is_ready, url), what=f"{kind} ready")
        (redis,) = running.present()["pids"]["redis"]  # known once it is started, before it listens
        eventually(lambda: listener(port_of(running.info["redis"])) == redis, what="redis ready")


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    """If the supervisor gets SIGKILL, all processes of the cluster end, and a new `up` in its folder finds the data."""
    state = tmp_path / "c"
    with cluster(state, shards=1, args=("--workers", "1")) as running:
        model = ps.connect(running.url).create_model("kept", {"w": (4,)}, optimizer=ps.Sum(), ack="journaled")
        assert model.push({"w": [1.0, 2.0, 3.0, 4.0]}).state == "applied"  # and journaled
        supervisor = json.loads((state / "supervisor.json").read_text())["pid"]
        assert len(of_state(state)) >= 6

        os.kill(supervisor, signal.SIGKILL)

        eventually(lambda: not of_state(state), what="the end of every process")
        listed = json.loads(running.psctl("list", "--json").stdout)["items"]
        assert str(state) not in [c["state_dir"] for c in listed]

    with cluster(state, shards=1) as again:
        assert list(ps.connect(again.url).model("kept").pull()["w"]) == [1.0, 2.0, 3.0, 4.0]


def test_down_says_which_shard_could_not_store_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Redis takes nothing while a shard stops within its `stop_s`, `down` names the shard and exits with 1.

    What is lost is in the shard's log.
    """
    monkeypatch.setenv("PARAMSERVER_STOP_S", "10")
    state = tmp_path / "c"
    with cluster(state, shards=1) as running:
        monkeypatch.delenv("PARAMSERVER_STOP_S")  # `down` knows it from the cluster
        model = ps.connect(running.url).create_model("lost", {"w": (4,)}, optimizer=ps.Sum(), partitions=4)
        redis = int(running.present()["pids"]["redis"][0])
        os.kill(redis, signal.SIGSTOP)
        assert model.push({"w": [1.0, 2.0, 3.0, 4.0]}).state == "applied"

        argv = [*PSCTL, "down", "--state-dir", str(state)]
        with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as down:
            told = "4 partitions could not be stored"
            eventually(lambda: told in (state / "logs" / "shard-0.log").read_text(), within_s=60.0, what="the loss")
            eventually(lambda: listener(port_of(running.shards[0])) is None, what="the end of the shard")
            os.kill(redis, signal.SIGCONT)  # it is stopped, too, and would be killed in the end
            _, errors = down.communicate(timeout=60)

        assert down.returncode == 1
        assert "shard-0 ended with 1 before everything was stored" in errors
        assert json.loads((state / "plan.json").read_text())["stop_s"] == 10.0
        assert not of_state(state)


def test_a_supervisor_that_cannot_write_its_state_goes_on_and_stops_in_turn(tmp_path: Path) -> None:
    """On a full disk a dead process is restarted, and `down` has the shards store what only they have.

    As nothing says so, `down` exits with 1. The supervisor ended, and killed all others.
    """
    state = tmp_path / "c"
    with cluster(state, shards=1) as running:
        supervisor = json.loads((state / "supervisor.json").read_text())["pid"]
        (state / f".supervisor.{supervisor}").mkdir()  # in the way of the file that is written first
        os.kill(int(running.info["pids"]["scheduler"][0]), signal.SIGKILL)
        model = eventually(
            lambda: ps.connect(running.url).create_model("kept", {"w": (4,)}, optimizer=ps.Sum()), what="the model"
        )
        assert model.push({"w": [1.0, 2.0, 3.0, 4.0]}).state == "applied"

        down = running.psctl("down", "--state-dir", str(state))

        assert down.returncode == 1
        assert "supervisor.log" in down.stderr
        assert not of_state(state)
    with cluster(state, shards=1) as again:
        assert list(ps.connect(again.url).model("kept").pull()["w"]) == [1.0, 2.0, 3.0, 4.0]


def test_up_again_is_refused_and_down_again_is_fine(shared_cluster: Cluster, tmp_path: Path) -> None:
    """A second `up` in the same state directory exits with 4, and `down` where nothing runs exits with 0."""
    again = shared_cluster.psctl("up", "--detach", "--state-dir", str(shared_cluster.state_dir))
    nothing = shared_cluster.psctl("down", "--state-dir", str(tmp_path / "other"))

    assert again.returncode == 4
    assert shared_cluster.url in again.stderr
    assert nothing.returncode == 0
    assert get(f"{shared_cluster.url}/livez").status_code == 200


def test_of_two_ups_at_once_in_a_folder_one_is_refused(tmp_path: Path) -> None:
    """Of two `up` at the same moment in one state directory one exits with 4, and the cluster of the other runs."""
    state = tmp_path / "c"
    argv = [*PSCTL, "up", "--detach", "--shards", "1", "--state-dir", str(state)]
    ups = [subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [up.communicate(timeout=150) for up in ups]
    try:
        assert sorted(up.returncode for up in ups) == [0, 4], said
        assert StateDir(state).is_running()
        assert any("a cluster is already running" in err for _, err in said)
    finally:
        subprocess.run([*PSCTL, "down", "--state-dir", str(state)], check=True, timeout=60)


def test_a_cluster_that_was_started_without_streams_is_found_and_stopped(tmp_path: Path) -> None:
    """A cluster started with closed standard streams (`<&- >&- 2>&-`) holds its lock, so no second one starts there."""
    state, shell = tmp_path / "c", shlex.join([*PSCTL, "up", "--shards", "1", "--state-dir", str(tmp_path / "c")])
    try:
        done = subprocess.run(["sh", "-c", f"{shell} --detach <&- >&- 2>&-"], timeout=100, check=False)
        assert done.returncode == 0
        assert StateDir(state).is_running()
    finally:
        down = subprocess.run([*PSCTL, "down", "--state-dir", str(state)], capture_output=True, text=True, timeout=60)
        for left in of_state(state):
            left.kill()
    assert "is down" in down.stdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_cluster_in_the_foreground_ends_with_its_command(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """A foreground `psctl up` that is asked to end waits until its cluster has; one that is killed ends it, too."""
    state = tmp_path / "c"
    argv = [*PSCTL, "up", "--shards", "1", "--json", "--state-dir", str(state)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        info: dict[str, Any] = json.loads(up.stdout.readline())
        assert get(f"{info['scheduler']}/livez").status_code == 200

        up.send_signal(number)

        assert up.wait(30) == code
    assert number == signal.SIGKILL or not StateDir(state).is_running()
    eventually(lambda: not of_state(state), what="the end of every process")


def test_a_redis_of_ones_own_is_left_alone_and_its_password_shown_to_nobody(tmp_path: Path) -> None:
    """`up --redis` starts no Redis, and the given one still runs after `down`.

    The password in its URL is in no process's command line, no output, and no file that others can read.
    """
    with running_redis(tmp_path / "redis") as url, Redis.from_url(url) as plain:
        plain.config_set("requirepass", "open-sesame")
        given = url.replace("redis://", "redis://:open-sesame@")
        with cluster(tmp_path / "c", shards=1, args=("--redis", given)) as running:
            assert running.info["redis"] == given.replace("open-sesame", "***")
            assert running.info["pids"]["redis"] == []
            assert running.present() == running.info
            assert "open-sesame" not in running.psctl("list").stdout
            lines = [" ".join(p.cmdline()) for p in of_state(running.state_dir)]
            assert len(lines) >= 3
            assert not [line for line in lines if "open-sesame" in line]
            holding = [f for f in running.state_dir.rglob("*") if f.is_file() and b"open-sesame" in f.read_bytes()]
            assert [(f.name, f.stat().st_mode & 0o077) for f in holding] == [("plan.json", 0)]
        assert plain.ping()


@pytest.mark.parametrize("way", ["--redis", "PARAMSERVER_REDIS"])
def test_a_password_on_the_command_line_is_warned_of(tmp_path: Path, way: str) -> None:
    """A foreground `up` warns of a password in its --redis URL, and names PARAMSERVER_REDIS as the alternative.

    Its own command line shows that password as long as it runs; those of its children do not.  Ctrl-C ends all of them.
    """
    state = tmp_path / "c"
    with running_redis(tmp_path / "redis") as url, Redis.from_url(url) as plain:
        plain.config_set("requirepass", "open-sesame")
        given = url.replace("redis://", "redis://:open-sesame@")
        argv = [*PSCTL, "up", "--shards", "1", "--json", "--state-dir", str(state)]
        flag, env = ([way, given], {}) if way == "--redis" else ([], {way: given})
        with subprocess.Popen(
            argv + flag, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | env
        ) as up:
            assert up.stdout is not None
            assert up.stderr is not None
            info: dict[str, Any] = json.loads(up.stdout.readline())
            lines = {p.pid: " ".join(p.cmdline()) for p in of_state(state)}
            up.send_signal(signal.SIGINT)
            told = [line for line in up.stderr.read().splitlines() if "PARAMSERVER_REDIS" in line]

    assert up.returncode == 130
    eventually(lambda: not of_state(state), what="the end of every process")
    assert info["redis"] == given.replace("open-sesame", "***")
    assert len(lines) >= 4
    assert {pid for pid, line in lines.items() if "open-sesame" in line} == ({up.pid} if flag else set())
    assert len(told) == (1 if flag else 0)
    assert not [line for line in told if "open-sesame" in line]
    assert not [f for f in (state / "logs").iterdir() if b"open-sesame" in f.read_bytes()]


@pytest.mark.parametrize("right", [True, False])
def test_a_redis_that_is_away_is_told_before_anything_is_started(tmp_path: Path, right: bool) -> None:
    """With an unreachable Redis or a wrong password, `up` exits with 3 before it starts anything.

    The error has the URL, with the password masked, and the name of the setting.
    """
    with running_redis(tmp_path / "redis") as url, Redis.from_url(url) as plain:
        plain.config_set("requirepass", "open-sesame")
        port = 1 if right else port_of(url)
        given = f"redis://:{'open-sesame' if right else 'guessed'}@127.0.0.1:{port}/0"
        up = ["up", "--detach", "--state-dir", str(tmp_path / "c")]
        done = prepared().run(up, os.environ | {"PARAMSERVER_REDIS": given}, 100.0)

    assert done.returncode == 3
    assert f"redis://:***@127.0.0.1:{port}/0" in done.stderr
    assert "PARAMSERVER_REDIS" in done.stderr
    assert "guessed" not in done.stderr
    assert not (tmp_path / "c" / "plan.json").exists()


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    """If a process cannot start, `up` exits with 1 and a short reason, and leaves no process."""
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "redis").write_text("a file where a folder should be")
    done = prepared().run(["up", "--detach", "--state-dir", str(tmp_path / "c")], os.environ, 60.0)

    assert done.returncode == 1
    assert "redis" in done.stderr
    assert len(done.stderr.splitlines()) < 5
    assert not of_state(tmp_path / "c")


def test_a_redis_server_keeps_its_data_over_a_kill(tmp_path: Path) -> None:
    """What a Redis server stored before a SIGKILL is there when one starts again in the same folder."""
    import redis

    for expected in (None, b"kept"):
        with running_redis(tmp_path) as url, redis.Redis.from_url(url) as client:
            assert client.get("key") == expected
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            client.set("key", "kept")
            pid = redis_server.serving_pid(port_of(url))
            assert pid is not None
            os.kill(pid, signal.SIGKILL)


def test_a_cluster_can_offer_what_survives_a_power_cut(shared_cluster: Cluster, tmp_path: Path) -> None:
    """With `--appendfsync always` models at `fsynced` can be created and pushed to; without it, that says so."""
    with ps.connect(shared_cluster.url) as client:
        with refused_with("not_built", match="psctl up --appendfsync always"):
            client.create_model("fsynced", {"w": (2,)}, ack="fsynced")
    with cluster(tmp_path, shards=1, args=("--appendfsync", "always")) as running, ps.connect(running.url) as client:
        model = client.create_model("m", {"w": (2,)}, optimizer=ps.Sum(), ack="fsynced")
        pushed = model.push({"w": np.ones(2, np.float32)})
        assert pushed.durable_version == pushed.version == 1
