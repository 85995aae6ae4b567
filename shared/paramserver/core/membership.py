"""Who is alive: leases of shards, workers and pool members, told apart by their epochs.

A holder that has not been heard of for its lease is dead; who comes again under its name gets a higher epoch, and the
older incarnation is dead from that moment.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, TypeVar

from paramserver import limits
from paramserver.errors import problem


@dataclass(slots=True)
class Holder:
    """One incarnation of something that holds a lease."""

    name: str
    epoch: int
    heard_s: float
    alive: bool = True
    lease_s: float = field(default=limits.LEASE_S, kw_only=True)

    def expires_s(self) -> float:
        """When it is to be declared dead, unless it is heard of before."""
        return self.heard_s + self.lease_s


H = TypeVar("H", bound=Holder)


def current(holder: H | None, epoch: int, what: str, code: str) -> H:
    """The holder, if it is alive in that epoch; raises NotFoundError (`code`) or FencedError."""
    if holder is None:
        raise problem(code, f"{what} has not joined", hint="join first")
    if holder.epoch != epoch or not holder.alive:
        raise problem(
            "fenced",
            f"{what} of epoch {epoch} is no member any more",
            hint="join again for a new epoch",
            epoch=holder.epoch,
        )
    return holder


def expired(holders: Iterable[H], now: float) -> list[H]:
    """The holders whose lease has run out."""
    return [h for h in holders if h.alive and now >= h.expires_s()]


@dataclass(slots=True)
class Shard(Holder):
    """A process that owns partitions for now."""

    addresses: tuple[str, ...] = ()
    version: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    draining: bool = False
    """It gets nothing new, and what it has moves away."""
    memory_limit_bytes: int = 0
    """0: unknown."""
    memory_used_bytes: int = 0
    left: bool = False
    """It said goodbye, rather than being found dead."""
    gone_s: float = 0.0
    """When it left or was found dead."""
    listed: bool = True
    """False once it has been gone for so long that nobody wants to see it."""

    @property
    def free_bytes(self) -> int | None:
        """Memory it may still take; None: unknown."""
        limit = self.memory_limit_bytes
        return max(0, limit - self.memory_used_bytes) if limit > 0 else None

    @property
    def state(self) -> str:
        """`active`, `draining`, `left` or `dead`."""
        if self.alive:
            return "draining" if self.draining else "active"
        return "left" if self.left else "dead"


@dataclass(slots=True)
class Member(Holder):
    """A process of the worker pool."""

    allow: tuple[str, ...] = ()
    """Prefixes of the modules it may run."""
    place: tuple[str, int] | None = None
    """(run, place) it works at."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What its process takes of its machine."""

    def allows(self, entry: str) -> bool:
        """Whether the module of that entry lies under one of the prefixes."""
        module = entry.partition(":")[0]
        return any(module == p or module.startswith(p + ".") for p in self.allow)


@dataclass(slots=True)
class Worker(Holder):
    """One incarnation of a worker of one model."""

    rank: int = 0
    done: int = 0
    """Iterations finished: its clock."""
    pending: list[int] = field(default_factory=list)
    """sync: clocks reported done that are in no commit yet, ascending."""
    ending: tuple[int, int] = (0, 0)
    """sync: the clock, and the number of the push, that shards are reporting for it."""
    ended_on: set[str] = field(default_factory=set)
    """The shards that have."""
    granted: int = 0
    """sync: the clock it was last told to work on."""
    timeline: int = 0
    """The newest timeline it is known to know."""
    resting: bool = False
    """It asked for data and there is none for now: it holds no barrier up."""
    draining: bool = False
    parked: int = 0
    """Long polls of its that are open; while there are any, it is alive."""
    metrics: dict[str, float] = field(default_factory=dict)
    state: Any = None
    """What it wants kept with checkpoints."""
    attempt: str | None = None
    """Of the request by which it joined without a name; known to no other leader."""

    def note(self, metrics: Mapping[str, float]) -> None:
        """Keeps the newest value of each metric; a value that is not finite cannot be told in JSON."""
        self.metrics.update({k: v for k, v in metrics.items() if isfinite(v)})
        while len(self.metrics) > limits.METRIC_NAMES_MAX:
            del self.metrics[next(iter(self.metrics))]


class Roster:
    """The workers of one model, living and dead; the dead are kept for their epochs."""

    def __init__(self, floor: int = 0) -> None:
        self.workers: dict[str, Worker] = {}
        self.floor = floor
        """No epoch forgotten was higher."""
        self._live: list[Worker] | None = None

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.workers.values())

    def live(self) -> list[Worker]:
        """The living, by rank."""
        if self._live is None:
            self._live = sorted((w for w in self if w.alive), key=lambda w: w.rank)
        return self._live

    def bury(self, worker: Worker) -> None:
        """That incarnation is dead."""
        worker.alive = False
        worker.pending.clear()
        self._live = None

    def keep(self, name: str, state: Any, now: float) -> Worker | None:
        """Have the next incarnation of that worker begin with that state; None where there is no room for the name."""
        worker = self.workers.get(name)
        if worker is None:
            if len(self.workers) >= limits.WORKERS_PER_MODEL_MAX:
                return None
            worker = self.workers[name] = Worker(name, self.floor + 1, now, alive=False)
        worker.state = state
        return worker

    def counting(self) -> list[Worker]:
        """Those that barriers wait for, by rank."""
        return [w for w in self.live() if not w.resting]

    def find(self, name: str, epoch: int) -> Worker:
        """The living worker of that epoch; raises NotFoundError (`unknown_worker`) or FencedError."""
        return current(self.workers.get(name), epoch, f"worker {name!r:.140}", "unknown_worker")

    def choose_rank(self, name: str, wanted: int | None) -> int:
        """The rank for one who joins: the one wanted, its last one, or the lowest free one.

        Raises ConflictError when another living worker has the rank wanted.
        """
        taken = {w.rank: w.name for w in self if w.alive and w.name != name}
        if wanted is not None:
            if wanted in taken:
                raise problem("conflict", f"rank {wanted} belongs to worker '{taken[wanted]}'", hint="leave `rank` out")
            return wanted
        old = self.workers.get(name)
        if old is not None and old.rank not in taken:
            return old.rank
        return next(r for r in range(len(taken) + 1) if r not in taken)

    def join(self, name: str, rank: int, above: int, clock: int, timeline: int, now: float) -> tuple[Worker, list[str]]:
        """A new incarnation of that worker, and the names of those forgotten to keep within the bound.

        Raises Unavailable (`too_many_requests`) when the bound is reached by the living.
        """
        old = self.workers.get(name)
        forgotten: list[str] = []
        if old is None and len(self.workers) >= limits.WORKERS_PER_MODEL_MAX:
            dead = min((w for w in self if not w.alive), key=lambda w: w.heard_s, default=None)
            if dead is None:
                raise problem("too_many_requests", f"the model has {len(self.workers)} workers, which is the bound")
            self.floor = max(self.floor, dead.epoch)
            del self.workers[dead.name]
            forgotten.append(dead.name)
        epoch = 1 + max(old.epoch if old else self.floor, above)
        worker = Worker(name, epoch, now, rank=rank, done=clock, granted=clock, timeline=timeline)
        if old is not None:
            worker.state = old.state
        self.workers[name] = worker
        self._live = None
        return worker, forgotten
