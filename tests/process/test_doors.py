"""A cluster that other machines can reach: it gets a secret of its own, or says what it lacks and does not start."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import paramserver as ps
from paramserver.errors import AuthError
from paramserver_node import redis_server

from .cluster import PSCTL, cluster, eventually

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]


@pytest.mark.parametrize("service", ["scheduler", "shard"])
def test_a_node_that_others_can_reach_does_not_start_without_tokens(service: str, tmp_path: Path) -> None:
    """It ends at once with the lines that help, whichever of its addresses is meant; nothing was listening."""
    port = str(redis_server.free_port())
    for host in ("0.0.0.0", socket.gethostname()):
        command = [sys.executable, "-P", "-m", f"paramserver_{service}", "--host", host, "--port", port]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0
        for line in ("psctl secret paramserver.secret", "--host 127.0.0.1", "--insecure"):
            assert line in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("service", ["shard", "scheduler"])
def test_a_taken_port_is_said_in_one_line(service: str, tmp_path: Path) -> None:
    """A node whose port somebody else has ends at once and names it, without a traceback."""
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
        ("scheduler", "ca", "/nope"),
        ("scheduler", "port", "99999"),
        ("scheduler", "tls_key", "/nope"),
        ("scheduler", "secret", "short"),
        ("shard", "ca", __file__),
        ("shard", "port", "-1"),
        ("shard", "name", "two words"),
        ("shard", "scheduler", "http://h:abc"),
        ("shard", "memory_limit", "x"),
        ("worker", "ca", "/nope"),
        ("worker", "token", "two words"),
        ("worker", "url", "http://h:abc"),
    ],
)
def test_a_wrong_setting_ends_a_program_in_one_line(service: str, setting: str, value: str, tmp_path: Path) -> None:
    """Whichever it is, and whenever it is found: its name is said, and the exit code is that of a wrong flag."""
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


def test_a_cluster_for_other_machines_asks_for_the_token_that_it_prints(tmp_path: Path) -> None:
    """`psctl up --host 0.0.0.0` makes a secret and prints a token; psctl beside it needs none, a worker has its own."""
    state = tmp_path / ".paramserver"
    with cluster(state, shards=1, args=("--host", "0.0.0.0", "--workers", "1")) as closed:
        token = closed.info["token"]
        assert (state / "secret").stat().st_mode & 0o777 == 0o600
        assert token not in (state / "cluster.json").read_text()
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PARAMSERVER_")}
        run = {"cwd": tmp_path, "env": clean, "capture_output": True, "text": True, "timeout": 60}
        for words in (["status"], ["models"]):
            done = subprocess.run([*PSCTL, *words], **run)  # type: ignore[call-overload]
            assert done.returncode == 0, done.stderr
        printed = subprocess.run([*PSCTL, "token", "reader"], **run)  # type: ignore[call-overload]
        for url in (closed.url, *closed.shards):
            assert httpx.get(f"{url}/status").status_code == 401
            reader = {"authorization": f"Bearer {printed.stdout.strip()}"}
            assert httpx.get(f"{url}/status", headers=reader).status_code == 200
        with ps.connect(closed.url) as nobody, pytest.raises(AuthError):
            nobody.models()
        with ps.connect(closed.url, token=token) as client:
            joined = eventually(lambda: client.request("GET", "/pool")["items"], what="the worker's joining")
            assert [m["member"] for m in joined] == ["worker-0"]


def test_a_cluster_may_be_open_to_everyone_when_told_so(tmp_path: Path) -> None:
    """`--insecure` starts it without tokens, and every node's log warns."""
    with cluster(tmp_path, shards=1, args=("--host", "0.0.0.0", "--insecure")) as opened:
        assert opened.info["token"] is None
        assert not (tmp_path / "secret").exists()
        assert httpx.get(f"{opened.url}/status", headers={"host": "ps.example.org"}).status_code == 200
        for log in ("shard-0", "scheduler"):
            text = "".join(p.read_text() for p in (tmp_path / "logs").glob(f"{log}*.log"))
            assert "may read, change and delete" in text, log


def test_a_cluster_for_this_machine_is_closed_to_web_pages(tmp_path: Path) -> None:
    """On loopback a program needs no token; a request under a page's name, or from a page, is refused over HTTP/1.1."""
    with cluster(tmp_path, shards=1) as opened:
        assert opened.info["token"] is None
        for url in (opened.url, *opened.shards):
            assert httpx.get(f"{url}/status").status_code == 200
            for header in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
                refused = httpx.get(f"{url}/status", headers=header)
                assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
