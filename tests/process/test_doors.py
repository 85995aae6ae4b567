"""Nodes that other machines can reach: they have a secret, or do not start and say what is missing."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError
from tests.servers import free_port
from tests.waiting import eventually

import paramserver as ps
from paramserver.errors import AuthError

from .cluster import Cluster, cluster, get
from .prepared import prepared

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("service", "host"), [("scheduler", "0.0.0.0"), ("shard", socket.gethostname())], ids=["wildcard", "name"]
)
def test_a_node_that_others_can_reach_does_not_start_without_tokens(service: str, host: str, tmp_path: Path) -> None:
    """A node on a wildcard or host-name address without a secret exits with an error that lists the remedies."""
    port = str(free_port())
    command = [sys.executable, "-P", "-m", f"paramserver_{service}", "--host", host, "--port", port]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    for line in ("psctl secret paramserver.secret", "--host 127.0.0.1", "--insecure"):
        assert line in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("service", ["shard", "scheduler"])
def test_a_taken_port_is_said_in_one_line(service: str, tmp_path: Path) -> None:
    """A node whose port is in use exits with 1 and names the address, without a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-P", "-m", f"paramserver_{service}", "--port", port]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert done.returncode == 1
    assert f"cannot serve on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("service", "setting", "value"),
    [
        ("scheduler", "tls_key", "/nope"),
        ("shard", "name", "two words"),
        ("worker", "token", "two words"),
    ],
)
def test_a_wrong_setting_ends_a_program_in_one_line(service: str, setting: str, value: str, tmp_path: Path) -> None:
    """An invalid setting ends the program with exit code 2, as an invalid flag does, and its last line names it."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", f"paramserver_{service}"],
        env=os.environ | {f"PARAMSERVER_{setting.upper()}": value},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )

    said = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    assert setting in said[-1]
    assert not any("Traceback" in line for line in said)


def test_of_two_shards_of_one_name_one_ends_in_one_line(tmp_path: Path) -> None:
    """Of two shards under one name, as on machines of one host name, one exits with 2 and a line that says why."""
    with cluster(tmp_path / "c", shards=1) as running:
        links = ["--scheduler", running.url, "--redis", running.info["redis"]]
        command = [sys.executable, "-P", "-m", "paramserver_shard", "--name", "twin", *links, "--port"]
        files = [(tmp_path / name).open("w+") for name in "ab"]
        twins = [subprocess.Popen([*command, str(free_port())], cwd=tmp_path, stderr=f) for f in files]
        try:
            eventually(lambda: any(t.poll() is not None for t in twins), within_s=60, what="the end of one of them")
            ended = next(i for i, t in enumerate(twins) if t.poll() is not None)
            files[ended].seek(0)
            said = files[ended].read()
            assert twins[ended].returncode == 2, said
            assert "Traceback" not in said
            assert "another process is running under the name 'twin'" in said.splitlines()[-1]
            assert "--name" in said.splitlines()[-1]
        finally:
            for twin, file in zip(twins, files, strict=True):
                twin.kill()
                twin.wait()
                file.close()


def test_a_cluster_for_other_machines_asks_for_the_token_that_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`psctl up --host 0.0.0.0` makes a secret and prints a token, which clients need.

    psctl in the same folder and the cluster's own workers need no token from the user.  Its Redis asks for a password,
    as every user of the machine reaches it.
    """
    state = tmp_path / ".paramserver"
    with cluster(state, shards=1, args=("--host", "0.0.0.0", "--workers", "1")) as closed:
        token = closed.info["token"]
        assert (state / "secret").stat().st_mode & 0o777 == 0o600
        assert token not in (state / "cluster.json").read_text()
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PARAMSERVER_")}
        monkeypatch.chdir(tmp_path)
        for words in (["status"], ["models"]):
            done = prepared().run(words, clean, 60.0)
            assert done.returncode == 0, done.stderr
        found = prepared().run(["doctor", "--json"], clean, 60.0)
        (redis,) = [f for f in json.loads(found.stdout)["items"] if f["check"] == "Redis"]
        assert redis["result"] == "ok", redis
        with Redis.from_url(closed.info["redis"].replace(":***@", "")) as other, pytest.raises(AuthenticationError):
            other.keys()
        printed = prepared().run(["token", "reader"], clean, 60.0)
        for url in (closed.url, *closed.shards):
            assert get(f"{url}/status").status_code == 401
            reader = {"authorization": f"Bearer {printed.stdout.strip()}"}
            assert get(f"{url}/status", headers=reader).status_code == 200
        with ps.connect(closed.url) as nobody, pytest.raises(AuthError):
            nobody.models()
        with ps.connect(closed.url, token=token) as client:
            joined = eventually(lambda: client.request("GET", "/pool")["items"], what="the worker's joining")
            assert [m["member"] for m in joined] == ["worker-0"]


def test_a_cluster_may_be_open_to_everyone_when_told_so(tmp_path: Path) -> None:
    """`psctl up --insecure` starts a cluster without tokens, and every node's log warns of it."""
    with cluster(tmp_path, shards=1, args=("--host", "0.0.0.0", "--insecure")) as opened:
        assert opened.info["token"] is None
        assert not (tmp_path / "secret").exists()
        assert get(f"{opened.url}/status", headers={"host": "ps.example.org"}).status_code == 200
        for log in ("shard-0", "scheduler"):
            text = "".join(p.read_text() for p in (tmp_path / "logs").glob(f"{log}*.log"))
            assert "may read, change and delete" in text, log


def test_a_cluster_for_this_machine_is_closed_to_web_pages(shared_cluster: Cluster) -> None:
    """On loopback, HTTP/1.1 requests need no token, but one with a foreign Host or a foreign Origin is refused."""
    assert shared_cluster.info["token"] is None
    for url in (shared_cluster.url, *shared_cluster.shards):
        assert get(f"{url}/status").status_code == 200
        for header in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
            refused = get(f"{url}/status", headers=header)
            assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
