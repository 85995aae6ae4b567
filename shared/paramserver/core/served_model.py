"""One model as a shard serves it: settings by revision, roster, commits still to come, and its partitions here."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paramserver import limits
from paramserver.core.layout import Layout
from paramserver.core.partition import Partition
from paramserver.core.shard_io import CommitDecided, ModelView
from paramserver.core.spec import ModelSpec
from paramserver.core.timers import Timer
from paramserver.core.watermark import LEVELS
from paramserver.errors import PsError, problem
from paramserver.types import ModelKey

if TYPE_CHECKING:
    from paramserver.core.operation import Operation

_REVISIONS_KEPT = 16


@dataclass(slots=True)
class Parked:
    """What a request waits for that was put aside."""

    at: Partition
    """The last of its partitions that is not there."""
    timer: Timer
    """By which it is told that it has waited long enough."""


@dataclass(slots=True, eq=False)
class ServedModel:
    """State of one model.  Mutated by `ShardCore` alone."""

    key: ModelKey
    layout: Layout
    spec: ModelSpec
    """Settings of the newest revision known."""
    revision: int
    timeline: int
    clock: int
    live_workers: int
    ready: bool
    workers: dict[str, tuple[int, int]] = field(default_factory=dict)
    """worker -> (epoch, rank) of the live roster."""
    gone: set[tuple[str, int]] = field(default_factory=set)
    """(worker, epoch) that have left that roster while a partition here held something staged of them."""
    specs: dict[int, ModelSpec] = field(default_factory=dict)
    """Settings by revision, the newest few: a commit names the one it was decided under."""
    commits: dict[int, CommitDecided] = field(default_factory=dict)
    """Commits of this timeline that a partition here may still need."""
    partitions: dict[int, Partition] = field(default_factory=dict)
    parked: dict["Operation", Parked] = field(default_factory=dict)
    """Requests that wait for a partition to be loaded, in order of arrival."""
    refused: dict[int, Partition] = field(default_factory=dict)
    """Ownerships that another one has replaced in Redis, whatever the feed still says.  Until it says who has them now
    they are kept in memory: the new one may be a renewal of this one, after Redis was emptied."""
    asks_at: int = -1
    """sync: the newest commit after which the scheduler had something to tell the workers."""
    began: int = 0
    """sync: the clock at which this timeline began; a partition that stands before it is of an older one."""
    cut_asked: int | None = None
    """sync: the clock at which every partition is to be stored as a cut, if it comes by there."""
    resync_at: float = 0.0
    """Not before then the feed is asked to tell everything again."""

    @classmethod
    def of(cls, view: ModelView) -> "ServedModel":
        """A model this shard learns of; its partitions are added by the caller."""
        return cls(
            view.model,
            view.layout,
            view.spec,
            view.revision,
            view.timeline,
            view.clock,
            view.live_workers,
            ready=False,
        )

    @property
    def level(self) -> int:
        """The acknowledgement level (`watermark.LEVELS`); it never changes."""
        return LEVELS[self.spec.ack]

    @property
    def sync(self) -> bool:
        """Whether the newest settings are synchronous."""
        return self.spec.consistency.mode == "sync"

    def check(self, generation: int | None, timeline: int | None) -> None:
        """Raises `model_replaced` or `rolled_back` for a request of the past, `loading` for one of the future."""
        if generation is not None and generation != self.key.generation:
            if generation > self.key.generation:
                raise problem("loading", f"this shard has not heard of generation {generation} of the model yet")
            raise problem(
                "model_replaced",
                f"model '{self.key.name}' was created anew",
                hint="fetch the model again",
                generation=self.key.generation,
            )
        if timeline is not None and timeline != self.timeline:
            if timeline > self.timeline:
                raise problem("loading", f"this shard has not heard of timeline {timeline} yet")
            raise problem(
                "rolled_back",
                f"the model went back to clock {self.clock}",
                hint="drop pushes in doubt, take this clock and timeline, and pull",
                timeline=self.timeline,
                clock=self.clock,
            )

    def owned(self, index: int, map_epoch: int) -> Partition:
        """The partition, loaded or not; raises StaleMapError (`wrong_owner`), RequestError where there is none."""
        if not 0 <= index < self.spec.partitions:
            raise problem("invalid_range", f"partition {index}: the model has {self.spec.partitions}")
        partition = self.partitions.get(index)
        if partition is None:
            raise wrong_owner(self.key, index, map_epoch)
        return partition

    def learn(self, spec: ModelSpec, revision: int) -> None:
        """Remember the settings of a revision."""
        self.specs[revision] = self.spec = spec
        self.revision = revision
        while len(self.specs) > _REVISIONS_KEPT:
            del self.specs[min(self.specs)]

    def spec_of(self, revision: int) -> tuple[int, ModelSpec] | None:
        """The settings a commit names; the next newer ones known where they were missed; None: still to come."""
        newer = [r for r in self.specs if r >= revision]
        return (min(newer), self.specs[min(newer)]) if newer else None

    def keep(self, commit: CommitDecided) -> None:
        """Note a commit, in whatever order they come; those that every partition has are forgotten."""
        self.clock = max(self.clock, commit.t + 1)
        if commit.asks:
            self.asks_at = max(self.asks_at, commit.t)
        self.commits[commit.t] = commit
        clocks = [p.clock for p in self.partitions.values() if p.state is not None]
        if len(clocks) == len(self.partitions):
            floor = min(clocks, default=self.clock)
            for t in [t for t in self.commits if t < floor]:
                del self.commits[t]
        while len(self.commits) > limits.QUEUED_REQUESTS_MAX:
            del self.commits[min(self.commits)]

    def stages(self, indices: Iterable[int], worker: str, epoch: int, clock: int) -> bool:
        """Whether all these partitions are here and hold what the worker pushed for that clock, which is still open."""
        held = (worker, epoch, clock)
        return all((p := self.partitions.get(i)) is not None and p.clock == clock and held in p.staged for i in indices)

    def over(self, indices: Iterable[int], worker: str, epoch: int, clock: int) -> bool:
        """Whether what the worker pushed to these partitions for that clock is needed no more, the next one is open,
        and nobody asks for the worker.

        Then it may go on without asking the scheduler.
        """
        held = (worker, epoch, clock)
        return self.asks_at < clock and all(
            (p := self.partitions.get(i)) is not None and p.clock == clock + 1 and held not in p.staged for i in indices
        )

    def hear(self, workers: Mapping[str, tuple[int, int]], live_workers: int) -> None:
        """The live roster is another one."""
        left = {(w, epoch) for w, (epoch, _) in self.workers.items() if workers.get(w, (None,))[0] != epoch}
        staged = {slot[:2] for p in self.partitions.values() for slot in p.staged} if left or self.gone else set()
        self.gone = (self.gone | left) & staged
        self.workers, self.live_workers = dict(workers), live_workers

    def live(self) -> dict[str, int]:
        """worker -> epoch of the live roster."""
        return {worker: epoch for worker, (epoch, _) in self.workers.items()}


def wrong_owner(model: ModelKey, index: int, map_epoch: int) -> PsError:
    """The answer for a partition that another shard owns."""
    return problem(
        "wrong_owner",
        f"partition {index} of model '{model.name}' is owned by another shard",
        hint="fetch the map and send it there",
        map_epoch=map_epoch,
        partition=index,
    )
