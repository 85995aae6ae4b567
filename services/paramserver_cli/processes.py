"""The processes of a plan: command lines, environment, ports and addresses."""

import os
import secrets
import socket
import sys
from collections.abc import Sequence
from typing import Final, Literal

from paramserver_cli import keys
from paramserver_cli.children import ChildSpec
from paramserver_cli.ports import PortBlock
from paramserver_cli.state_directory import Plan, StateDir
from paramserver_node import redis_server
from paramserver_node.settings import SchedulerSettings

WILDCARD_HOSTS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Processes:
    """The processes of one cluster on this machine; `plan` may be replaced to change the number of shards."""

    def __init__(self, state: StateDir, plan: Plan, block: PortBlock) -> None:
        self.state, self.plan, self.block = state, plan, block
        self.local_host = WILDCARD_HOSTS.get(plan.host, plan.host)
        self._host = f"[{self.local_host}]" if ":" in self.local_host else self.local_host
        self.scheme = "https" if SchedulerSettings.load({"host": plan.host}).tls_certificate else "http"
        self._node_env = keys.node_environment(state, plan) if plan.scheduler is None else {}
        # Where tokens are needed, other users of this machine are not let in past them.
        closed = plan.redis is None and keys.needs_tokens(self._node_env)
        self.redis_password = secrets.token_hex(24) if closed else ""
        self.redis_url = plan.redis or redis_server.url(block.redis, self.redis_password)

    @property
    def scheduler_names(self) -> Sequence[str]:
        """Names of the schedulers and of their logs; empty if the plan has only workers."""
        if self.plan.scheduler is not None:
            return ()
        return [f"scheduler-{i}" if i else "scheduler" for i in range(self.plan.schedulers)]

    @property
    def shard_names(self) -> Sequence[str]:
        """Names of the shards and of their logs; empty if the plan has only workers."""
        return [] if self.plan.scheduler is not None else [f"shard-{i}" for i in range(self.plan.shards)]

    @property
    def scheduler_urls(self) -> list[str]:
        """URLs of the schedulers; if the plan has only workers, those of the cluster they work for."""
        if self.plan.scheduler is not None:
            return self.plan.scheduler.split(",")
        return [self._url(p) for p in self.block.schedulers[: self.plan.schedulers]]

    @property
    def shard_urls(self) -> list[str]:
        """URLs of the shards."""
        return [self._url(self.block.shard(i)) for i in range(len(self.shard_names))]

    def redis_specs(self) -> list[ChildSpec]:
        """Return the Redis server to start; empty if the plan names a running one, or has only workers."""
        if self.plan.redis is not None or self.plan.scheduler is not None:
            return []
        folder = self.state.path / "redis"
        folder.mkdir(mode=0o700, exist_ok=True)  # its server's files, which hold all values, are readable by everybody
        config = self.state.write_redis_password(self.redis_password) if self.redis_password else None
        binary, appendfsync = redis_server.find_binary(), self.plan.appendfsync
        argv = redis_server.command(binary, self.block.redis, folder, config=config, appendfsync=appendfsync)
        return [ChildSpec("redis", "redis", argv)]

    def scheduler_specs(self) -> list[ChildSpec]:
        """Return the schedulers to start; they share the state directory."""
        return [
            self._node(name, "scheduler", port, "--state-dir", str(self.state.path))
            for name, port in zip(self.scheduler_names, self.block.schedulers, strict=False)
        ]

    def shard_specs(self) -> list[ChildSpec]:
        """Return the shards to start."""
        schedulers = ",".join(self.scheduler_urls)
        return [
            self._node(name, "shard", self.block.shard(i), "--scheduler", schedulers)
            for i, name in enumerate(self.shard_names)
        ]

    def worker_specs(self) -> list[ChildSpec]:
        """Return the pool workers to start."""
        if not self.plan.workers:
            return []
        urls, ours = self.scheduler_urls, self.plan.scheduler is None
        env = {"PARAMSERVER_URL": ",".join(urls), **keys.worker_environment(self.state, urls, ours=ours)}
        # Workers share the machine: one BLAS thread each by default, or their thread pools compete for the cores.
        for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            env[name] = os.environ.get(name, "1")
        if self.plan.paths:
            env["PYTHONPATH"] = os.pathsep.join([*self.plan.paths, *filter(None, [os.environ.get("PYTHONPATH")])])
        allow = [word for prefix in self.plan.allow for word in ("--allow", prefix)]
        # A process id is unique on one machine alone: in containers it is often the same.
        tag = "" if ours else f"-{secrets.token_hex(4)}"
        return [
            ChildSpec(f"worker-{i}", "worker", [*_python("worker"), "--name", f"worker{tag}-{i}", *allow], env)
            for i in range(self.plan.workers)
        ]

    def _node(self, name: str, kind: Literal["scheduler", "shard"], port: int, *own: str) -> ChildSpec:
        words = ["--name", name, "--host", self.plan.host, "--port", str(port), *own]
        # The setting `advertise`, which all of them inherit, can be the URL of one node only.
        if kind == "shard" or self.plan.schedulers > 1:
            host = socket.gethostname() if self.plan.host in WILDCARD_HOSTS else self._host
            words += ["--advertise", f"{self.scheme}://{host}:{port}"]
        argv = [*_python(kind), *words]
        # Not as --redis: every user of the machine can read command lines, and the URL may hold a password.
        env = {**self._node_env, "PARAMSERVER_REDIS": self.redis_url}
        return ChildSpec(name, kind, argv, env)

    def _url(self, port: int) -> str:
        return f"{self.scheme}://{self._host}:{port}"


def _python(service: str) -> list[str]:
    # -P: do not import from the current folder, which may hold a `services` or a `redis.py`.
    return [sys.executable, "-P", "-m", f"paramserver_{service}"]
