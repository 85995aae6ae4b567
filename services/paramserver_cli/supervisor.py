"""The process that owns a cluster on this machine: it starts the others, restarts those that die, and stops them all.

`python -m paramserver_cli.supervisor STATE_DIR LOCK [LIFELINE]` runs the `plan.json` in STATE_DIR.  The process has its
own session and holds none of its caller's streams.  LOCK is the open file of the lock, which the caller has taken.
LIFELINE is the read end of a pipe: when the other end closes, because the caller exited or was killed, the cluster is
stopped.  Without LIFELINE it runs until SIGTERM.
"""

import asyncio
import logging
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paramserver.errors import PsError, first_cause
from paramserver_cli import ports
from paramserver_cli.children import ChildSpec, Guard, signal_group, start
from paramserver_cli.processes import Processes
from paramserver_cli.state_directory import Cluster, Phase, Plan, StateDir, SupervisorState
from paramserver_node import redis_server
from paramserver_node.log import to_standard_error
from paramserver_node.race import race
from paramserver_node.setting_checks import shown

log = logging.getLogger("paramserver.supervisor")

START_TIMEOUT_S = 180.0
"""Time limit until everything is ready; the first start compiles the kernels."""
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0
STEADY_S = 10.0
"""A child that lived longer is restarted after BACKOFF_FIRST_S; otherwise the pause doubles, up to BACKOFF_MAX_S."""
START_ATTEMPTS_MAX = 3
"""The start has failed when one child has died this often before the cluster is ready."""
GRACE_S = 10.0
"""Time between SIGTERM and SIGKILL."""
SHARD_SPARE_S = 5.0
"""A shard, which first hands over or stores its partitions, has so much more than its own `stop_s`."""
FOLDER_S = 5.0
"""Interval between looks at the state directory: at its lock, and at the size of the logs."""
USED_S = 600.0
"""How often all files there are marked as in use: there may be many, and whoever tidies goes by days."""
PROBE_INTERVAL_S = 0.05
PROBE_TIMEOUT_S = 2.0


class StartFailed(Exception):
    """Raised when the cluster cannot be started; the text has the last lines of the log, or names the log folder."""


async def _is_ready(host: str, port: int, tls: ssl.SSLContext | None) -> bool:
    """Whether a node answers `GET /readyz` with 200; asked without a thread, because forking and threads do not mix."""
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


def _unverified_tls() -> ssl.SSLContext:
    """Return a TLS context that checks no certificates: readiness probes of our own children carry no secret."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class Supervisor:
    """Starts, restarts and stops the processes of one cluster."""

    def __init__(self, processes: Processes, guard: Guard, lock: int) -> None:
        self.state, self.processes, self.guard, self.lock = processes.state, processes, guard, lock
        self.alive: dict[str, subprocess.Popen[bytes]] = {}
        self._kept: set[str] = set()
        """Names of the children that a `run_child` keeps running; they may be dead until it starts them again."""
        self.restarts: dict[str, int] = {}
        self.phase: Phase = "starting"
        self.error = ""
        self.stop = asyncio.Event()
        self.plan_changed = asyncio.Event()
        """Set by SIGUSR1: the plan may have changed."""
        self._wanted_shards: set[str] = set()
        """Names of the shards to keep running."""

    async def run_child(self, spec: ChildSpec) -> None:
        """Run one child and restart it when it ends, until the cluster stops.

        A shard that the plan no longer has is not restarted.  Raises StartFailed after START_ATTEMPTS_MAX deaths before
        the cluster is ready.
        """
        self._kept.add(spec.name)
        try:
            await self._keep(spec)
        finally:
            self._kept.remove(spec.name)
        self.publish()

    async def _keep(self, spec: ChildSpec) -> None:
        backoff_s = BACKOFF_FIRST_S
        while self._wanted(spec):
            born = time.monotonic()
            try:
                self.state.logs.mkdir(mode=0o700, exist_ok=True)  # whoever made room may have removed it
                child = start(spec, self.state.log(spec.name), self.guard)
            except OSError as e:  # the others run on, as after a death: memory may be short, or `.venv` being rebuilt
                if self.phase == "starting":
                    raise
                log.error("%s cannot be started, and is tried again: %s", spec.name, e)
            else:
                if not await self._follow(spec, child):
                    break
            backoff_s = BACKOFF_FIRST_S if time.monotonic() - born > STEADY_S else min(backoff_s * 2, BACKOFF_MAX_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), backoff_s)

    async def _follow(self, spec: ChildSpec, child: subprocess.Popen[bytes]) -> bool:
        """Wait for the end of a child, and return whether to start it again."""
        self.alive[spec.name] = child
        log.info("%s started as process %d", spec.name, child.pid)
        self.publish()
        code = await self._ended(child)
        signal_group(child.pid, signal.SIGKILL)  # its own children, if any
        self.guard.remove(child.pid)
        del self.alive[spec.name]
        if not self._wanted(spec):
            if spec.kind == "shard" and code not in (0, -signal.SIGTERM):  # the signal itself ends one that starts
                lost = f"{spec.name} ended with {code} before everything was stored: {self.state.log(spec.name)}"
                log.error("%s", lost)
                self.error = f"{self.error}\n{lost}" if self.error else lost
            return False
        log.warning("%s (process %d) ended with %d", spec.name, child.pid, code)
        self.restarts[spec.name] = self.restarts.get(spec.name, 0) + 1
        if self.phase == "starting" and self.restarts[spec.name] >= START_ATTEMPTS_MAX:
            raise StartFailed(f"{spec.name} does not start:\n{self.state.tail(spec.name)}")
        self.publish()
        return True

    def _wanted(self, spec: ChildSpec) -> bool:
        """Whether to start the child (again)."""
        return not self.stop.is_set() and (spec.kind != "shard" or spec.name in self._wanted_shards)

    async def _ended(self, child: subprocess.Popen[bytes]) -> int:
        # Polling needs neither a thread nor an asyncio child watcher, and works alike on every system and Python.
        while (code := child.poll()) is None:
            await asyncio.sleep(PROBE_INTERVAL_S)
        return code

    def publish(self) -> None:
        """Write the current state to `supervisor.json` and, while the cluster is ready, to `cluster.json`."""
        p, plan = self.processes, self.processes.plan
        pid = {name: child.pid for name, child in self.alive.items()}
        if plan.scheduler is None and self.phase == "ready":
            pids = {
                "scheduler": [pid.get(name) for name in p.scheduler_names],
                "shards": [pid.get(name) for name in p.shard_names],
                "redis": [] if plan.redis else [pid.get("redis")],
            }
            urls = p.scheduler_urls
            redis = shown(p.redis_url)
            self._write(Cluster(urls[0], p.shard_urls, redis, None, pids, str(self.state.path), urls))
        # Last, so that a process that reads the phase `ready` finds a complete `cluster.json`.
        self._write(SupervisorState(os.getpid(), self.phase, dict(self.restarts), self.error, p.block.shards_max))

    def _write(self, document: Cluster | SupervisorState) -> None:
        """Write a file of the state directory; on a full disk the cluster runs on, and is stopped in turn, without."""
        if not self.state.is_locked_by(self.lock):  # it may be another cluster's by now
            return
        try:
            self.state.write(document)
        except OSError as e:
            log.error("the state of the cluster cannot be written: %s", e)

    async def _until_redis_serves(self) -> None:
        while True:
            child, p = self.alive.get("redis"), self.processes
            if child is not None and child.pid == redis_server.serving_pid(p.block.redis, p.redis_password):
                return
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def _until_servers_are_ready(self) -> None:
        p = self.processes
        tls = _unverified_tls() if p.scheme == "https" else None
        waiting = [*p.block.schedulers, *(p.block.shard(i) for i in range(p.plan.shards))]
        while waiting:
            waiting = [port for port in waiting if not await _is_ready(p.local_host, port, tls)]
            await asyncio.sleep(PROBE_INTERVAL_S if waiting else 0)

    async def run(self) -> None:
        """Start everything, keep it running until `stop` is set, then stop it.

        Raises an ExceptionGroup with a StartFailed if the cluster does not start.
        """
        workers = self.processes.worker_specs()
        try:
            async with asyncio.TaskGroup() as children:
                stopper = children.create_task(self._stop_children())
                await self._start_servers(children)
                if not self.stop.is_set():
                    for spec in workers:
                        children.create_task(self.run_child(spec))
                    self.phase = "ready"
                    self.publish()
                    others = [children.create_task(w) for w in (self._follow_plan(children), self._tend_folder())]
                    await self.stop.wait()
                    for task in others:
                        task.cancel()
                await stopper
            self.phase = "stopped"
            self.publish()
        finally:
            for child in self.alive.values():
                signal_group(child.pid, signal.SIGKILL)
                child.wait()

    async def _start_servers(self, children: asyncio.TaskGroup) -> None:
        """Start all but the workers, and wait until they are ready or `stop` is set.  Raises StartFailed if late."""
        p = self.processes
        redis, schedulers, shards = p.redis_specs(), p.scheduler_specs(), p.shard_specs()
        self._wanted_shards = set(p.shard_names)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                for spec in redis:
                    children.create_task(self.run_child(spec))
                    await race(self._until_redis_serves(), self.stop.wait())
                for spec in (*schedulers, *shards):
                    children.create_task(self.run_child(spec))
                if schedulers:
                    await race(self._until_servers_are_ready(), self.stop.wait())
        except TimeoutError:
            logs = f"what its processes say is in {self.state.logs}"
            raise StartFailed(
                f"the cluster was not ready after {START_TIMEOUT_S:g} s; {logs}{self._complaints()}"
            ) from None

    def _complaints(self) -> str:
        """Return the last warning or error in the log of each process, a line each."""
        found = ""
        for name in sorted(self.alive):
            told = [line for line in self.state.tail(name).splitlines() if " WARNING " in line or " ERROR " in line]
            found += f"\n{name}: {told[-1]}" if told else ""
        return found

    async def _follow_plan(self, children: asyncio.TaskGroup) -> None:
        """Start or stop shards whenever the plan in the state directory has changed."""
        while True:
            await self.plan_changed.wait()
            self.plan_changed.clear()
            plan, p = self.state.plan(), self.processes
            if plan is None or p.plan.scheduler is not None or plan.shards == p.plan.shards:
                continue
            if not 0 < plan.shards <= p.block.shards_max:  # psctl asks for none of these
                log.error("the plan's %d shards are not 1 to %d: it is ignored", plan.shards, p.block.shards_max)
                continue
            self.error = ""
            log.info("%d shards instead of %d", plan.shards, p.plan.shards)
            p.plan = replace(p.plan, shards=plan.shards)
            before, self._wanted_shards = self._wanted_shards, set(p.shard_names)
            for spec in p.shard_specs():
                if spec.name not in self._kept:
                    children.create_task(self.run_child(spec))
            self.publish()
            await self._end(sorted(before - self._wanted_shards), self._grace_s("shard"))

    async def _tend_folder(self) -> None:
        """Keep the logs short and all files in use; stop if the folder is gone, as psctl then has no other way to."""
        mark_at = 0.0
        while True:
            await asyncio.sleep(FOLDER_S)
            if not self.state.is_locked_by(self.lock):
                log.error("%s has been removed or renamed: the cluster stops", self.state.path)
                self.stop.set()
            if (now := asyncio.get_running_loop().time()) >= mark_at:
                mark_at = now + USED_S
                self.state.mark_used()
            with suppress(OSError):  # next time
                self.state.bound_logs()

    async def _stop_children(self) -> None:
        """Wait for `stop`, then stop workers, shards, schedulers and Redis in turn: each can sign off from the rest."""
        await self.stop.wait()
        self.phase, self.error = "stopping", ""
        self.publish()
        names = sorted(self.alive)
        for kind in ("worker", "shard", "scheduler", "redis"):
            ours = [n for n in names if n.partition("-")[0] == kind]
            await self._end(ours, self._grace_s(kind))

    def _grace_s(self, kind: str) -> float:
        return self.processes.plan.stop_s + SHARD_SPARE_S if kind == "shard" else GRACE_S

    async def _end(self, names: Sequence[str], grace_s: float) -> None:
        """Send these children SIGTERM, wait up to `grace_s` for them to exit, then SIGKILL their process groups."""
        children = [self.alive[n] for n in names if n in self.alive]
        for child in children:
            signal_group(child.pid, signal.SIGTERM)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        while any(c.poll() is None for c in children) and loop.time() < deadline:
            await asyncio.sleep(PROBE_INTERVAL_S)
        for child in children:
            if child.poll() is None:  # the number of one that has ended may be another process's by now
                signal_group(child.pid, signal.SIGKILL)


async def _main(
    state: StateDir, plan: Plan, block: ports.PortBlock, guard: Guard, lock: int, lifeline: int | None
) -> int:
    supervisor = Supervisor(Processes(state, plan, block), guard, lock)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, supervisor.plan_changed.set)
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
        supervisor.phase, supervisor.error = "failed", str(first_cause(failures))
        log.error("%s", supervisor.error)
        supervisor.publish()
    return 1 if supervisor.phase == "failed" else 0


def main(argv: list[str]) -> int:
    """Run the plan of a state directory until told to stop, and return the exit status."""
    to_standard_error(logging.INFO)
    state = StateDir(Path(argv[0]))
    lock, lifeline = int(argv[1]), int(argv[2]) if len(argv) > 2 else None
    guard = Guard()
    plan = state.plan()
    if plan is None:
        log.error("%s is without a plan", state.path)
        return 1
    state.write(SupervisorState(os.getpid(), "starting"))
    try:
        block = ports.reserve(0 if plan.scheduler else plan.shards, plan.host, plan.port, plan.schedulers)
    except (PsError, OSError) as e:
        state.write(SupervisorState(os.getpid(), "failed", error=str(e)))
        return 1
    try:
        return asyncio.run(_main(state, plan, block, guard, lock, lifeline))
    finally:
        guard.close()
        if state.is_locked_by(lock):
            (state.path / "cluster.json").unlink(missing_ok=True)
        block.lock.close()
        os.close(lock)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
