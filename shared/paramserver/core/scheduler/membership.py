"""Who is alive: leases of shards, workers and pool members, with an epoch for each incarnation.

A holder that has not been heard from for the length of its lease is dead.  One that comes back under the same name gets
a higher epoch, and the older incarnation is dead from that moment.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from paramserver import limits
from paramserver.core.scheduler.documents import size_of
from paramserver.errors import problem

PROCESS_BYTES: Final = 200 << 20
"""Memory of a shard without partitions."""


@dataclass(slots=True, eq=False)
class Holder:
    """One incarnation of a lease holder."""

    name: str
    epoch: int
    heard_s: float
    alive: bool = True
    lease_s: float = field(default=limits.LEASE_S, kw_only=True)

    def expires_s(self) -> float:
        """When it is to be declared dead, unless it is heard from before."""
        return self.heard_s + self.lease_s


H = TypeVar("H", bound=Holder)


JOIN_FIRST: Final = "join first, and name the id that the join returned"


def current(holder: H | None, epoch: int, what: str, code: str) -> H:
    """Return the holder if it is alive in that epoch; raises NotFoundError (`code`) or FencedError (`fenced`)."""
    if holder is None:
        raise problem(code, f"{what} has not joined", hint=JOIN_FIRST)
    if holder.epoch != epoch or not holder.alive:
        raise problem(
            "fenced",
            f"{what} of epoch {epoch} is no longer a member",
            hint="join again for a new epoch",
            epoch=holder.epoch,
        )
    return holder


def expired(holders: Iterable[H], now: float) -> list[H]:
    """The live holders whose lease has expired."""
    return [h for h in holders if h.alive and now >= h.expires_s()]


@dataclass(slots=True, eq=False)
class Shard(Holder):
    """One incarnation of a shard process."""

    addresses: tuple[str, ...] = ()
    version: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    draining: bool = False
    """It gets no new partitions, and those it has move away."""
    stopping: bool = False
    """It drains because it was told to stop, so there is little time: its moves do not wait for cuts."""
    memory_limit_bytes: int = 0
    """0: unknown."""
    memory_used_bytes: int = 0
    left: bool = False
    """Whether it left by itself, rather than being declared dead."""
    gone_s: float = 0.0
    """When it left or was declared dead."""
    listed: bool = True
    """False once it has been gone too long to appear in lists."""
    released_s: float = 0.0
    """When it last released a partition that moved."""
    storage_away: bool = False
    """Whether it says that Redis does not answer it, so that it can neither store nor load a partition."""
    storage_away_s: float = 0.0
    """Since when."""

    def free_bytes(self, training: int, coming: int) -> int | None:
        """Memory still available to it; None if unknown.

        `training`: bytes that the partitions it has take while they train, of which it may use few by now; `coming`:
        those that it will need for others.
        """
        limit, used = self.memory_limit_bytes, self.memory_used_bytes
        used = max(used, min(used, PROCESS_BYTES) + training) + coming
        return max(0, limit - used) if limit > 0 else None

    @property
    def state(self) -> str:
        """`active`, `draining`, `left` or `dead`."""
        if self.alive:
            return "draining" if self.draining else "active"
        return "left" if self.left else "dead"

    def stored(self, wall_offset_s: float) -> dict[str, Any]:
        """Stored field `shard:NAME`; `wall_offset_s` is Unix time minus monotonic time."""
        return {
            "epoch": self.epoch,
            "alive": self.alive,
            "addresses": list(self.addresses),
            "version": self.version,
            "draining": self.draining,
            "left": self.left,
            "listed": self.listed,
            "gone_s": None if self.alive else self.gone_s + wall_offset_s,
        }

    @classmethod
    def of(cls, name: str, doc: Mapping[str, Any], now: float, wall_offset_s: float) -> "Shard":
        """Rebuild a shard from its stored document: a live one as if heard from now, another as gone since then.

        Whatever the clocks of the schedulers' machines say, it is not gone in the future.
        """
        shard = cls(name, doc["epoch"], now, doc["alive"], tuple(doc["addresses"]), doc["version"])
        shard.draining, shard.left, shard.listed = doc["draining"], doc["left"], doc["listed"]
        if not shard.alive:
            shard.gone_s = shard.heard_s = min(now, doc["gone_s"] - wall_offset_s)
        return shard


@dataclass(slots=True, eq=False)
class Member(Holder):
    """A process of the worker pool."""

    allow: tuple[str, ...] = ()
    """Prefixes of the modules it may run."""
    place: tuple[str, int] | None = None
    """(run, place) it works at; None while it has none."""
    lost: tuple[str, int] | None = None
    """Where it worked when it was removed, and goes on if it was only cut off; not stored."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Resource usage of its process."""

    def stored(self) -> dict[str, Any]:
        """Stored field `member:NAME`."""
        return {
            "epoch": self.epoch,
            "alive": self.alive,
            "allow": list(self.allow),
            "place": list(self.place) if self.place else None,
        }

    @classmethod
    def of(cls, name: str, doc: Mapping[str, Any], now: float) -> "Member":
        """Rebuild a member from its stored document, as if heard from now."""
        place = (doc["place"][0], doc["place"][1]) if doc["place"] else None
        return cls(name, doc["epoch"], now, doc["alive"], tuple(doc["allow"]), place)


@dataclass(slots=True, eq=False)
class Worker(Holder):
    """One incarnation of a worker of one model; epoch 0: it has never joined, and a restore has brought its state."""

    rank: int = 0
    done: int = 0
    """Iterations finished: its clock."""
    pending: list[int] = field(default_factory=list)
    """sync: clocks reported done that are in no commit yet, ascending."""
    final_push: tuple[int, int] = (0, 0)
    """sync: (clock, seq of the push that ends it) that shards are reporting for this worker."""
    final_push_shards: set[str] = field(default_factory=set)
    """Shards that have reported `final_push`."""
    granted: int = 0
    """sync: the clock it was last told to work on."""
    left_out: int | None = -1
    """sync: how many iterations it had finished when it last reported one whose commit was decided without it, for
    good; -1: none on this timeline; None: a new leader has heard no report of it, and looks into the commits then."""
    timeline: int = 0
    """The newest timeline it is known to have been told of."""
    resting: bool = False
    """It asked for data and there is none for now, so barriers do not wait for it."""
    draining: bool = False
    left: bool = False
    """Whether it left in good order, rather than its lease having run out."""
    open_polls: int = 0
    """Its open long polls; while there are any, it is alive."""
    metrics: dict[str, float] = field(default_factory=dict)
    state: Any = None
    """The document it wants stored with checkpoints; set by `keep`."""
    state_size: int = 0
    brought: bool = False
    """Whether a restore has brought that state, which nobody has begun with yet."""
    attempt: str | None = None
    """Attempt id of the request by which it joined without a name; not stored, so another leader does not know it."""

    def keep(self, state: Any, *, brought: bool = False) -> None:
        """Keep a state for checkpoints and for the next incarnation."""
        self.state, self.state_size, self.brought = state, 0 if state is None else size_of(state), brought

    def note(self, metrics: Mapping[str, float]) -> None:
        """Keep the newest value of each metric."""
        self.metrics.update(metrics)
        while len(self.metrics) > limits.METRIC_NAMES_MAX:
            del self.metrics[next(iter(self.metrics))]

    def stored(self, wall_offset_s: float) -> dict[str, Any]:
        """Stored field `worker:MODEL:NAME`; `wall_offset_s` is Unix time minus monotonic time."""
        return {
            "epoch": self.epoch,
            "alive": self.alive,
            "heard_s": None if self.alive else self.heard_s + wall_offset_s,
            "rank": self.rank,
            "clock": self.done,
            "timeline": self.timeline,
            "lease_s": self.lease_s,
            "state": self.state,
            "brought": self.brought,
            "draining": self.draining,
            "left": self.left,
        }

    @classmethod
    def of(cls, name: str, doc: Mapping[str, Any], now: float, wall_offset_s: float) -> "Worker":
        """Rebuild a worker from its stored document, at the clock stored there: a live one as if heard from now."""
        worker = cls(name, doc["epoch"], now, doc["alive"], lease_s=doc["lease_s"], rank=doc["rank"])
        if not worker.alive:
            worker.heard_s = min(now, doc["heard_s"] - wall_offset_s)
        worker.done = worker.granted = doc["clock"]
        worker.timeline = doc["timeline"]  # so that a plain client that has not been told of a rollback yet will be
        worker.draining, worker.left = doc["draining"], doc["left"]
        worker.keep(doc["state"], brought=doc["brought"])
        return worker


class Roster:
    """The workers of one model, live and dead; dead ones are kept so that no epoch is issued twice."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.floor = 0
        """Highest epoch of any worker that was forgotten, or was of a model deleted before this one was created."""
        self._live: list[Worker] | None = None
        self._counted: list[Worker] | None = None

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.workers.values())

    def live(self) -> list[Worker]:
        """The live workers, by rank."""
        if self._live is None:
            self._live = sorted((w for w in self if w.alive), key=lambda w: w.rank)
        return self._live

    def mark_dead(self, worker: Worker) -> None:
        """Mark that incarnation as dead."""
        worker.alive = False
        worker.pending.clear()
        self._live = self._counted = None

    def store_state(self, name: str, state: Any, now: float) -> Worker | None:
        """Store a state for the next incarnation of that worker to begin with; return None if the roster is full."""
        worker = self.workers.get(name)
        if worker is None:
            if len(self.workers) >= limits.WORKERS_PER_MODEL_MAX:
                return None
            worker = self.workers[name] = Worker(name, 0, now, alive=False)
        worker.keep(state, brought=True)
        return worker

    def highest_epoch(self) -> int:
        """Return the epoch above which later models begin, so that they refuse the processes of this one."""
        return max([self.floor, *(w.epoch for w in self)])

    def barrier_members(self) -> list[Worker]:
        """The workers that barriers wait for, by rank."""
        if self._counted is None:
            self._counted = [w for w in self.live() if not w.resting]
        return self._counted

    def rest(self, worker: Worker, resting: bool) -> None:
        """Note whether barriers are to pass over that worker."""
        worker.resting, self._counted = resting, None

    def find(self, name: str, epoch: int) -> Worker:
        """Return the live worker of that epoch; raises NotFoundError (`unknown_worker`) or FencedError (`fenced`)."""
        return current(self.workers.get(name), epoch, f"worker {name!r:.140}", "unknown_worker")

    def choose_rank(self, name: str, wanted: int | None) -> int:
        """Return the rank for a worker that joins: the wanted one, else its last one if free, else the lowest free one.

        Raises ConflictError (`conflict`) if another live worker has the wanted rank.
        """
        taken = {w.rank: w.name for w in self if w.alive and w.name != name}
        if wanted is not None:
            if wanted in taken:
                detail = f"rank {wanted} belongs to worker '{taken[wanted]}'"
                raise problem("conflict", detail, hint="omit `rank`", where="rank")
            return wanted
        old = self.workers.get(name)
        if old is not None and old.rank not in taken:
            return old.rank
        return next(r for r in range(len(taken) + 1) if r not in taken)

    def join(
        self, name: str, rank: int, above: int, clock: int, timeline: int, now: float
    ) -> tuple[Worker, str | None]:
        """Add a new incarnation of that worker; return it, and the name of a dead worker forgotten to make room.

        Raises Unavailable (`too_many_requests`) if live workers alone reach the bound.
        """
        old = self.workers.get(name)
        dead: Worker | None = None
        if old is None and len(self.workers) >= limits.WORKERS_PER_MODEL_MAX:
            dead = min((w for w in self if not w.alive), key=lambda w: w.heard_s, default=None)
            if dead is None:
                raise problem("too_many_requests", f"the model has {len(self.workers)} workers, which is the limit")
            self.floor = max(self.floor, dead.epoch)
            del self.workers[dead.name]
        epoch = 1 + max((old.epoch if old else 0) or self.floor, above)
        worker = Worker(name, epoch, now, rank=rank, done=clock, granted=clock, timeline=timeline)
        if old is not None:
            worker.state, worker.state_size = old.state, old.state_size
        self.workers[name] = worker
        self._live = self._counted = None
        return worker, dead.name if dead else None
