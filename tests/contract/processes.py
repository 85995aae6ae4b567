"""Real schedulers and shards with a real Redis on free ports, started without psctl."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
from tests.servers import free_port, running_redis
from tests.waiting import eventually

from paramserver.net.credentials import Credentials
from paramserver_node import redis_server

START_S: Final = 120.0
"""Longest wait for what a process does once it has started: on a busy machine that alone can take a minute."""


class Patient(httpx.HTTPTransport):
    """Sends again what a shard refuses because it, or the whole machine, stood still for 3 s.

    What may have been done is sent again only if it has an id, which is what `retryable` tells.
    """

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request, a hundred times at most, and return the last answer."""
        for _ in range(100):
            answer = super().handle_request(request)
            if answer.status_code != 503 or b"no contact" not in answer.read() or not answer.json().get("retryable"):
                break
            threading.Event().wait(0.1)
        return answer


class Nodes:
    """Schedulers and shards, each in its own process."""

    def __init__(self, folder: Path, redis_url: str, shards: int, schedulers: int = 1) -> None:
        self.folder = folder
        self.redis_url = redis_url
        self.ports = [free_port() for _ in range(schedulers)]
        self.port = self.ports[0]
        self.urls = [f"http://127.0.0.1:{p}" for p in self.ports]
        self.url = self.urls[0]
        """The first scheduler's URL."""
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.shard_ports = {f"shard-{i}": free_port() for i in range(shards)}
        # With PARAMSERVER_TOKEN in the environment the tests send it, as any client does.
        headers = Credentials.found(None, None, os.environ).headers
        self.http = httpx.Client(transport=Patient(), base_url=self.url, headers=headers, timeout=30.0)

    def start(self, name: str, *args: str) -> None:
        """Start a process whose output goes to a log file of its name."""
        log = (self.folder / f"{name}.log").open("ab")
        with log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", *args], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def start_scheduler(self, index: int = 0, *args: str) -> None:
        """Start a scheduler and wait until it is ready; index 0 is called `scheduler`.

        Its port and state directory are the same each time.
        """
        name = process_name(index)
        state = str(self.folder / "state")
        port, redis = str(self.ports[index]), self.redis_url
        own = ("--name", name, "--port", port, "--redis", redis, "--state-dir", state)
        self.start(name, "paramserver_scheduler", *own, *args)
        process, ready = self.processes[name], f"{self.urls[index]}/readyz"

        def started() -> bool:
            return process.poll() is not None or self.http.get(ready).status_code == 200

        eventually(started, within_s=START_S, what="the scheduler's start")
        assert process.poll() is None, f"{name} has ended with {process.returncode}"

    def start_shard(self, name: str, module: str = "paramserver_shard") -> None:
        """Start the shard of that name, on the same port each time."""
        port, urls = str(self.shard_ports[name]), ",".join(self.urls)
        own = ("--name", name, "--port", port, "--scheduler", urls, "--redis", self.redis_url)
        self.start(name, module, *own)

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL and wait until it has ended."""
        self.processes[name].kill()
        self.processes[name].wait(10)

    def empty(self) -> None:
        """Stop all runs, delete all models, and wait until the status has none and all shards are alive.

        What a test that failed has left stopped, killed or running is put right first.
        """
        schedulers = {process_name(i): i for i in range(len(self.urls))}
        for name in self.processes.keys() - schedulers - self.shard_ports.keys():
            self.kill(name)
            del self.processes[name]
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
        for name in [n for n, p in self.processes.items() if p.poll() is not None]:
            if name in schedulers:
                self.start_scheduler(schedulers[name])
            else:
                self.start_shard(name)
        for run in self.get("/runs")["items"]:
            if run["state"] in ("waiting", "running", "paused"):
                self.call("PATCH", f"/runs/{run['id']}", {"state": "stopped"})
        for model in self.get("/models")["items"]:
            self.call("DELETE", f"/models/{model['name']}")

        def emptied() -> bool:
            alive = {n["name"] for n in self.get("/status")["nodes"] if n["role"] == "shard" and n["alive"]}
            return alive >= self.shard_ports.keys() and self.get("/status")["models"] == []

        eventually(emptied, within_s=START_S, what="a cluster without models")

    def stop(self) -> None:
        """Stop every process, shards before schedulers: these have to be there for what the shards still store."""
        self.http.close()
        shards = [p for name, p in self.processes.items() if name in self.shard_ports]
        for processes in (shards, [p for p in self.processes.values() if p not in shards]):
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def logs(self) -> str:
        """The last 3000 characters of each process's log."""
        return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in self.folder.glob("*.log"))

    @property
    def redis_pid(self) -> int:
        """The process id of its Redis."""
        pid = redis_server.serving_pid(urlsplit(self.redis_url).port or 0)
        assert pid is not None
        return pid

    @contextmanager
    def paused(self, *names: str) -> Iterator[None]:
        """Stop those processes with SIGSTOP for the block; `redis` is its Redis."""
        pids = [self.redis_pid if name == "redis" else self.processes[name].pid for name in names]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):  # the others must go on
                    os.kill(pid, signal.SIGCONT)

    # --- requests ---

    def call(self, method: str, path: str, body: Any = None, *, status: int | None = None) -> Any:
        """Return the decoded answer to a JSON request; fail unless its status is `status` (default: below 300)."""
        answer = self.http.request(method, path, json=body) if body is not None else self.http.request(method, path)
        good = answer.status_code < 300 if status is None else answer.status_code == status
        assert good, f"{method} {path}: {answer.status_code} {answer.text[:500]}"
        return json.loads(answer.content) if answer.content else None

    def post(self, path: str, body: Any = None, *, status: int | None = None) -> Any:
        """POST; see `call`."""
        return self.call("POST", path, body, status=status)

    def get(self, path: str, *, status: int | None = None) -> Any:
        """GET; see `call`."""
        return self.call("GET", path, status=status)


@contextmanager
def nodes(folder: Path, *, shards: int = 1, schedulers: int = 1) -> Iterator[Nodes]:
    """Run Redis, schedulers and shards, all serving, for the block; print their logs if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with running_redis(folder / "redis") as url:
        cluster = Nodes(folder, url, shards, schedulers)
        try:
            for index in range(schedulers):
                cluster.start_scheduler(index)
            for name in cluster.shard_ports:
                cluster.start_shard(name)
            eventually(
                lambda: sum(s["alive"] for s in cluster.get("/map")["shards"].values()) == shards,
                within_s=START_S,
                what="the shards' joining",
            )
            yield cluster
        except BaseException:
            print(cluster.logs())
            raise
        finally:
            cluster.stop()


def unique(prefix: str) -> str:
    """A model name that no other test uses."""
    return f"{prefix}-{os.urandom(4).hex()}"


def leader(cluster: Nodes) -> int:
    """The index of the scheduler that leads, according to the first one that answers, as soon as one does."""

    def told() -> str:
        for url in cluster.urls:
            try:
                found = cluster.http.get(f"{url}/status", timeout=2.0)
            except httpx.HTTPError:
                continue
            if found.status_code == 200:
                schedulers = [n for n in found.json()["nodes"] if n["role"] == "scheduler"]
                (active,) = [str(n["addresses"][0]) for n in schedulers if n["state"] == "active"]
                return active
        return ""

    return cluster.urls.index(eventually(told, what="a leader"))


def process_name(index: int) -> str:
    """The name that `Nodes` gives the scheduler of that index."""
    return f"scheduler-{index}" if index else "scheduler"


def signal_to(cluster: Nodes, index: int, number: signal.Signals) -> None:
    """Send a signal to the scheduler of that index."""
    os.kill(cluster.processes[process_name(index)].pid, number)


def summing_model(cluster: Nodes, mode: str = "sync", elements: int = 5, **spec: Any) -> str:
    """Create a model of that many elements that adds up what is pushed, as soon as there is room; return its name."""
    name = unique("m")
    body = {
        "name": name,
        "params": {"w": {"shape": [elements]}},
        "optimizer": {"name": "sum"},
        "consistency": {"mode": mode},
        "partitions": 2,
    } | spec
    eventually(lambda: cluster.post("/models", body)["name"] == name, within_s=START_S, what="the model")
    return name
