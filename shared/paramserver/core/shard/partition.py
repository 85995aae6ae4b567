"""One partition at its owner: immutable arrays, a version, and the gradients accepted but not yet applied."""

from collections import deque
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paramserver.core.commit import Contribution
from paramserver.core.layout import Layout, Segment
from paramserver.core.optimizer import ftrl_z, initial_slots, slot_names
from paramserver.core.partition_state import Capture, HeldPart, LoadedState, PartitionState
from paramserver.core.settings import settings_document, spec_from_document
from paramserver.core.shard.effects import PartVersion
from paramserver.core.shard.events import AssignPart, Source
from paramserver.core.shard.schedule import learning_rate
from paramserver.core.shard.timers import Timer
from paramserver.core.shard.update import UpdateInput
from paramserver.core.shard.watermark import Watermark
from paramserver.core.shard.window import PushMemory
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError, problem
from paramserver.types import LEVELS, PartitionKey, PushId, Token

if TYPE_CHECKING:
    from paramserver.core.shard.operation import Operation
    from paramserver.core.shard.pull_desk import WaitingPull

LOAD_AGAIN_S = 1.0
NO_REVISION = -1
"""Before every revision: that of first values in sync whose first commit is decided already, until they take it."""

ContributionKey = tuple[str, int, int]
"""(worker, epoch, clock): identifies one contribution to a synchronous clock."""


@dataclass(slots=True, eq=False)
class Partition:
    """State of one partition under one owner token. Only `ShardCore` changes it."""

    key: PartitionKey
    token: Token
    size: int
    segments: tuple[Segment, ...]
    spec: ModelSpec
    """Settings in force for this partition; they change only between operations."""
    revision: int
    live_workers: int = 1
    source: Source = "init"
    """Where its state is loaded from."""
    state: PartitionState | None = None
    """None until loaded."""
    given_up: bool = False
    """It is not loaded, because this shard has given it up under this token, or the one that this renews."""
    load_error: PsError | None = None
    """Why the last attempt to load it failed."""
    load_again_s: float = LOAD_AGAIN_S
    """How long after its next failure loading is tried again, if its stored state is corrupt then, too."""
    version: int = 0
    from_version: int = 0
    """The version that was loaded."""
    from_lsn: int = 0
    """Number of the last command in what was loaded."""
    clock: int = 0
    """sync: the next commit's `t`."""
    durable_version: int = 0
    durable_clock: int = 0
    """sync: the clock at which a new owner would start; unlike the version, it is not raised by assignments."""
    level: int = 0
    """The model's acknowledgement level (`types.LEVELS`); above 0 every command is journaled."""
    lsn: int = 0
    """Number of the last command executed; counts on over all owners."""
    mark: Watermark = field(default_factory=Watermark)
    memory: PushMemory = field(default_factory=PushMemory)
    staged: dict[ContributionKey, list[HeldPart]] = field(default_factory=dict)
    buffered: list[HeldPart] = field(default_factory=list)
    flush_at: float | None = None
    """Deadline for the next flush; None while nothing is buffered."""
    flush_timer: Timer | None = None
    """The timer last set for `flush_at`."""
    operations: deque["Operation"] = field(default_factory=deque)
    """Its queue of operations, in order of arrival; only the first one may be running."""
    committing: bool = False
    """Whether a commit is among the operations, or a flush is being computed: what is staged must stay as it is."""
    pulls: list["WaitingPull"] = field(default_factory=list)
    """Pulls that wait for a version of this partition."""
    cut: Capture | None = None
    """The newest cut, held for checkpoints while the model is in sync."""
    cut_stored: int | None = None
    """The clock of the newest cut in Redis."""
    release_number: int = 0
    """Number of the pending request to release it; 0: none."""
    released: bool = False
    """Its whole state is stored and unchanged since, so another shard may take it over."""

    @classmethod
    def of(cls, key: PartitionKey, token: Token, layout: Layout, spec: ModelSpec, revision: int) -> "Partition":
        """Create a partition that has yet to be loaded."""
        size, segments = layout.partition_size(key.index), layout.segments[key.index]
        return cls(key, token, size, segments, spec, revision, level=LEVELS[spec.ack])

    @property
    def index(self) -> int:
        """Its number within the model."""
        return self.key.index

    @property
    def suspended(self) -> bool:
        """Whether it is to be released: new operations wait, so that its state does not change."""
        return self.release_number > 0

    @property
    def corrupt(self) -> PsError | None:
        """Why requests are refused at once, if its stored state was found corrupt in more than one attempt."""
        return self.load_error if self.state is None and self.load_again_s > 2 * LOAD_AGAIN_S else None

    @property
    def answers(self) -> bool:
        """Whether pulls are answered: once it is released, another shard may have it, with newer values."""
        return self.state is not None and not self.released

    @property
    def ready(self) -> bool:
        """Whether operations may start."""
        return self.state is not None and not self.suspended

    def load(self, loaded: LoadedState) -> None:
        """Start with the loaded state. Raises CorruptState, with nothing changed, if its settings cannot be read."""
        if loaded.settings is not None:
            self.spec, self.revision = spec_from_document(self.spec, loaded.settings, self.segments)
        self.state, self.version, self.from_version = loaded.state, loaded.version, loaded.version
        self.clock, self.lsn, self.from_lsn = loaded.clock, loaded.lsn, loaded.lsn
        self.durable_version, self.durable_clock = (loaded.version, loaded.clock) if loaded.stored else (0, 0)
        durable = loaded.lsn if loaded.stored else 0
        # Nobody knows whether that is on Redis' disk: the last owner may have died before it was.
        self.mark = Watermark(durable, durable)
        self.memory = PushMemory.restore(loaded.memory)
        self.buffered = list(loaded.buffered)
        for part in loaded.staged:
            self.stage(part)
        names = list(slot_names(self.spec.optimizer))
        same = len(loaded.state.slots) == len(names) and loaded.memory.get("slots", names) == names
        if not same or (not loaded.stored and self.spec.optimizer.name == "ftrl"):
            self.fresh_slots()

    def adopt(self, spec: ModelSpec, revision: int, live_workers: int) -> bool:
        """Adopt new settings; returns whether the optimizer has other state arrays now, which start afresh."""
        other = slot_names(spec.optimizer) != slot_names(self.spec.optimizer)
        self.spec, self.revision, self.live_workers = spec, revision, live_workers
        if other and self.state is not None:
            self.fresh_slots()
        return other

    def fresh_slots(self) -> None:
        """Reset the optimizer's state and step counts."""
        assert self.state is not None
        values = self.state.values
        self.state = PartitionState(values, initial_slots(self.spec.optimizer, values), (0,) * len(self.segments))

    def settings(self) -> dict[str, Any]:
        """The settings in force, as snapshots and journals carry them."""
        return settings_document(self.spec, self.revision, self.segments)

    def update_input(self) -> UpdateInput:
        """The state and settings from which the next update starts."""
        assert self.state is not None
        return UpdateInput(self.key, self.state, self.spec, self.segments)

    def rate(self) -> float:
        """The learning rate of the next update: the schedule counts the partition's own versions, in sync the clock."""
        updates = self.clock if self.spec.consistency.mode == "sync" else self.version
        return learning_rate(self.spec.optimizer, updates, self.live_workers)

    def rate_and_factor(self, scale: float, base: tuple[int, int] | None) -> tuple[float, float]:
        """(learning rate, factor of the gradient) for a push applied by itself now."""
        factor = self.lag_factor(base)
        # `sum` has no learning rate that could be scaled.
        return self.rate() * factor, scale * factor if self.spec.optimizer.name == "sum" else scale

    def lag(self, base: tuple[int, int] | None) -> int:
        """Versions applied since the gradient's base; 0 if the base is unknown or of another incarnation."""
        return max(0, self.version - base[0]) if base is not None and base[1] == self.token else 0

    def lag_factor(self, base: tuple[int, int] | None) -> float:
        """Factor that scales the step for the gradient's lag; 1 unless the model's `lag` setting is `scale`."""
        return 1.0 / (1.0 + self.lag(base)) if self.spec.consistency.lag == "scale" else 1.0

    def weighted(self, held: Iterable[HeldPart]) -> list[tuple[HeldPart, float]]:
        """Each part with its weight in a sum applied now."""
        return [(h, h.scale * self.lag_factor(h.base)) for h in held]

    def part_version(self, version: int | None = None) -> PartVersion:
        """Its versions and incarnation for a reply; `version` replaces the current one if given."""
        return PartVersion(self.index, self.version if version is None else version, self.token, self.durable_version)

    def assigned(self, part: AssignPart, state: PartitionState) -> PartitionState:
        """The state after an assignment; where ftrl's z was not assigned, it is computed from the new values."""
        optimizer = self.spec.optimizer
        if optimizer.name != "ftrl" or part.slots is not None:
            return state
        z, n = state.slots
        z = z.copy()
        for start, stop in ((0, self.size),) if part.ranges is None else part.ranges.tolist():
            z[start:stop] = ftrl_z(optimizer, state.values[start:stop], n[start:stop])
        return PartitionState(state.values, (z, n), state.steps)

    # --- gradients accepted and not yet applied

    def stage(self, part: HeldPart) -> None:
        """Keep a synchronous contribution until its clock commits."""
        self.staged.setdefault((part.worker, part.epoch, part.clock), []).append(part)

    def listed(self, contributions: Iterable[Contribution]) -> list[HeldPart]:
        """Staged parts of a commit's contributions in (rank, clock) order, those of one contribution in seq order."""
        out: list[HeldPart] = []
        for c in sorted(contributions, key=lambda c: (c.rank, c.clock)):
            out.extend(sorted(self.staged.get((c.worker, c.epoch, c.clock), ()), key=lambda h: h.seq))
        return out

    def end_clock(self, contributions: Iterable[Contribution], t: int) -> int:
        """Reach the clock after commit `t`: release the parts that it lists, drop those that no later one can list.

        Returns the bytes released.  The version becomes at least `t`, so that the commit's new values are of version
        t + 1 or later, as the clock is (semantics 8).  A worker's clocks are listed in order, so parts for a clock
        before its newest listed one are never listed; with `late: drop` no part for a clock up to `t` is.
        """
        self.clock, self.version = t + 1, max(self.version, t)
        listed = sorted((c.worker, c.epoch, c.clock) for c in contributions)
        released = sum(h.nbytes for key in listed for h in self.staged.pop(key, ()))
        newest = {(worker, epoch): clock for worker, epoch, clock in listed}
        drops = self.spec.consistency.late == "drop"
        return released + self.drop([k for k in self.staged if k[2] < newest.get(k[:2], 0) or (drops and k[2] <= t)])

    def ended(self, live: Mapping[str, int], departed: Container[tuple[str, int]]) -> list[ContributionKey]:
        """Staged contributions of epochs that have ended, which no undecided commit will list.

        For clocks not yet committed here, only those whose epoch has certainly ended: it is among those that left the
        roster (`departed`), or a higher one has replaced it. A worker never in the roster may have joined a moment ago.
        """
        ended = [k for k in self.staged if live.get(k[0]) != k[1]]
        return [k for k in ended if k[2] < self.clock or k[:2] in departed or live.get(k[0], 0) > k[1]]

    def drop(self, keys: Iterable[ContributionKey]) -> int:
        """Drop these contributions, which their repetitions are told then; returns the bytes released."""
        dropped = [h for key in keys for h in self.staged.pop(key, ())]
        for h in dropped:
            self.memory.discard(PushId(h.worker, h.epoch, h.seq))
        return sum(h.nbytes for h in dropped)

    def drop_staged(self) -> int:
        """Drop every synchronous contribution; returns the bytes released."""
        return self.drop(tuple(self.staged))

    @property
    def unapplied(self) -> list[HeldPart]:
        """Accepted gradients not yet applied: contribution by contribution in order of arrival, then the buffer."""
        return [h for parts in self.staged.values() for h in parts] + self.buffered

    @property
    def contributions(self) -> float:
        """What the sum of `unapplied` is divided by for their mean."""
        return float(len(self.staged) + len(self.buffered))

    def drop_unapplied(self) -> int:
        """Drop all accepted gradients, applied by now or given up; returns the bytes released."""
        released = self.held_bytes
        self.staged, self.buffered, self.flush_at = {}, [], None
        return released

    @property
    def held_bytes(self) -> int:
        """Bytes of accepted gradients not yet applied."""
        return sum(h.nbytes for h in self.unapplied)

    @property
    def by_cuts(self) -> bool:
        """Whether recovery goes back to a cut: sync at level `applied`."""
        return not self.level and self.spec.consistency.mode == "sync"

    @property
    def unsaved(self) -> bool:
        """Whether only memory holds changes that a snapshot would keep; False where recovery goes back to cuts."""
        unstored = self.lsn > self.mark.stored or self.mark.rebase is not None
        return self.state is not None and not self.by_cuts and unstored

    def capture(self, *, cut: bool = False) -> Capture:
        """Capture the partition as it is now.

        A cut of a model at level `applied` leaves out staged parts, because a recovery to that cut discards them.  Its
        lsn leaves them out, too, so that it does not pass for the whole state.
        """
        assert self.state is not None
        held = tuple(h for parts in self.staged.values() for h in parts)
        staged, left_out = ((), len(held)) if cut and not self.level else (held, 0)
        return Capture(
            self.state,
            self.version,
            self.clock,
            self.remembered(),
            tuple(self.buffered),
            self.lsn - left_out,
            staged,
            key=self.key,
            token=self.token,
            settings=self.settings(),
        )

    def remembered(self) -> dict[str, Any]:
        """Push windows, idempotency keys, and the names of the optimizer's state arrays."""
        return self.memory.export() | {"slots": list(slot_names(self.spec.optimizer))}

    def capture_at(self, cut: int | None) -> Capture:
        """Return a capture of the current state (None) or of that cut.

        Raises Unavailable (`loading`) if the partition is not loaded, ConflictError (`conflict`) if it lacks that cut.
        """
        if self.state is None:
            raise problem("loading", f"partition {self.index} is being recovered")
        if self.cut is not None and cut == self.cut.clock:
            return self.cut
        if cut is None or (cut == self.clock and self.spec.consistency.mode == "sync"):
            return self.capture()
        raise problem("conflict", f"partition {self.index} does not hold the cut of clock {cut}", clock=self.clock)
