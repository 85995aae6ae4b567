"""A push, once its turn has come: applied, staged or buffered, or rejected with nothing changed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import astuple, replace

from paramserver import limits
from paramserver.core.partition_state import HeldPart, held_bytes
from paramserver.core.shard import admission
from paramserver.core.shard.effects import PushDone, Task
from paramserver.core.shard.events import PushPart, PushReceived, TaskResult, WorkerAnswered
from paramserver.core.shard.journal import hold_head, push_head
from paramserver.core.shard.mean_operations import FlushOperation
from paramserver.core.shard.operation import RequestOperation
from paramserver.core.shard.partition import Partition
from paramserver.core.shard.served_model import no_values_yet
from paramserver.core.shard.update import single_task
from paramserver.core.shard.window import EarlierAnswer
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError, as_problem, problem
from paramserver.types import PushState

if TYPE_CHECKING:
    from paramserver.core.shard.core import ShardCore


@dataclass(slots=True, eq=False)
class PushOperation(RequestOperation):
    """A push to one or more partitions."""

    event: PushReceived = field(kw_only=True)
    answer: WorkerAnswered | None = None
    """The scheduler's answer about its worker, if it was asked."""
    level: int = 0
    """Durability that its reply acknowledges and waits for (`types.LEVELS`)."""
    _seen: list[EarlierAnswer | None] = field(default_factory=list)
    _fresh: list[tuple[Partition, PushPart]] = field(default_factory=list)
    _rates_and_factors: list[tuple[float, float]] = field(default_factory=list)
    """(learning rate, factor of the gradient) for each fresh part."""
    _state_changed: bool = False
    """Whether `start` has begun to change state; from then on the push can no longer be rejected."""

    def start(self, shard: "ShardCore", now: float) -> Sequence[Task]:
        try:
            return self._start(shard, now)
        except Exception as error:
            if self._state_changed:
                raise
            self.refuse(shard, as_problem(error))
            return ()

    def _start(self, shard: "ShardCore", now: float) -> Sequence[Task]:
        spec = self._check(shard)
        rule, event = spec.consistency, self.event
        if not rule.immediate or any([p.memory.remembers(event.push_id, event.key) for p in self.partitions]):
            event = self._with_checksums(shard)
        pairs = list(zip(self.partitions, event.parts, strict=True))
        self._seen = [p.memory.check(event.push_id, event.key, part.crc or 0) for p, part in pairs]
        self._fresh = [pair for pair, seen in zip(pairs, self._seen, strict=True) if seen is None]
        state: PushState = "applied" if rule.immediate else "staged" if rule.mode == "sync" else "buffered"
        if not self._fresh:
            self._reply(shard, state, now)
            return ()
        for partition, part in self._fresh:
            if partition.spec.consistency.lag == "reject":
                _check_lag(partition, part.base)
        scale = event.weight * admission.clip_factor(event, spec)
        if rule.immediate:
            return self._steps(scale)
        self._check_holdable(shard, sync=rule.mode == "sync")
        kept = [(p, _kept(p, part)) for p, part in self._fresh]
        self._state_changed = True
        for partition, part in kept:
            self._hold(shard, partition, part, scale, now)
        self._reply(shard, state, now)
        return ()

    def _check(self, shard: "ShardCore") -> ModelSpec:
        """Return the settings in force, or raise if the push cannot be accepted now, whatever it contains."""
        event, spec = self.event, self.partitions[0].spec
        self.model.check(event.generation, event.timeline)
        if not self.model.ready:  # a partition that it waited for has lost its first values
            raise no_values_yet()
        mode = spec.consistency.mode
        for p in self.partitions:
            if p.spec is not spec and p.spec.consistency.mode != mode:
                raise problem("loading", "the model's settings are being changed")
        if self.answer is not None:
            self.model.check(self.answer.generation, None)  # a push by name says nothing of the one it is meant for
        admission.check_worker(event, mode, self.model.workers, self.answer)
        if self.level:
            admission.check_level(self.level, self.partitions[0].level, mode)
            shard.durability.admit(self.level, sum([held_bytes(part.ranges, part.data) for part in event.parts]))
        return spec

    def _steps(self, scale: float) -> Sequence[Task]:
        """The tasks that apply each fresh part by itself."""
        self._rates_and_factors = [p.rate_and_factor(scale, part.base) for p, part in self._fresh]
        return [
            single_task(
                p.update_input(),
                part.data,
                part.dtype,
                part.ranges,
                factor,
                rate,
                reuse_direct=part.exclusive_buffer and p.spec.ack == "applied",  # else the journal still needs it
                needs_check=part.crc is None,
            )
            for (p, part), (rate, factor) in zip(self._fresh, self._rates_and_factors, strict=True)
        ]

    def _check_holdable(self, shard: "ShardCore", *, sync: bool) -> None:
        """Raise if the fresh parts cannot be staged or buffered."""
        if sync:
            if self.event.clock is None:
                hint = "the iteration it belongs to, from 0"
                raise problem("invalid_field", "clock: is required in mode sync", hint=hint)
            _check_clock(self.event.clock, max([self.model.clock, *(p.clock for p in self.partitions)]))
        nbytes = sum(held_bytes(part.ranges, part.data) for _, part in self._fresh)
        if shard.held_bytes + nbytes > shard.held_bytes_max:
            raise problem("queue_full", f"{shard.held_bytes} bytes of gradients wait to be applied in this shard")

    def _with_checksums(self, shard: "ShardCore") -> PushReceived:
        """Return the push with every part's checksum known. Raises RequestError (`non_finite`) for NaN or infinity."""
        if any(part.crc is None for part in self.event.parts):
            parts = tuple(part if part.crc is not None else shard.check_content(part) for part in self.event.parts)
            admission.check_finite(parts)
            self.event = replace(self.event, parts=parts)
        return self.event

    def _late(self, p: Partition) -> bool:
        """sync: whether the push comes after the commit of its clock on that partition, and is dropped for it."""
        rule, clock = p.spec.consistency, self.event.clock
        return rule.mode == "sync" and rule.late == "drop" and clock is not None and clock < p.clock

    def _hold(self, shard: "ShardCore", p: Partition, part: PushPart, scale: float, now: float) -> None:
        """Keep one part until its clock commits or the partition's buffer is flushed."""
        event, rule, late = self.event, p.spec.consistency, self._late(p)
        sync = rule.mode == "sync"
        clock = event.clock if sync and event.clock is not None else -1
        assert part.crc is not None
        p.memory.record(event.push_id, event.key, part.crc, p.version, late)
        worker, epoch, seq = ("", 0, 0) if event.push_id is None else astuple(event.push_id)
        held = HeldPart(worker, epoch, clock, seq, part.base, scale, part.ranges, part.data, part.dtype)
        p.lsn += 1
        if p.level:
            head = hold_head(event, part, p.version, held, late)
            shard.durability.executed(p, "hold", head, () if late else (part.data,))
        shard.plan.changed(p, now)
        if late:
            return
        shard.held_bytes += held.nbytes
        if sync:
            p.stage(held)
            return
        p.buffered.append(held)
        if len(p.buffered) >= rule.count:
            shard.run_next(p, FlushOperation(self.model, [p]))
        elif p.flush_at is None:
            p.flush_at = now + rule.interval_ms / 1000.0
            shard.flush_by(p, p.flush_at, now)

    def finish(self, shard: "ShardCore", results: Sequence[TaskResult], now: float) -> None:
        if any([r.state is None for r in results]):
            self.refuse(shard, self._not_finite(results))
            return
        for i, ((p, part), result) in enumerate(zip(self._fresh, results, strict=True)):
            assert result.state is not None
            crc = result.crc if part.crc is None else part.crc
            assert crc is not None
            p.memory.record(self.event.push_id, self.event.key, crc, p.version + 1)
            shard.publish_version(p, result.state, now)
            if p.level:
                head = push_head(self.event, replace(part, crc=crc), p.version, *self._rates_and_factors[i])
                shard.durability.executed(p, "push", head, (part.data,))
        self._reply(shard, "applied", now)

    def _not_finite(self, results: Sequence[TaskResult]) -> PsError:
        pairs = [(p.index, r) for (p, _), r in zip(self._fresh, results, strict=True)]
        for index, result in pairs:
            if result.bad_gradient:
                return admission.not_finite(index)
        bad = [index for index, result in pairs if result.state is None]
        return problem("non_finite_result", f"partitions {bad} would hold NaN or infinity; nothing was changed")

    def _reply(self, shard: "ShardCore", state: PushState, now: float) -> None:
        pairs = list(zip(self.partitions, self._seen, strict=True))
        parts = tuple([p.part_version(None if seen is None else seen.version) for p, seen in pairs])
        late = any([self._late(p) if seen is None else seen.late for p, seen in pairs])
        done = PushDone(self.model.key, self.model.timeline, state, not self._fresh, parts, late)
        if self.level:
            shard.durability.acknowledge(self.event.request, done, self.partitions, self.level, now)
        else:
            shard.reply(self.event.request, done)


def _kept(p: Partition, part: PushPart) -> PushPart:
    """The part as it is held: copied in journaled models, where a snapshot may outlive the sender's buffer."""
    return replace(part, data=part.data.copy()) if p.level and not part.exclusive_buffer else part


def _check_clock(clock: int, reached: int) -> None:
    top = reached + limits.CLOCKS_AHEAD_MAX
    if clock > top:
        raise problem("invalid_field", f"clock: must be from 0 to {top}, not {clock}", where="clock")


def _check_lag(partition: Partition, base: tuple[int, int] | None) -> None:
    rule, lag = partition.spec.consistency, partition.lag(base)
    if lag > rule.lag_bound:
        raise problem(
            "too_stale",
            f"the gradient is {lag} versions stale; at most {rule.lag_bound} are allowed",
            hint="pull and recompute the gradient",
            lag=lag,
            version=partition.version,
        )
