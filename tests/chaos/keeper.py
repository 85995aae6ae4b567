"""The process that owns a cluster under test: real nodes with fault proxies between them, restarted when they die.

`python -m tests.chaos.keeper FOLDER PLAN`, where PLAN is the JSON of a `Plan`.  It reads one JSON order per line from
stdin and answers each with one line.  When stdin closes, because the test ended or was killed, it stops everything.
With `Plan.proxied`, all traffic of a node to Redis, a scheduler or a shard passes a link of this process (`proxy.py`)
named `FROM>TO`: `shard-0>redis`, `scheduler-1>redis`, `shard-2>scheduler-0`, `any>shard-1` for all clients of that
shard, and `any>scheduler-0` for the other schedulers.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.servers import free_port

from paramserver_cli.children import ChildSpec, Guard, Kind, signal_group, start
from paramserver_node import redis_server

from .proxy import Link

PROBE_S = 0.02
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Plan:
    """The composition of a cluster."""

    shards: int = 3
    schedulers: int = 1
    proxied: bool = False
    """Whether links lie between the nodes; otherwise they connect to each other directly."""


@dataclass
class Kept:
    """A process to keep running, and the record of its deaths."""

    spec: ChildSpec
    child: subprocess.Popen[bytes] | None = None
    deaths: list[tuple[float, int]] = field(default_factory=list)
    """(time on the monotonic clock, exit status) of each death."""
    held: bool = False
    """Whether its restart is held back."""
    next_argv: list[str] | None = None
    next_env: list[dict[str, str]] = field(default_factory=list)
    """Environment variables to add: to the next start, to the one after it, and so on."""


class Keeper:
    """One cluster's processes and links."""

    def __init__(self, folder: Path, plan: Plan, guard: Guard) -> None:
        self.folder, self.plan, self.guard = folder, plan, guard
        self.kept: dict[str, Kept] = {}
        self.links: dict[str, Link] = {}
        self.stop = asyncio.Event()
        self.redis_port = free_port()
        self.scheduler_ports = [free_port() for _ in range(plan.schedulers)]
        self.shard_ports = [free_port() for _ in range(plan.shards)]

    async def up(self) -> None:
        """Start the links and define the processes, which are not started yet."""
        folder = self.folder / "redis"
        folder.mkdir(parents=True, exist_ok=True)
        argv = redis_server.command(redis_server.find_binary(), self.redis_port, folder)
        self._keep("redis", "redis", argv)
        for i, port in enumerate(self.scheduler_ports):
            name = f"scheduler-{i}"
            redis = redis_server.url(await self._way(name, "redis", self.redis_port))
            own = f"http://127.0.0.1:{await self._way('any', name, port)}"
            self._keep(name, "scheduler", [*_module("scheduler"), "--port", str(port), "--redis", redis,
                                           "--advertise", own, "--state-dir", str(self.folder / "state")])  # fmt: skip
        for i in range(self.plan.shards):
            await self.add_shard(i)

    async def add_shard(self, index: int) -> None:
        """Define the process of one shard, without starting it."""
        name, port = f"shard-{index}", self.shard_ports[index]
        ways = [await self._way(name, f"scheduler-{j}", p) for j, p in enumerate(self.scheduler_ports)]
        schedulers = ",".join(f"http://127.0.0.1:{p}" for p in ways)
        redis = redis_server.url(await self._way(name, "redis", self.redis_port))
        own = await self._way("any", name, port)
        words = ["--name", name, "--port", str(port), "--scheduler", schedulers, "--redis", redis]
        self._keep(name, "shard", [*_module("shard"), *words, "--advertise", f"http://127.0.0.1:{own}"])

    async def _way(self, source: str, target: str, port: int) -> int:
        """Return the port by which `source` reaches `target`, which listens on `port`."""
        if not self.plan.proxied:
            return port
        link = self.links[f"{source}>{target}"] = Link(f"{source}>{target}", port)
        await link.start()
        return link.port

    def _keep(self, name: str, kind: Kind, argv: list[str]) -> None:
        self.kept[name] = Kept(ChildSpec(name, kind, argv))

    async def _run(self, name: str) -> None:
        kept = self.kept[name]
        while not self.stop.is_set():
            if kept.held:
                await asyncio.sleep(PROBE_S)
                continue
            env, argv = kept.next_env.pop(0) if kept.next_env else {}, kept.next_argv or list(kept.spec.argv)
            kept.next_argv = None
            if self.plan.proxied:  # a folder that cannot be created: shared memory would bypass the links
                env["PARAMSERVER_SHARED_MEMORY"] = "/dev/null/none"
            spec = ChildSpec(name, kept.spec.kind, argv, env)
            kept.child = start(spec, self.folder / f"{name}.log", self.guard)
            while (code := kept.child.poll()) is None:
                await asyncio.sleep(PROBE_S)
            kept.deaths.append((time.monotonic(), code))
            signal_group(kept.child.pid, signal.SIGKILL)  # its own children
            self.guard.remove(kept.child.pid)
            kept.child = None
            await asyncio.sleep(0.1)  # the delay of the `psctl up` supervisor before its first restart

    # --- orders

    def obey(self, order: Mapping[str, Any]) -> Any:
        """Carry out one order and return its answer."""
        match order["do"]:
            case "status":
                return self.status()
            case "signal":
                kept = self.kept[order["who"]]
                kept.held = bool(order.get("hold", kept.held))
                kept.next_env, kept.next_argv = list(order.get("env") or ()), None
                if bug := order.get("bug"):  # start the same node with a planted bug
                    kept.next_env = [{"PYTHONPATH": str(ROOT)}]
                    kept.next_argv = [sys.executable, "-m", "tests.chaos.planted", bug, *kept.spec.argv[4:]]
                if kept.child is not None:
                    # Only to the process itself, not its group.  SIGKILL ends a stopped process, too.
                    os.kill(kept.child.pid, order["signal"])
                return kept.child.pid if kept.child is not None else None
            case "start":
                kept = self.kept[order["who"]]
                kept.held = False
                return None
            case "cut":
                self.links[order["link"]].cut(order["way"])
            case "lose":
                self.links[order["link"]].lose()
            case "delay":
                self.links[order["link"]].delay_s = float(order["seconds"])
            case "reset":
                self.links[order["link"]].reset()
            case "heal":
                for link in self.links.values():
                    link.heal()
            case unknown:
                raise ValueError(f"no such order: {unknown}")
        return None

    def status(self) -> dict[str, Any]:
        """Return addresses, processes with their deaths, and the names of the links."""
        return {
            "redis_port": self.redis_port,
            "schedulers": [f"http://127.0.0.1:{p}" for p in self.scheduler_ports],
            "shards": [f"http://127.0.0.1:{p}" for p in self.shard_ports],
            "processes": {name: {"pid": k.child and k.child.pid, "deaths": k.deaths} for name, k in self.kept.items()},
            "links": list(self.links),
        }

    async def serve(self, orders: asyncio.StreamReader) -> None:
        """Carry out orders until stdin closes, then stop everything."""
        await self.up()
        async with asyncio.TaskGroup() as group:
            for name in self.kept:
                group.create_task(self._run(name))
            print(json.dumps(self.status()), flush=True)
            try:
                while line := await orders.readline():
                    try:
                        answer = {"ok": self.obey(json.loads(line))}
                    except (KeyError, ValueError, OSError) as error:
                        answer = {"error": repr(error)}
                    print(json.dumps(answer), flush=True)
            finally:
                await self.down()

    async def down(self) -> None:
        """Kill every process, the shards first, and stop every link."""
        self.stop.set()
        for kind in ("shard", "scheduler", "redis"):
            children = [k.child for k in self.kept.values() if k.spec.kind == kind and k.child is not None]
            for child in children:
                signal_group(child.pid, signal.SIGCONT)
                signal_group(child.pid, signal.SIGKILL)
            for child in children:
                child.wait()
        for link in self.links.values():
            await link.stop()


def _module(service: str) -> list[str]:
    return [sys.executable, "-P", "-m", f"paramserver_{service}"]


async def _main(folder: Path, plan: Plan, guard: Guard) -> None:
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    await Keeper(folder, plan, guard).serve(orders)


def main(folder: Path, plan: Plan) -> None:
    """Run a cluster until stdin closes."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    guard = Guard()
    with suppress(KeyboardInterrupt):
        asyncio.run(_main(folder, plan, guard))
    guard.close()


def words(folder: Path, plan: Plan) -> list[str]:
    """Return the command line of a keeper, to be run in the repository root."""
    return [sys.executable, "-m", "tests.chaos.keeper", str(folder), json.dumps(asdict(plan))]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Plan(**json.loads(sys.argv[2])))
