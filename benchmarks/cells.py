"""The cells of the benchmark: for each table, the work and the systems that do it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from benchmarks.systems.bare_memory import BareMemory
from benchmarks.systems.bare_socket import BareSocket
from benchmarks.systems.grpc_python import GrpcPython
from benchmarks.systems.ours import VARIANTS as OURS
from benchmarks.systems.ray_actors import RayActors
from benchmarks.systems.redis_lock import RedisLock
from benchmarks.systems.system import System
from benchmarks.systems.torch_rpc import VARIANTS as TORCH
from benchmarks.workloads import Digits, Work

RIVALS = ("torch", "torch-tcp", "ray", "grpc", "redis")
FLOORS = ("socket", "memory")


@cache
def systems() -> dict[str, System]:
    """Return all systems by key, in the order of the tables."""
    every: list[System] = [*OURS, *TORCH, RayActors(), GrpcPython(), RedisLock(), BareSocket(), BareMemory()]
    return {s.key: s for s in every}


@dataclass(frozen=True)
class Cell:
    """One table."""

    key: str
    title: str
    work: Work
    systems: tuple[str, ...]
    once: frozenset[str] = frozenset()
    """Systems so slow here that one pass is enough."""


def dense(
    key: str, title: str, megabytes: float, *names: str, workers: int = 1, once: Sequence[str] = (), servers: int = 1
) -> Cell:
    """Return an async cell of W1; `once`: systems measured in one pass only."""
    work = Work("W1", round(megabytes * 250_000), workers, servers)
    return Cell(key, f"W1 {title}", work, names, frozenset(once))


ALL = ("ours-same-host", "ours-http2", *RIVALS, *FLOORS)
IN_PLACE = ("ours-same-host", "ours-in-place", *ALL[1:])
COPIED = ("ours-same-host", "ours-in-place", "ours-copied", *ALL[1:])
SPLIT = ("ours-same-host", "ours-http2", "torch", "torch-tcp", "ray", "grpc")
"""Systems that support two servers."""
SYNC = ("ours-same-host", "ours-in-place", *SPLIT[1:], "memory")
SMALL = ("ours-same-host", "ours-same-host-fused", "ours-http2", "ours-http2-fused", *RIVALS, *FLOORS)
LEARNERS = ("ours-same-host", "ours-http2", *RIVALS)
SLOW = ("grpc", "redis")

CELLS = (
    dense("w1-0.4mb", "dense round, 0.4 MB, 1 worker", 0.4, *ALL),
    dense("w1-10mb", "dense round, 10 MB, 1 worker", 10, *COPIED),
    dense("w1-100mb", "dense round, 100 MB, 1 worker", 100, *COPIED, once=SLOW),
    dense("w1-10mb-k2", "dense round, 10 MB, 2 workers", 10, *IN_PLACE, workers=2),
    dense("w1-10mb-k4", "dense round, 10 MB, 4 workers", 10, *IN_PLACE, workers=4, once=SLOW),
    dense("w1-10mb-2shards", "dense round, 10 MB, 2 workers, 2 servers", 10, *SPLIT, workers=2, servers=2),
    Cell("w1-10mb-sync", "W1 dense round, 10 MB, 2 workers, sync", Work("W1", 2_500_000, 2, mode="sync"), SYNC),
    Cell("w3-k1", "W3 small round, 1 KB, 1 worker", Work("W3", 256), SMALL),
    Cell("w3-k8", "W3 small round, 1 KB, 8 workers", Work("W3", 256, 8), SMALL),
    Cell(
        "w3-streams", "W3 small round, 1 KB, 64 streams on one connection", Work("W3", 256, streams=64), ("ours-http2",)
    ),
    Cell("w4-async", "W4 digits to 95 %, 4 workers, async", Work("W4", Digits.size, 4), LEARNERS),
    Cell(
        "w4-sync", "W4 digits to 95 %, 4 workers, sync", Work("W4", Digits.size, 4, mode="sync"),
        tuple(s for s in LEARNERS if s != "redis"),
    ),
)  # fmt: skip


def cell(key: str) -> Cell:
    """Return the cell of that key; raises KeyError if there is none."""
    return {c.key: c for c in CELLS}[key]


def order(names: Sequence[str], passes: int, once: frozenset[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """Yield (pass, system) of each launch: all systems in each pass, starting one system later in each."""
    for i in range(passes):
        turn = i % max(1, len(names))
        for name in (*names[turn:], *names[:turn]):
            if i == 0 or name not in once:
                yield i, name
