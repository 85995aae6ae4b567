"""One model as a shard serves it: settings by revision, roster, pending commits, and the partitions owned here."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paramserver import limits
from paramserver.core.commit import Commit
from paramserver.core.layout import Layout
from paramserver.core.settings import spec_from_model_document
from paramserver.core.shard.effects import LoadPartition
from paramserver.core.shard.events import ModelView
from paramserver.core.shard.partition import Partition
from paramserver.core.shard.timers import Timer
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError, problem
from paramserver.types import LEVELS, ModelKey, Token

if TYPE_CHECKING:
    from paramserver.core.shard.operation import RequestOperation


@dataclass(slots=True)
class Parked:
    """What a parked request waits for."""

    at: Partition
    """The last of its partitions that is not ready."""
    timer: Timer
    """Refuses the request at its deadline."""


@dataclass(slots=True, eq=False)
class ServedModel:
    """State of one model.  Only `ShardCore` changes it."""

    key: ModelKey
    layout: Layout
    view: ModelView
    """The newest one of this timeline."""
    spec: ModelSpec
    """Settings of the newest revision known."""
    revision: int
    timeline: int
    clock: int = 0
    ready: bool = False
    workers: Mapping[str, int] = field(default_factory=dict)
    """worker -> epoch of the live roster."""
    departed: set[tuple[str, int]] = field(default_factory=set)
    """(worker, epoch) that left the roster in sync; a partition that moves here may have staged gradients of theirs."""
    commits: dict[int, Commit] = field(default_factory=dict)
    """Commits of this timeline that a partition here may still need."""
    brought: tuple[Commit, ModelSpec] | None = None
    """The last commit applied of those that bring settings along, and these."""
    partitions: dict[int, Partition] = field(default_factory=dict)
    parked: dict["RequestOperation", Parked] = field(default_factory=dict)
    """Requests that wait for a partition to be loaded or no longer suspended, in order of arrival."""
    refused: dict[int, Partition] = field(default_factory=dict)
    """Partitions whose token Redis has replaced, although the feed has not said so yet.

    They stay in memory until it does: the new token may be a renewal of theirs, after Redis was emptied.
    """
    given_up: dict[int, Token] = field(default_factory=dict)
    """Partition -> the last token under which it was in memory here, and then given up.

    A leader that names this shard under that token again does not know of the next owner: Redis has lost the handover.
    """
    needs_report_at: int = -1
    """sync: the newest commit after which workers must report their clock themselves (`needs_report`); -1: none."""
    resync_at: float = 0.0
    """Earliest time of the next `Resync`."""

    @classmethod
    def of(cls, view: ModelView) -> "ServedModel":
        """Create the state of a model that is new to this shard, yet to `adopt` the view."""
        return cls(view.model, view.layout, view, view.spec, view.revision, view.timeline)

    @property
    def level(self) -> int:
        """The acknowledgement level (`types.LEVELS`); it never changes."""
        return LEVELS[self.spec.ack]

    @property
    def live_workers(self) -> int:
        """Number of live workers."""
        return len(self.workers)

    @property
    def sync(self) -> bool:
        """Whether the mode in the newest settings is `sync`."""
        return self.spec.consistency.mode == "sync"

    def check(self, generation: int | None, timeline: int | None) -> None:
        """Raise `model_replaced` or `rolled_back` for an older generation or timeline, `loading` for a newer one."""
        if generation is not None and generation != self.key.generation:
            if generation > self.key.generation:
                raise problem("loading", f"this shard does not know generation {generation} of the model yet")
            raise replaced(self.key)
        if timeline is not None and timeline != self.timeline:
            if timeline > self.timeline:
                raise problem("loading", f"this shard does not know timeline {timeline} yet")
            clock = self.clock + (self.view.opening and self.clock == self.view.began)
            raise problem(
                "rolled_back",
                f"the model was rolled back, restored or made synchronous; it continues at clock {clock}",
                hint="discard pushes in doubt, continue at this clock and timeline, and pull",
                timeline=self.timeline,
                clock=clock,
            )

    def owned(self, index: int, map_epoch: int) -> Partition:
        """Return the partition, loaded or not.

        Raises RequestError (`invalid_range`) if the model has no such partition, StaleMapError (`wrong_owner`) if this
        shard does not own it, CorruptState if its stored state stays unreadable: the next attempt may be far off.
        """
        if not 0 <= index < self.spec.partitions:
            detail = f"partition {index} does not exist: the model has {self.spec.partitions} partitions"
            raise problem("invalid_range", detail)
        partition = self.partitions.get(index)
        if partition is None:
            raise wrong_owner(self.key, index, map_epoch)
        if (error := partition.corrupt) is not None:
            raise error.plus()
        return partition

    def adopt(self, view: ModelView) -> None:
        """Take over all that a view of this timeline says, except its commits and who owns what."""
        self.clock = max(self.clock, view.clock)
        self.view, self.ready = view, view.ready
        self.spec, self.revision = view.spec, view.revision
        self.set_roster(view.workers)

    def loading_of(self, p: Partition) -> LoadPartition:
        """The effect that loads this partition of it."""
        return LoadPartition(p.key, p.token, p.source, self.spec, self.layout, self.view.restored)

    def restart(self, view: ModelView) -> None:
        """Begin the view's timeline; nothing of the clocks before counts any more."""
        self.timeline, self.clock = view.timeline, view.clock
        self.commits.clear()
        self.needs_report_at = -1

    def asks_cut(self, p: Partition) -> bool:
        """Whether the pending cut is of the clock that this partition has reached."""
        return p.by_cuts and p.clock == self.view.cut_asked

    def at_cut(self, p: Partition) -> bool:
        """Whether the model would go back to the clock that this partition has reached, as no commit came since."""
        return p.by_cuts and p.clock == self.view.cut

    def settings_of(self, commit: Commit, p: Partition) -> tuple[int, ModelSpec]:
        """(revision, settings) under which the partition applies its next commit.

        A commit without settings names the revision of the one before it, whose settings the partition has.  None takes
        newer ones away, which a restore has brought with state of their optimizer.  Raises CorruptState if the settings
        that the commit brings along cannot be read.
        """
        if commit.settings is None or commit.revision < p.revision:
            return max(commit.revision, p.revision), p.spec
        if self.brought is None or self.brought[0] is not commit:
            self.brought = commit, spec_from_model_document(self.spec, commit.settings)
        return commit.revision, self.brought[1]

    def record_commit(self, commit: Commit) -> None:
        """Record a commit, in any order of arrival, and forget those that every partition here has applied."""
        self.clock = max(self.clock, commit.t + 1)
        self.commits[commit.t] = commit
        clocks = [p.clock for p in self.partitions.values() if p.state is not None]
        if len(clocks) == len(self.partitions):
            floor = min(clocks, default=self.clock)
            for t in [t for t in self.commits if t < floor]:
                del self.commits[t]
        while len(self.commits) > limits.QUEUED_REQUESTS_MAX:
            del self.commits[min(self.commits)]

    def has_staged(self, indices: Iterable[int], worker: str, epoch: int, clock: int) -> bool:
        """Whether all these partitions are here, have that clock open, and hold the worker's staged push for it."""
        key = (worker, epoch, clock)
        return all((p := self.partitions.get(i)) is not None and p.clock == clock and key in p.staged for i in indices)

    def may_continue(self, indices: Iterable[int], worker: str, epoch: int, clock: int) -> bool:
        """Whether the worker may go on to the next clock without asking the scheduler.

        It may if all these partitions are here, have the next clock open and hold nothing it staged for `clock` any
        more, and if no commit from `clock` on needs their report.
        """
        key = (worker, epoch, clock)
        return self.needs_report_at < clock and all(
            (p := self.partitions.get(i)) is not None and p.clock == clock + 1 and key not in p.staged for i in indices
        )

    def set_roster(self, workers: Mapping[str, int]) -> None:
        """Replace the live roster.  Who leaves once sync has ended is not `departed`: what it has staged counts."""
        self.departed |= {(w, epoch) for w, epoch in self.workers.items() if self.sync and workers.get(w) != epoch}
        if len(self.departed) > limits.WORKERS_PER_MODEL_MAX:
            self.departed &= {slot[:2] for p in self.partitions.values() for slot in p.staged}
        self.workers = workers


def no_values_yet() -> PsError:
    """The error for a push, or a pull that has waited, to a model whose first values are not all there."""
    hint = "wait; if the client that uploads or restores it has died, do that again with exist_ok, or delete it"
    return problem("initializing", "the model's initial values are not complete", hint=hint)


def wrong_owner(model: ModelKey, index: int, map_epoch: int) -> PsError:
    """The error for a partition that another shard owns."""
    return problem(
        "wrong_owner",
        f"partition {index} of model '{model.name}' is owned by another shard",
        hint="fetch the map again and send the request to the owner",
        map_epoch=map_epoch,
        partition=index,
    )


def replaced(key: ModelKey) -> PsError:
    """Return the error for a request to a generation of the model before that of `key`."""
    return problem(
        "model_replaced",
        f"model '{key.name}' was deleted and created again",
        hint="pull again, and continue from its present values",
        generation=key.generation,
    )
