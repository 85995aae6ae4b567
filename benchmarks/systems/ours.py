"""Ours: a cluster started by `psctl up` with its default settings.

Workers have sessions, so every push is numbered and applied exactly once.  In `same host`, pulls map the shard's memory
(`copy=False`) and pushes are written into a slot.  `in place` is the same with gradients computed in a slot
(`worker.gradients()`), and `copied` with values copied into the worker's array.  `HTTP/2` has shared memory turned off.
`fused` uses `pushpull`: one round trip instead of two.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from benchmarks.meters import memory_bytes
from benchmarks.systems.system import Running
from benchmarks.workloads import Client, Parts, Work

import paramserver as ps
from paramserver.types import F32

Way = Literal["same-host", "http2"]
MODEL = "bench"
START_S = 90.0
NOWHERE = "/dev/null/none"
"""A folder that cannot exist, which turns shared memory off."""
PAIRS_PER_STREAM = 8


@contextmanager
def cluster(way: Way, shards: int) -> Iterator[dict[str, Any]]:
    """Start a cluster, yield the output of `psctl up --json`, and stop it at the end of the block."""
    folder = tempfile.mkdtemp(prefix="paramserver-bench-")
    psctl = [sys.executable, "-P", "-m", "paramserver_cli"]
    environment = dict(os.environ)
    if way == "http2":
        environment["PARAMSERVER_SHARED_MEMORY"] = NOWHERE
    command = [*psctl, "up", "--detach", "--json", "--shards", str(shards), "--state-dir", folder]
    try:
        up = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_S, check=False)
        if up.returncode != 0:
            raise RuntimeError(f"psctl up failed: {up.stderr.strip()[-2000:]}")
        try:
            yield json.loads(up.stdout.strip().splitlines()[-1])
        finally:
            subprocess.run([*psctl, "down", "--state-dir", folder], capture_output=True, timeout=START_S, check=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class OurClient:
    """A client with a worker's session."""

    pairs = 1

    def __init__(
        self, work: Work, rank: int, url: str, token: str | None, *, mapped: bool, fused: bool, in_place: bool
    ) -> None:
        self._client = ps.connect(url, token=token)
        self._model = self._client.model(MODEL)
        self._worker = self._model.worker().__enter__()
        self._mapped, self.fused = mapped, fused
        self._sync = work.mode == "sync"
        self._values: ps.Params | None = None
        self._place = self._worker.gradients() if in_place else None
        self._computed: F32 | None = None

    def pull(self) -> Parts:
        if self._mapped:
            self._values = self._model.pull(copy=False)
        else:
            self._values = self._worker.pull(out=self._values)
        return [self._values.flat]

    def push(self, gradient: F32) -> None:
        self._worker.push(self._placed(gradient))

    def _placed(self, gradient: F32) -> Any:
        """Return the gradient, copied to the worker's slot once if `in_place`: computing it is not part of a round."""
        if self._place is None:
            return gradient
        if self._computed is not gradient:
            self._place.flat[:] = gradient
            self._computed = gradient
        return self._place

    def exchange(self, gradient: F32) -> Parts:
        placed = self._placed(gradient)
        if not self._sync:
            self._values = self._model.pushpull(placed, out=self._values)
            return [self._values.flat]
        if self._mapped:
            self._values = self._worker.exchange(placed, copy=False)
        else:
            self._values = self._worker.exchange(placed, out=self._values)
        return [self._values.flat]

    def close(self) -> None:
        self._worker.__exit__(None, None, None)
        self._client.close()


class StreamsClient:
    """A client with many concurrent requests on one HTTP/2 connection (asyncio)."""

    fused = True

    def __init__(self, work: Work, rank: int, url: str, token: str | None) -> None:
        self._runner = asyncio.Runner()
        self._client = ps.AsyncClient(url, token=token)
        self._model = self._client.model(MODEL)
        self._streams = work.streams
        self.pairs = work.streams * PAIRS_PER_STREAM

    def pull(self) -> Parts:
        return [self._runner.run(self._model.pull()).flat]

    def push(self, gradient: F32) -> None:
        raise NotImplementedError("a round of many streams is one exchange")

    def exchange(self, gradient: F32) -> Parts:
        return [self._runner.run(self._together(gradient)).flat]

    async def _together(self, gradient: F32) -> ps.Params:
        return (await asyncio.gather(*(self._one_after_another(gradient) for _ in range(self._streams))))[0]

    async def _one_after_another(self, gradient: F32) -> ps.Params:
        values = await self._model.pull()
        for _ in range(PAIRS_PER_STREAM - 1):
            await self._model.push(gradient)
            values = await self._model.pull(out=values)
        await self._model.push(gradient)
        return values

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


@dataclass(frozen=True)
class Ours:
    """One way of using paramserver."""

    key: str
    label: str
    way: Way
    mapped: bool = False
    fused: bool = False
    in_place: bool = False

    def missing(self) -> str:
        if self.way == "same-host" and not sys.platform.startswith("linux"):
            return "shared memory is Linux only"
        return ""

    @contextmanager
    def start(self, work: Work) -> Iterator[Running]:
        """See `System.start`."""
        with cluster(self.way, work.servers) as found:
            shards = [int(p) for p in found["pids"]["shards"]]
            others = [int(p) for kind in ("scheduler", "redis") for p in found["pids"][kind] if p]
            base = memory_bytes(shards, "VmRSS")
            url, token = found["scheduler"], found.get("token")
            with ps.connect(url, token=token) as client:
                create(client, work)
            connect: Callable[[Work, int], Client] = partial(
                OurClient, url=url, token=token, mapped=self.mapped, fused=self.fused, in_place=self.in_place
            )
            if work.streams > 1:
                connect = partial(StreamsClient, url=url, token=token)
            yield Running(shards, base, connect, lambda: others, {"paramserver": ps.__version__})


def create(client: ps.Client, work: Work) -> ps.Model:
    """Create the model for a work: one vector, plain SGD."""
    values: Any = {"w": work.initial() if work.kind == "W4" else (work.elements,)}
    consistency = ps.Sync(min_workers=work.workers) if work.mode == "sync" else ps.Async()
    return client.create_model(MODEL, values, optimizer=ps.SGD(lr=work.rate), consistency=consistency)


VARIANTS = (
    Ours("ours-same-host", "**ours**, same host", "same-host", mapped=True),
    Ours("ours-in-place", "**ours**, same host, in place", "same-host", mapped=True, in_place=True),
    Ours("ours-copied", "**ours**, same host, copied", "same-host"),
    Ours("ours-same-host-fused", "**ours**, same host, fused", "same-host", fused=True),
    Ours("ours-http2", "**ours**, HTTP/2", "http2"),
    Ours("ours-http2-fused", "**ours**, HTTP/2, fused", "http2", fused=True),
)
