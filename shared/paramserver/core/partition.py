"""One partition as its owner holds it: immutable numbers, a version, and all that is accepted but not applied yet."""

from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paramserver.core.layout import Layout, Segment
from paramserver.core.optimizer import ftrl_z, initial_slots, slot_names
from paramserver.core.schedule import learning_rate
from paramserver.core.settings import restored, settings_document
from paramserver.core.shard_io import (
    AssignPart,
    Capture,
    Contribution,
    HeldPart,
    LoadedState,
    PartitionState,
    PartVersion,
    Source,
)
from paramserver.core.spec import ModelSpec
from paramserver.core.timers import Timer
from paramserver.core.update import Basis
from paramserver.core.watermark import LEVELS, Watermark
from paramserver.core.window import PushMemory
from paramserver.errors import problem
from paramserver.types import PartitionKey, Token

if TYPE_CHECKING:
    from paramserver.core.operation import Operation
    from paramserver.core.pulls import WaitingPull

Slot = tuple[str, int, int]
"""(worker, epoch, clock): whose contribution to which clock."""


@dataclass(slots=True, eq=False)
class Partition:
    """State of one partition under one owner token.  Mutated by `ShardCore` alone."""

    key: PartitionKey
    token: Token
    size: int
    segments: tuple[Segment, ...]
    spec: ModelSpec
    """The settings in force here; changed between two operations."""
    revision: int
    live_workers: int
    source: Source = "init"
    """Where its first state comes from."""
    state: PartitionState | None = None
    """None until it is loaded."""
    version: int = 0
    clock: int = 0
    """sync: the next commit's `t`."""
    durable_version: int = 0
    durable_clock: int = 0
    """sync: the clock that a new owner would begin with; assignments raise versions alone."""
    level: int = 0
    """The model's acknowledgement level (`watermark.LEVELS`); above 0 every command is journaled."""
    lsn: int = 0
    """Commands executed, over all owners."""
    mark: Watermark = field(default_factory=Watermark)
    memory: PushMemory = field(default_factory=PushMemory)
    staged: dict[Slot, list[HeldPart]] = field(default_factory=dict)
    buffered: list[HeldPart] = field(default_factory=list)
    arrivals: int = 0
    """Gradients ever buffered: their order."""
    flush_at: float | None = None
    """When what is buffered is applied at the latest; None while nothing is buffered."""
    flush_timer: Timer | None = None
    """The newest one by which that is seen to."""
    operations: deque["Operation"] = field(default_factory=deque)
    """In order of arrival; the first one alone may be running."""
    committing: bool = False
    """Whether a commit is among the operations."""
    pulls: list["WaitingPull"] = field(default_factory=list)
    """Pulls that wait for a version of this partition."""
    cut: Capture | None = None
    """The newest cut, held for checkpoints while the model is in sync."""
    cut_stored: int | None = None
    """The clock of the newest cut in Redis."""
    held: int = 0
    """The number of the wish by which it is handed over: what is new waits, so that its state stands still; 0: none."""
    released: bool = False
    """Its whole state is stored and nothing has changed since: another shard may have it."""

    @classmethod
    def of(
        cls, key: PartitionKey, token: Token, layout: Layout, spec: ModelSpec, revision: int, live_workers: int
    ) -> "Partition":
        """A partition that is still to be loaded."""
        size, segments = layout.partition_size(key.index), layout.segments[key.index]
        return cls(key, token, size, segments, spec, revision, live_workers, level=LEVELS[spec.ack])

    @property
    def index(self) -> int:
        """Its number within the model."""
        return self.key.index

    @property
    def ready(self) -> bool:
        """Whether operations may begin."""
        return self.state is not None and not self.held

    def load(self, loaded: LoadedState) -> None:
        """Begin with that state; raises CorruptState, and changes nothing, for settings that cannot be read."""
        if loaded.settings is not None:
            self.spec, self.revision = restored(self.spec, loaded.settings, self.segments)
        self.state, self.version = loaded.state, loaded.version
        self.clock, self.lsn = loaded.clock, loaded.lsn
        self.durable_version, self.durable_clock = (loaded.version, loaded.clock) if loaded.stored else (0, 0)
        durable = loaded.lsn if loaded.stored else 0
        # A snapshot of a model at level `journaled` is in Redis, and not known to be on disk.
        self.mark = Watermark(durable, durable, durable if self.level == LEVELS["fsynced"] else -1)
        self.memory = PushMemory.restore(loaded.memory)
        self.buffered, self.arrivals = list(loaded.held), max((h.seq + 1 for h in loaded.held), default=0)
        for part in loaded.staged:
            self.stage(part)
        names = list(slot_names(self.spec.optimizer))
        same = len(loaded.state.slots) == len(names) and loaded.memory.get("slots", names) == names
        if not same or (not loaded.stored and self.spec.optimizer.name == "ftrl"):
            self.fresh_slots()

    def adopt(self, spec: ModelSpec, revision: int, live_workers: int) -> bool:
        """Other settings from now on; another optimizer starts with fresh state (true)."""
        other = slot_names(spec.optimizer) != slot_names(self.spec.optimizer)
        self.spec, self.revision, self.live_workers = spec, revision, live_workers
        if other and self.state is not None:
            self.fresh_slots()
        return other

    def fresh_slots(self) -> None:
        """The optimizer's state begins anew."""
        assert self.state is not None
        values = self.state.values
        self.state = PartitionState(values, initial_slots(self.spec.optimizer, values), (0,) * len(self.segments))

    def settings(self) -> dict[str, Any]:
        """The settings in force, as snapshots and journals carry them."""
        return settings_document(self.spec, self.revision, self.segments)

    def basis(self) -> Basis:
        """What the next update starts from."""
        assert self.state is not None
        return Basis(self.key, self.state, self.spec, self.segments)

    def rate(self) -> float:
        """The learning rate of the next update: the schedule counts the partition's own versions."""
        return learning_rate(self.spec.optimizer, self.version, self.live_workers)

    def numbers(self, scale: float, base: tuple[int, int] | None) -> tuple[float, float]:
        """(learning rate, factor of the gradient) of a push that is applied by itself now."""
        rate = self.rate()
        if self.spec.consistency.lag != "scale":
            return rate, scale
        factor = self.lag_factor(base)
        # `sum` has no learning rate that could be scaled.
        return rate * factor, scale * factor if self.spec.optimizer.name == "sum" else scale

    def lag(self, base: tuple[int, int] | None) -> int:
        """Versions applied since the gradient's base; 0 where that base is of another incarnation or unknown."""
        return max(0, self.version - base[0]) if base is not None and base[1] == self.token else 0

    def lag_factor(self, base: tuple[int, int] | None) -> float:
        """What the step is scaled by for the gradient's lag."""
        return 1.0 / (1.0 + self.lag(base)) if self.spec.consistency.lag == "scale" else 1.0

    def weighted(self, held: Iterable[HeldPart]) -> list[tuple[HeldPart, float]]:
        """Each part with what it weighs in a sum applied now."""
        return [(h, h.scale * self.lag_factor(h.base)) for h in held]

    def stand(self, version: int | None = None) -> PartVersion:
        """Where it stands, for a reply that quotes `version` or the present one."""
        return PartVersion(self.index, self.version if version is None else version, self.token, self.durable_version)

    def assigned(self, part: AssignPart, state: PartitionState) -> PartitionState:
        """The result of an assignment, with the optimizer state that follows from the values where one does (ftrl)."""
        optimizer = self.spec.optimizer
        if optimizer.name != "ftrl" or part.slots is not None:
            return state
        z, n = state.slots
        z = z.copy()
        for start, stop in part.ranges or ((0, self.size),):
            z[start:stop] = ftrl_z(optimizer, state.values[start:stop], n[start:stop])
        return PartitionState(state.values, (z, n), state.steps)

    # --- what is accepted and not applied

    def stage(self, part: HeldPart) -> None:
        """Keep a synchronous contribution until its clock commits."""
        self.staged.setdefault((part.worker, part.epoch, part.clock), []).append(part)

    def listed(self, contributions: Iterable[Contribution]) -> list[HeldPart]:
        """The staged parts of a commit's list in (rank, clock) order, each contribution's in seq order."""
        out: list[HeldPart] = []
        for c in sorted(contributions, key=lambda c: (c.rank, c.clock)):
            out.extend(sorted(self.staged.get((c.worker, c.epoch, c.clock), ()), key=lambda h: h.seq))
        return out

    def settle(self, contributions: Iterable[Contribution], t: int) -> int:
        """Drop what commit `t` took, and with `late: drop` all that it should have; returns the bytes let go.

        A worker's clocks are listed in their order, so what it staged for a clock before the newest one never will be.
        """
        gone = {(c.worker, c.epoch, c.clock) for c in contributions}
        newest = {(worker, epoch): clock for worker, epoch, clock in sorted(gone)}
        gone |= {slot for slot in self.staged if slot[2] < newest.get(slot[:2], 0)}
        if self.spec.consistency.late == "drop":
            gone |= {slot for slot in self.staged if slot[2] <= t}
        return self.drop(gone)

    def ended(self, live: dict[str, int], gone: Container[tuple[str, int]]) -> list[Slot]:
        """Whose parts are of epochs that have ended, so that no commit which is still to be decided will list them.

        Of a clock that is still to come those whose end is certain: they were in the roster, or are replaced there; who
        was never in it may have joined a moment ago.
        """
        ended = [s for s in self.staged if live.get(s[0]) != s[1]]
        return [s for s in ended if s[2] < self.clock or s[:2] in gone or live.get(s[0], 0) > s[1]]

    def drop(self, slots: Iterable[Slot]) -> int:
        """Drop these contributions; returns the bytes let go."""
        return sum(h.data.nbytes for slot in slots for h in self.staged.pop(slot, ()))

    def drop_staged(self) -> int:
        """Drop every synchronous contribution; returns the bytes let go."""
        return self.drop(tuple(self.staged))

    def take_buffered(self) -> Sequence[HeldPart]:
        """Empty the buffer, in order of arrival."""
        held, self.buffered, self.flush_at = self.buffered, [], None
        return held

    @property
    def held_bytes(self) -> int:
        """Bytes of accepted gradients that are not applied yet."""
        staged = sum(h.data.nbytes for parts in self.staged.values() for h in parts)
        return staged + sum(h.data.nbytes for h in self.buffered)

    @property
    def by_cuts(self) -> bool:
        """Whether a recovery goes back to a cut: sync at level `applied`."""
        return not self.level and self.spec.consistency.mode == "sync"

    @property
    def unsaved(self) -> bool:
        """Whether memory alone holds something that a snapshot would keep; sync at `applied` goes back to cuts."""
        unstored = self.lsn > self.mark.stored or self.mark.rebase is not None
        return self.state is not None and not self.by_cuts and unstored

    def capture(self, *, cut: bool = False) -> Capture:
        """The partition as it is now; a cut of a model at level `applied` leaves out what is staged, which a recovery
        to that cut discards."""
        assert self.state is not None
        staged = () if cut and not self.level else tuple(h for parts in self.staged.values() for h in parts)
        return Capture(
            self.key,
            self.token,
            self.version,
            self.clock,
            self.state,
            self.remembered(),
            tuple(self.buffered),
            self.lsn,
            staged,
            self.settings(),
        )

    def remembered(self) -> dict[str, Any]:
        """Windows and keys, with the names of the optimizer's state arrays."""
        return self.memory.export() | {"slots": list(slot_names(self.spec.optimizer))}

    def captured(self, cut: int | None) -> Capture:
        """The partition as it is now (None) or at that cut; raises `loading`, or `conflict` for a cut not held."""
        if self.state is None:
            raise problem("loading", f"partition {self.index} is being recovered")
        if self.cut is not None and cut == self.cut.clock:
            return self.cut
        if cut is None or (cut == self.clock and self.spec.consistency.mode == "sync"):
            return self.capture()
        raise problem("conflict", f"partition {self.index} does not hold the cut of clock {cut}", clock=self.clock)
