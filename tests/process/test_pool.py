"""Worker processes join the pool, or say why they cannot."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import eventually

import paramserver as ps

from .cluster import Cluster, cluster

pytestmark = pytest.mark.process

WORKER = [sys.executable, "-P", "-m", "paramserver_worker"]
LONG = "ip-10-0-12-34.a-rather-long-department.an-example-company.internal"


@contextmanager
def started(command: list[str], **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """Run a worker for the block; `options` are those of Popen."""
    worker = subprocess.Popen(command, text=True, **options)
    try:
        yield worker
    finally:
        worker.terminate()
        try:
            worker.wait(30)
        finally:
            worker.kill()


def finding(folder: Path) -> dict[str, str]:
    """The environment of a worker that imports modules from that folder, too."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def test_a_worker_of_a_machine_with_a_long_name_joins(shared_cluster: Cluster) -> None:
    """A worker on a machine whose host name exceeds the 64 characters of a pool member's name joins all the same."""
    code = f"import socket; socket.gethostname = lambda: {LONG!r}; from paramserver_worker.main import app; app()"
    with (
        started([sys.executable, "-P", "-c", code, "--url", shared_cluster.url]),
        ps.connect(shared_cluster.url) as client,
    ):

        def joined() -> bool:
            return any(m["member"].startswith("ip-10-0-12-34.") for m in client.request("GET", "/pool")["items"])

        eventually(joined, what="the member")


def test_a_name_that_is_not_allowed_ends_the_worker(shared_cluster: Cluster) -> None:
    """A worker whose name is refused exits with 1 and the reason instead of retrying."""
    done = subprocess.run(
        [*WORKER, "--name", "x" * 65, "--url", shared_cluster.url], capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 1
    assert "is not allowed" in done.stderr
    assert "unreachable" not in done.stderr


def test_of_two_workers_of_one_name_the_first_ends(shared_cluster: Cluster) -> None:
    """A worker whose name another one joins with exits with 1 and says what to do, and the other one stays."""
    command = [*WORKER, "--name", "twin", "--url", shared_cluster.url]
    with ps.connect(shared_cluster.url) as client, started(command, stderr=subprocess.PIPE) as first:

        def epoch() -> int:
            items = client.request("GET", "/pool")["items"]
            return max((m["epoch"] for m in items if m["member"] == "twin"), default=0)

        eventually(lambda: epoch() == 1, what="the first one")
        with started(command) as second:
            assert "give each worker a unique name" in first.communicate(timeout=60)[1]
            assert first.returncode == 1
            assert epoch() == 2
            assert second.poll() is None


def test_a_worker_takes_its_settings_from_the_environment_and_the_file(shared_cluster: Cluster, tmp_path: Path) -> None:
    """A worker takes its URL and name from environment variables and its allowed modules from `paramserver.toml`."""
    (tmp_path / "paramserver.toml").write_text('[worker]\nallow = ["somewhere.else", "paramserver.examples"]\n')
    env = os.environ | {"PARAMSERVER_URL": shared_cluster.url, "PARAMSERVER_NAME": "of-the-environment"}
    with started(WORKER, cwd=tmp_path, env=env), ps.connect(shared_cluster.url) as client:

        def joined() -> bool:
            members = client.request("GET", "/pool")["items"]
            return any(
                m["member"] == "of-the-environment" and m["allow"] == ["somewhere.else", "paramserver.examples"]
                for m in members
            )

        eventually(joined, what="the member")


EXITS = """
import sys

def train(worker, code):
    sys.exit(code)
"""


def test_a_training_function_may_end_by_exiting(shared_cluster: Cluster, tmp_path: Path, name: str) -> None:
    """`sys.exit(0)` finishes the run and any other code fails it; the worker process stays alive."""
    (tmp_path / "exits.py").write_text(EXITS)
    command = [*WORKER, "--name", "exits", "--allow", "exits", "--url", shared_cluster.url]
    with started(command, env=finding(tmp_path)) as worker, ps.connect(shared_cluster.url) as client:
        client.create_model(name, {"w": (4,)})
        for code, state in ((0, "finished"), (3, "failed")):
            run = client.create_run(name, "exits:train", args={"code": code})["id"]
            found = eventually(lambda run=run: ended(client, run), what="the end of the run")  # type: ignore[misc]
            assert found["state"] == state
        assert "sys.exit(3)" in str(found)
        assert worker.poll() is None


def ended(client: ps.Client, run: str) -> dict[str, Any]:
    """The document of a run that has ended; of one that goes on an empty one."""
    found = client.get_run(run)
    return found if found["state"] in ("finished", "failed") else {}


ENDS_LATE = """
import pathlib, time

def train(worker, folder):
    with open(pathlib.Path(folder, "calls"), "a") as calls:
        calls.write("called\\n")
    while not pathlib.Path(folder, "end").exists():
        time.sleep(0.05)
"""


def test_a_function_that_ends_in_an_outage_is_not_called_again(tmp_path: Path) -> None:
    """A pool worker keeps its place, and repeats its report until Redis is back and it can be stored.

    The place was given away when the lease ended, or the report was given up: all of the training was done again.
    """
    (tmp_path / "ends_late.py").write_text(ENDS_LATE)
    with cluster(tmp_path / "c", shards=1) as running, (tmp_path / "log").open("w") as log:
        command = [*WORKER, "--name", "late", "--allow", "ends_late", "--url", running.url]
        with started(command, env=finding(tmp_path), stderr=log), ps.connect(running.url) as client:
            client.create_model("m", {"w": (4,)})
            run = client.create_run("m", "ends_late:train", args={"folder": str(tmp_path)})["id"]
            eventually(lambda: (tmp_path / "calls").exists(), what="the call")
            away = running.info["pids"]["redis"][0]
            os.kill(away, signal.SIGSTOP)
            try:
                (tmp_path / "end").touch()
                for_longer_than_a_lease = 2  # each takes 2 s, with 1 s between them; the function's end takes 4 s
                eventually(
                    lambda: (tmp_path / "log").read_text().count("place.not_reported") >= for_longer_than_a_lease,
                    what="refused reports",
                )
            finally:
                os.kill(away, signal.SIGCONT)
            assert eventually(lambda: ended(client, run), what="the end of the run")["state"] == "finished"
    assert (tmp_path / "calls").read_text() == "called\n"


RAISES = """
import asyncio

def cancelled(worker):
    raise asyncio.CancelledError("by itself")

def named(worker):
    raise ValueError("no file \\udcff.txt")
"""


def test_whatever_a_function_raises_counts_as_its_exception(shared_cluster: Cluster, tmp_path: Path, name: str) -> None:
    """A cancellation, or a text with half a character in it, fails the run in the end; the worker process goes on."""
    (tmp_path / "raises_rarely.py").write_text(RAISES)
    command = [*WORKER, "--name", "raises", "--allow", "raises_rarely", "--url", shared_cluster.url]
    with started(command, env=finding(tmp_path)) as worker, ps.connect(shared_cluster.url) as client:
        client.create_model(name, {"w": (4,)})
        for function, says in (("cancelled", "by itself"), ("named", "no file ?.txt")):
            run = client.create_run(name, f"raises_rarely:{function}")["id"]
            found = eventually(lambda run=run: ended(client, run), what="the end of the run")  # type: ignore[misc]
            assert found["state"] == "failed"
            assert says in found["reason"]
        assert worker.poll() is None


LEAVES_A_THREAD = """
import sys, threading

def train(worker, code):
    threading.Thread(target=threading.Event().wait, name="waits for nobody").start()
    sys.exit(code)
"""


def test_a_thread_left_behind_does_not_keep_a_worker_that_is_done(
    shared_cluster: Cluster, tmp_path: Path, name: str
) -> None:
    """A worker whose function has left a thread running names it, and exits with the function's own status."""
    (tmp_path / "leaves_a_thread.py").write_text(LEAVES_A_THREAD)
    with ps.connect(shared_cluster.url) as client:
        client.create_model(name, {"w": (4,)})
        command = [*WORKER, "leaves_a_thread:train", "--model", name, "--arg", "code=3", "--url", client.url]
        done = subprocess.run(command, env=finding(tmp_path), capture_output=True, text=True, timeout=60)

        assert done.returncode == 3
        assert "worker.waits threads=waits_for_nobody" in done.stderr
        assert not any(w["alive"] for w in client.model(name).workers())


def test_a_thread_left_behind_does_not_keep_a_pool_member_that_is_told_to_end(
    shared_cluster: Cluster, tmp_path: Path, name: str
) -> None:
    """After SIGTERM a pool member ends although a function of an earlier place has left a thread running."""
    (tmp_path / "leaves_a_thread.py").write_text(LEAVES_A_THREAD)
    command = [*WORKER, "--name", "leaves", "--allow", "leaves_a_thread", "--url", shared_cluster.url]
    with started(command, env=finding(tmp_path)) as worker, ps.connect(shared_cluster.url) as client:
        client.create_model(name, {"w": (4,)})
        run = client.create_run(name, "leaves_a_thread:train", args={"code": 0})["id"]
        assert eventually(lambda: ended(client, run), what="the end of the run")["state"] == "finished"
        worker.terminate()
        assert worker.wait(30) == 128 + signal.SIGTERM
