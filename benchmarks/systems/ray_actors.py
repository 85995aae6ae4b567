"""Ray: an actor that holds a NumPy array, as in Ray's parameter-server example; workers are drivers of one local Ray.

Ray does not always listen on the loopback address, so its token authentication stays on, which is the default, with a
token made for the launch.  Its object store is preallocated: slower to start, faster to run.  In sync the actor waits
for all gradients and puts the new version into the object store once, from which all workers map it.
"""

import asyncio
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from benchmarks.launch import THREADS
from benchmarks.machine import ROOT
from benchmarks.meters import memory_bytes
from benchmarks.systems.process import descendants, serving, wait_for_end
from benchmarks.systems.system import Running, lacking
from benchmarks.workloads import Parts, Work

from paramserver.types import F32

NAMESPACE = "bench"
CORES = 16
"""Number of CPUs that Ray is told to have, so that it starts all actors."""


class Parameters:
    """The actor of one server, made remote by Ray."""

    def __init__(self, work: Work, index: int) -> None:
        self._base = memory_bytes([os.getpid()], "VmRSS")
        start, stop = work.bounds()[index]
        self._values, self._rate = work.initial()[start:stop].copy(), np.float32(work.rate)

    def about(self) -> tuple[int, int]:
        """Return the process id and the memory in bytes before it held the values."""
        return os.getpid(), self._base

    def pull(self) -> F32:
        return self._values

    def push(self, gradient: F32, count: int = 1) -> None:
        """Apply the mean of `count` gradients, given their sum."""
        self._values -= self._rate / np.float32(count) * gradient


class SyncParameters:
    """The actor of one server in sync; as an asyncio actor, it accepts calls while others wait."""

    def __init__(self, work: Work, index: int) -> None:
        self._held = Parameters(work, index)
        self._workers, self._count = work.workers, 0
        self._sum: F32 | None = None
        self._next: asyncio.Future[Any] | None = None

    async def about(self) -> tuple[int, int]:
        return self._held.about()

    async def pull(self) -> F32:
        return self._held.pull()

    async def exchange(self, gradient: F32) -> Any:
        """Return a list with a reference to the values after the mean of all workers' gradients has been applied."""
        import ray

        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        future = self._next
        self._sum = gradient.copy() if self._sum is None else np.add(self._sum, gradient, out=self._sum)
        self._count += 1
        if self._count == self._workers:
            self._held.push(self._sum, self._workers)
            self._sum, self._next, self._count = None, None, 0
            future.set_result([ray.put(self._held.pull())])
        return await future


def prepare(token: str) -> None:
    """Set the environment variables that Ray reads when it is imported."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)


def serve(work: Work, token: str, pipe: Connection) -> None:
    """Run a local Ray cluster with the actors until the pipe is closed."""
    prepare(token)
    os.environ["RAY_preallocate_plasma_memory"] = "1"
    import ray

    threads = {k: "1" for k in THREADS}
    ray.init(
        address="local",
        num_cpus=CORES,
        object_store_memory=5 * 10**8 if work.model_bytes < 2 * 10**7 else 25 * 10**8,
        namespace=NAMESPACE,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": threads | {"PYTHONPATH": str(ROOT)}},
    )
    actor = ray.remote(SyncParameters if work.mode == "sync" else Parameters)
    actors = [actor.options(name=f"server{i}", num_cpus=1).remote(work, i) for i in range(work.servers)]
    pipe.send(ray.get([a.about.remote() for a in actors]))
    pipe.send(ray.get_runtime_context().gcs_address)
    wait_for_end(pipe)
    ray.shutdown()


class RayClient:
    """A driver that calls the actors."""

    fused, pairs = False, 1

    def __init__(self, work: Work, rank: int, address: str, token: str) -> None:
        prepare(token)
        import ray

        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        self._ray, self._work = ray, work
        self._servers = [ray.get_actor(f"server{i}") for i in range(work.servers)]

    def pull(self) -> Parts:
        return list(self._ray.get([s.pull.remote() for s in self._servers]))

    def push(self, gradient: F32) -> None:
        pieces = zip(self._servers, self._work.split(gradient), strict=True)
        self._ray.get([s.push.remote(p) for s, p in pieces])

    def exchange(self, gradient: F32) -> Parts:
        pieces = zip(self._servers, self._work.split(gradient), strict=True)
        found = self._ray.get([s.exchange.remote(p) for s, p in pieces])
        return list(self._ray.get([held for (held,) in found]))

    def close(self) -> None:
        self._ray.shutdown()


class RayActors:
    """Ray as a system."""

    key, label = "ray", "Ray actors"

    def missing(self) -> str:
        return lacking("ray")

    @contextmanager
    def start(self, work: Work) -> Iterator[Running]:
        """See `System.start`."""
        token = secrets.token_hex(32)
        with serving(serve, work, token) as (pid, answers):
            about = answers.next()
            actors = [int(p) for p, _ in about]

            def others() -> list[int]:
                return [pid, *(p.pid for p in descendants(pid) if p.pid not in actors)]

            base = sum(int(b) for _, b in about)
            connect = partial(RayClient, address=answers.next(), token=token)
            yield Running(actors, base, connect, others, {"ray": version("ray")})
