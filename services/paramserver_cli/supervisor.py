"""The process that owns a cluster on this machine: it starts the others, restarts what dies, and ends them all.

`python -m paramserver_cli.supervisor STATE_DIR [LIFELINE]` reads `plan.json` there.  It runs in a session of its own
and holds none of its caller's streams.  LIFELINE is the read end of a pipe: when the other end closes, because the
caller ended or was killed, the cluster goes down with it; without one it lives until SIGTERM.
"""

import asyncio
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from paramserver.errors import PsError
from paramserver_cli import keys, ports
from paramserver_cli.children import ChildSpec, Guard, signal_group, start
from paramserver_cli.cluster_file import Cluster, Phase, Plan, StateDir, SupervisorState
from paramserver_node import redis_server
from paramserver_node.settings import SchedulerSettings

log = logging.getLogger("paramserver.supervisor")

START_TIMEOUT_S = 180.0
"""Longest time until everything is ready: a first start compiles the kernels on a cold cache."""
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0
STEADY_S = 10.0
"""A child that lived so long is restarted at once; below, the pause doubles."""
START_ATTEMPTS_MAX = 3
"""Deaths of one child before the cluster was ever ready: then the start has failed."""
GRACE_S = 5.0
"""Between SIGTERM and SIGKILL."""
PROBE_INTERVAL_S = 0.05
PROBE_TIMEOUT_S = 2.0


class StartFailed(Exception):
    """Raised when the cluster cannot be brought up; the text has the log's last lines."""


async def _is_ready(host: str, port: int, tls: ssl.SSLContext | None) -> bool:
    """Whether a node answers `GET /readyz` with 200; without a thread, as forking and threads do not go together."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
            try:
                writer.write(f"GET /readyz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                return (await reader.readline()).split()[1:2] == [b"200"]
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def _unchecked() -> ssl.SSLContext:
    """TLS to one's own children, who are told nothing and believed nothing but that they answer."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class Supervisor:
    """One cluster's processes."""

    def __init__(self, state: StateDir, plan: Plan, block: ports.PortBlock, guard: Guard) -> None:
        self.state, self.plan, self.block, self.guard = state, plan, block, guard
        self.alive: dict[str, subprocess.Popen[bytes]] = {}
        self.restarts: dict[str, int] = {}
        self.phase: Phase = "starting"
        self.error = ""
        self.stop = asyncio.Event()
        self.local_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(plan.host, plan.host)
        host = f"[{self.local_host}]" if ":" in self.local_host else self.local_host
        settings = SchedulerSettings.load({"host": plan.host})
        self.scheme = "https" if settings.tls_certificate else "http"
        self.node_env = keys.node_environment(state, plan) if plan.scheduler is None else {}
        self.scheduler_url = plan.scheduler or f"{self.scheme}://{host}:{block.scheduler}"
        self.shard_urls = [f"{self.scheme}://{host}:{p}" for p in block.shards]
        self.redis_url = plan.redis or redis_server.url(block.redis)

    def redis_specs(self) -> list[ChildSpec]:
        """The Redis server, unless somebody else runs one."""
        if self.plan.redis is not None or self.plan.scheduler is not None:
            return []
        folder = self.state.path / "redis"
        folder.mkdir(exist_ok=True)
        argv = redis_server.command(redis_server.find_binary(), self.block.redis, folder)
        return [ChildSpec("redis", "redis", argv)]

    def server_specs(self) -> list[ChildSpec]:
        """The scheduler and the shards."""
        if self.plan.scheduler is not None:
            return []
        host, redis = ["--host", self.plan.host], ["--redis", self.redis_url]
        ports = ["--port", str(self.block.scheduler), *self._advertise(self.block.scheduler)]
        argv = [*_python("scheduler"), *host, *redis, *ports, "--state-dir", str(self.state.path)]
        specs = [ChildSpec("scheduler", "scheduler", argv, self.node_env)]
        for i, port in enumerate(self.block.shards):
            own = ["--name", f"shard-{i}", "--port", str(port), "--scheduler", self.scheduler_url]
            own += self._advertise(port)
            specs.append(ChildSpec(f"shard-{i}", "shard", [*_python("shard"), *host, *redis, *own], self.node_env))
        return specs

    def _advertise(self, port: int) -> list[str]:
        # Bound to every address, a node would name one that nobody can reach; clients try those named here in turn.
        if self.plan.host not in ("0.0.0.0", "::"):
            return []
        return ["--advertise", f"{self.scheme}://{socket.gethostname()}:{port}"]

    def worker_specs(self) -> list[ChildSpec]:
        """The pool workers."""
        env = {"PARAMSERVER_URL": self.scheduler_url, **keys.worker_environment(self.state)}
        # Several workers share the machine: one thread each, or the BLAS pools fight over the cores.
        for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            env[name] = os.environ.get(name, "1")
        if self.plan.paths:
            env["PYTHONPATH"] = os.pathsep.join([*self.plan.paths, *filter(None, [os.environ.get("PYTHONPATH")])])
        allow = [word for prefix in self.plan.allow for word in ("--allow", prefix)]
        tag = "" if self.plan.scheduler is None else f"-{os.getpid()}"
        return [
            ChildSpec(f"worker-{i}", "worker", [*_python("worker"), "--name", f"worker{tag}-{i}", *allow], env)
            for i in range(self.plan.workers)
        ]

    async def keep(self, spec: ChildSpec) -> None:
        """Run one child, again and again, until the cluster stops."""
        backoff_s = BACKOFF_FIRST_S
        while not self.stop.is_set():
            born = time.monotonic()
            child = start(spec, self.state.log(spec.name), self.guard)
            self.alive[spec.name] = child
            log.info("%s started as process %d", spec.name, child.pid)
            self.publish()
            code = await self._ended(child)
            signal_group(child.pid, signal.SIGKILL)  # what it may have started itself
            self.guard.remove(child.pid)
            del self.alive[spec.name]
            if self.stop.is_set() or (spec.kind == "worker" and code == 0):
                break
            log.warning("%s (process %d) ended with %d", spec.name, child.pid, code)
            self.restarts[spec.name] = self.restarts.get(spec.name, 0) + 1
            if self.phase == "starting" and self.restarts[spec.name] >= START_ATTEMPTS_MAX:
                raise StartFailed(f"{spec.name} does not start:\n{self.state.tail(spec.name)}")
            self.publish()
            backoff_s = BACKOFF_FIRST_S if time.monotonic() - born > STEADY_S else min(backoff_s * 2, BACKOFF_MAX_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), backoff_s)
        self.publish()

    async def _ended(self, child: subprocess.Popen[bytes]) -> int:
        # Polling needs no thread and no watcher of the loop's, and is the same on every system and Python.
        while (code := child.poll()) is None:
            await asyncio.sleep(PROBE_INTERVAL_S)
        return code

    def publish(self) -> None:
        """Write down what is true now; `cluster.json` only once the cluster was ready."""
        pid = {name: child.pid for name, child in self.alive.items()}
        workers = {f"worker-{i}": pid.get(f"worker-{i}") for i in range(self.plan.workers)}
        if self.plan.scheduler is None and self.phase == "ready":
            pids = {
                "scheduler": [pid.get("scheduler")],
                "shards": [pid.get(f"shard-{i}") for i in range(self.plan.shards)],
                "redis": [] if self.plan.redis else [pid.get("redis")],
            }
            cluster = Cluster(self.scheduler_url, self.shard_urls, self.redis_url, None, pids, str(self.state.path))
            self.state.write(cluster)
        # Last: whoever reads the phase `ready` finds the cluster described.
        self.state.write(SupervisorState(os.getpid(), self.phase, workers, dict(self.restarts), self.error))

    async def _until_redis_serves(self) -> None:
        while True:
            child = self.alive.get("redis")
            if child is not None and child.pid == redis_server.serving_pid(self.block.redis):
                return
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def _until_servers_are_ready(self) -> None:
        tls = _unchecked() if self.scheme == "https" else None
        waiting = [self.block.scheduler, *self.block.shards]
        while waiting:
            waiting = [port for port in waiting if not await _is_ready(self.local_host, port, tls)]
            await asyncio.sleep(PROBE_INTERVAL_S if waiting else 0)

    async def run(self) -> None:
        """Bring everything up, keep it up until `stop`, take it down.

        Raises StartFailed when it does not come up.
        """
        redis, servers, workers = self.redis_specs(), self.server_specs(), self.worker_specs()
        try:
            async with asyncio.TaskGroup() as children:
                stopper = children.create_task(self._stop_children(workers, servers, redis))
                try:
                    async with asyncio.timeout(START_TIMEOUT_S):
                        for spec in redis:
                            children.create_task(self.keep(spec))
                            await self._unless_stopped(self._until_redis_serves())
                        for spec in servers:
                            children.create_task(self.keep(spec))
                        if servers:
                            await self._unless_stopped(self._until_servers_are_ready())
                except TimeoutError:
                    raise StartFailed(f"the cluster was not ready after {START_TIMEOUT_S:g} s") from None
                if not self.stop.is_set():
                    for spec in workers:
                        children.create_task(self.keep(spec))
                    self.phase = "ready"
                    self.publish()
                await stopper
        finally:
            for child in self.alive.values():
                signal_group(child.pid, signal.SIGKILL)
                child.wait()

    async def _unless_stopped(self, step: Coroutine[Any, Any, None]) -> None:
        """Wait for a step of the start, or for the order to stop."""
        async with asyncio.TaskGroup() as both:
            work, stop = both.create_task(step), both.create_task(self.stop.wait())
            await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
            work.cancel()
            stop.cancel()

    async def _stop_children(self, *stages: list[ChildSpec]) -> None:
        """Once told to stop: workers, then servers, then Redis, so that each can still say goodbye to the next."""
        await self.stop.wait()
        self.phase = "stopping"
        self.publish()
        for specs in stages:
            children = [self.alive[s.name] for s in specs if s.name in self.alive]
            for child in children:
                signal_group(child.pid, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_S
            while any(c.poll() is None for c in children) and time.monotonic() < deadline:
                await asyncio.sleep(PROBE_INTERVAL_S)
            for child in children:
                signal_group(child.pid, signal.SIGKILL)


def _python(service: str) -> list[str]:
    # -P: the folder it is started from is not a place to import from (it may hold a `services` or a `redis.py`).
    return [sys.executable, "-P", "-m", f"paramserver_{service}"]


async def _main(state: StateDir, plan: Plan, block: ports.PortBlock, guard: Guard, lifeline: int | None) -> int:
    supervisor = Supervisor(state, plan, block, guard)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.stop.set)
    if lifeline is not None:

        def caller_is_gone() -> None:
            loop.remove_reader(lifeline)
            supervisor.stop.set()

        loop.add_reader(lifeline, caller_is_gone)
    try:
        await supervisor.run()
    except* (StartFailed, PsError, OSError) as failures:
        supervisor.phase, supervisor.error = "failed", str(failures.exceptions[0])
        log.error("%s", supervisor.error)
        supervisor.publish()
    return 1 if supervisor.phase == "failed" else 0


def main(argv: list[str]) -> int:
    """Run the plan of a state directory until told to stop; the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    state = StateDir(Path(argv[0]))
    lifeline = int(argv[1]) if len(argv) > 1 else None
    guard = Guard()  # before the lock: a fork would hold it too
    lock = state.lock()
    plan = state.plan()
    if lock is None or plan is None:
        log.error("%s is %s", state.path, "in use by another cluster" if lock is None else "without a plan")
        return 1
    state.forget()
    state.write(SupervisorState(os.getpid(), "starting"))
    try:
        block = ports.reserve(0 if plan.scheduler else plan.shards, plan.host, plan.port)
    except (PsError, OSError) as e:
        state.write(SupervisorState(os.getpid(), "failed", error=str(e)))
        return 1
    try:
        return asyncio.run(_main(state, plan, block, guard, lifeline))
    finally:
        guard.close()
        (state.path / "cluster.json").unlink(missing_ok=True)
        block.lock.close()
        lock.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
