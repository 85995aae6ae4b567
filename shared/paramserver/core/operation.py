"""What changes partitions: a push, an assignment, a commit, a flush, a change of settings.

An operation stands in the line of each partition it touches and starts when it is first in all of them, so operations
that share a partition run in order of arrival and one of several partitions runs on all or on none.  `start` decides
by the state of that moment and returns what is to be computed; `finish` makes the results visible.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from paramserver import limits
from paramserver.core import admission
from paramserver.core.durability import Durability
from paramserver.core.journal import Step, commit_head, config_head, flush_head, hold_head, push_head, set_head
from paramserver.core.partition import Partition
from paramserver.core.served_model import ServedModel
from paramserver.core.shard_io import (
    AssignTask,
    CommitDecided,
    HeldPart,
    Outcome,
    PartitionState,
    PushDone,
    PushPart,
    PushReceived,
    Request,
    SetReceived,
    Task,
    TaskResult,
    WorkerAnswered,
)
from paramserver.core.spec import ModelSpec
from paramserver.core.update import mean_task, single_task
from paramserver.core.window import Seen
from paramserver.errors import PsError, as_problem, problem
from paramserver.types import PushState


class Shard(Protocol):
    """What an operation does to the shard it runs in."""

    held_bytes: int
    """Bytes of staged and buffered gradients."""
    not_finite: int
    """Commits and flushes that changed nothing because their result was not finite."""

    durability: Durability

    def look(self, part: PushPart) -> PushPart:
        """The part, with what is in its elements."""

    def reply(self, request: Request, outcome: Outcome) -> None:
        """Answer a request."""

    def flip(self, partition: Partition, state: PartitionState, now: float) -> None:
        """The partition's next version becomes the present one."""

    def precede(self, partition: Partition, operation: "Operation") -> None:
        """Run that operation as soon as the present one is over, before all that waits."""

    def flush_by(self, partition: Partition, at: float, now: float) -> None:
        """Apply what the partition has buffered at that time at the latest; it is part of what a snapshot keeps."""

    def cut(self, partition: Partition) -> None:
        """Store the partition as it is now as a cut."""

    def committed(self, model: ServedModel, partition: Partition, now: float) -> None:
        """The partition has taken a commit, has passed over one of an older timeline, or begins a synchronous phase."""

    def remembers(self, partition: Partition, now: float) -> None:
        """The partition has changed otherwise than by a version, so that a snapshot of it is due."""

    def settings_changed(self, partition: Partition, now: float) -> None:
        """The partition has other settings now."""


@dataclass(slots=True, eq=False)
class Operation:
    """One entry of the partitions' lines."""

    model: ServedModel
    partitions: list[Partition] = field(default_factory=list)
    """Those it touches on this shard; resolved anew whenever it is put into the lines."""
    running: bool = False
    over: bool = False

    def start(self, shard: Shard, now: float) -> Sequence[Task]:
        """What is to be computed; nothing if the operation is over already."""
        raise NotImplementedError

    def finish(self, shard: Shard, results: Sequence[TaskResult], now: float) -> None:
        """The results are there, in the order of the tasks."""
        raise NotImplementedError

    def refuse(self, shard: Shard, error: PsError) -> None:
        """It cannot be done; nothing has changed."""


@dataclass(slots=True, eq=False)
class PushOperation(Operation):
    """A push of one or several partitions."""

    event: PushReceived = field(kw_only=True)
    answer: WorkerAnswered | None = None
    """What the scheduler said about its worker, if it was asked."""
    expires: float = 0.0
    """Until when it waits for partitions to be loaded."""
    level: int = 0
    """What its reply says is durable (`watermark.LEVELS`)."""
    _seen: list[Seen | None] = field(default_factory=list)
    _fresh: list[tuple[Partition, PushPart]] = field(default_factory=list)
    _numbers: list[tuple[float, float]] = field(default_factory=list)
    """(learning rate, factor) of each fresh part."""
    _holds: bool = False
    """Whether it has begun to change something as it starts: from then on it cannot be refused any more."""

    def start(self, shard: Shard, now: float) -> Sequence[Task]:
        try:
            return self._start(shard, now)
        except Exception as error:
            if self._holds:
                raise
            self.refuse(shard, as_problem(error))
            return ()

    def _start(self, shard: Shard, now: float) -> Sequence[Task]:
        event = self.event
        self.model.check(event.generation, event.timeline)
        spec = self.partitions[0].spec
        mode = spec.consistency.mode
        for p in self.partitions:
            if p.spec is not spec and p.spec.consistency.mode != mode:
                raise problem("loading", "the model's settings are just changing")
        admission.check_worker(event, mode, self.model.workers, self.answer)
        if self.level:
            admission.check_level(self.level, self.partitions[0].level, mode)
            shard.durability.admit(self.level, sum([part.data.nbytes for part in event.parts]))
        immediate = spec.consistency.immediate
        if not immediate or any([p.memory.holds(event.push_id, event.key) for p in self.partitions]):
            event = self._looked_at(shard)
        pairs = list(zip(self.partitions, event.parts, strict=True))
        self._seen = [p.memory.judge(event.push_id, event.key, part.crc or 0) for p, part in pairs]
        self._fresh = [pair for pair, seen in zip(pairs, self._seen, strict=True) if seen is None]
        state: PushState = "applied" if immediate else "staged" if mode == "sync" else "buffered"
        if not self._fresh:
            self._reply(shard, state, now)
            return ()
        scale = event.weight * admission.clip_factor(event, spec)
        for partition, part in self._fresh:
            if partition.spec.consistency.lag == "reject":
                _check_lag(partition, part.base)
        if immediate:
            self._numbers = [p.numbers(scale, part.base) for p, part in self._fresh]
            return [
                single_task(
                    p.basis(),
                    part.data,
                    part.dtype,
                    part.ranges,
                    factor,
                    rate,
                    spend=part.owned and p.spec.ack == "applied",  # else the journal has need of it
                    look=part.crc is None,
                )
                for (p, part), (rate, factor) in zip(self._fresh, self._numbers, strict=True)
            ]
        if mode == "sync" and event.clock is None:
            raise problem("invalid_field", "clock: is needed in mode sync", hint="the iteration it belongs to, from 0")
        nbytes = sum(part.data.nbytes for _, part in self._fresh)
        if shard.held_bytes + nbytes > limits.STAGED_BYTES_MAX:
            raise problem("queue_full", f"{shard.held_bytes} bytes of gradients wait to be applied in this shard")
        kept = [(p, _kept(p, part)) for p, part in self._fresh]
        self._holds = True
        for partition, part in kept:
            self._hold(shard, partition, part, scale, now)
        self._reply(shard, state, now)
        return ()

    def _looked_at(self, shard: Shard) -> PushReceived:
        """The push, of which everything is known; raises RequestError (`non_finite`)."""
        if any(part.crc is None for part in self.event.parts):
            parts = tuple(part if part.crc is not None else shard.look(part) for part in self.event.parts)
            admission.check_finite(parts)
            self.event = replace(self.event, parts=parts)
        return self.event

    def _hold(self, shard: Shard, p: Partition, part: PushPart, scale: float, now: float) -> None:
        """Keep one part until its clock commits, or until its partition's buffer is applied."""
        event, rule = self.event, p.spec.consistency
        sync = rule.mode == "sync"
        clock = event.clock if sync and event.clock is not None else -1
        late = sync and clock < p.clock and rule.late == "drop"
        assert part.crc is not None
        p.memory.record(event.push_id, event.key, part.crc, p.version, late)
        worker, epoch, seq = "", 0, p.arrivals
        if event.push_id is not None:
            worker, epoch = event.push_id.worker, event.push_id.epoch
            seq = event.push_id.seq if sync else seq
        held = HeldPart(worker, epoch, clock, seq, part.base, scale, part.ranges, part.data, part.dtype)
        p.lsn += 1
        if p.level:
            head = hold_head(event, part, p.version, held, late)
            shard.durability.executed(p, "hold", head, () if late else (part.data,))
            shard.remembers(p, now)
        if late:
            return
        shard.held_bytes += part.data.nbytes
        if sync:
            p.stage(held)
            return
        p.buffered.append(held)
        p.arrivals += 1
        if len(p.buffered) >= rule.count:
            shard.precede(p, FlushOperation(self.model, [p]))
        elif p.flush_at is None:
            p.flush_at = now + rule.interval_ms / 1000.0
            shard.flush_by(p, p.flush_at, now)

    def finish(self, shard: Shard, results: Sequence[TaskResult], now: float) -> None:
        if any([r.state is None for r in results]):
            self.refuse(shard, self._not_finite(results))
            return
        for i, ((p, part), result) in enumerate(zip(self._fresh, results, strict=True)):
            assert result.state is not None
            crc = result.crc if part.crc is None else part.crc
            assert crc is not None
            p.memory.record(self.event.push_id, self.event.key, crc, p.version + 1)
            shard.flip(p, result.state, now)
            if p.level:
                head = push_head(self.event, replace(part, crc=crc), p.version, *self._numbers[i])
                shard.durability.executed(p, "push", head, (part.data,))
        self._reply(shard, "applied", now)

    def _not_finite(self, results: Sequence[TaskResult]) -> PsError:
        pairs = [(p.index, r) for (p, _), r in zip(self._fresh, results, strict=True)]
        for index, result in pairs:
            if result.bad_gradient:
                return admission.not_finite(index)
        bad = [index for index, result in pairs if result.state is None]
        return problem("non_finite_result", f"partitions {bad} would hold NaN or infinity; nothing was changed")

    def refuse(self, shard: Shard, error: PsError) -> None:
        shard.reply(self.event.request, error)

    def _reply(self, shard: Shard, state: PushState, now: float) -> None:
        event, rule, stands = self.event, self.partitions[0].spec.consistency, []
        drops = state == "staged" and rule.late == "drop" and event.clock is not None
        duplicate, late, unknown = True, False, False
        for p, part, seen in zip(self.partitions, event.parts, self._seen, strict=True):
            if seen is None:
                duplicate = False
                late = late or (drops and event.clock is not None and event.clock < p.clock)
                stands.append(p.stand())
            else:
                late = late or seen.late
                stands.append(p.stand(seen.version))
            unknown = unknown or (part.base is not None and part.base[1] != p.token)
        done = PushDone(
            self.model.key,
            self.model.timeline,
            state,
            duplicate,
            min([s.version for s in stands]),
            min([s.durable_version for s in stands]),
            max([s.incarnation for s in stands]),
            tuple(stands),
            late,
            unknown,
        )
        if self.level:
            shard.durability.acknowledge(event.request, done, self.partitions, self.level, now)
        else:
            shard.reply(event.request, done)


def _kept(p: Partition, part: PushPart) -> PushPart:
    """The part as it is held; of a journaled model a snapshot can hold it when its sender has its memory again."""
    return replace(part, data=part.data.copy()) if p.level and not part.owned else part


def _check_lag(partition: Partition, base: tuple[int, int] | None) -> None:
    rule, lag = partition.spec.consistency, partition.lag(base)
    if lag > rule.lag_bound:
        raise problem(
            "too_stale",
            f"the gradient's base lies {lag} versions back; at most {rule.lag_bound} are allowed",
            hint="pull and compute it again",
            lag=lag,
            version=partition.version,
        )


@dataclass(slots=True, eq=False)
class SetOperation(Operation):
    """An assignment of values: `PUT params`, a restore, an upload."""

    event: SetReceived = field(kw_only=True)
    expires: float = 0.0

    def start(self, shard: Shard, now: float) -> Sequence[Task]:
        tasks: list[Task] = []
        try:
            self.model.check(self.event.generation, None)
            level = self.partitions[0].level
            if level:
                shard.durability.admit(level, sum(part.data.nbytes for part in self.event.parts))
            for p, part in zip(self.partitions, self.event.parts, strict=True):
                assert p.state is not None
                if part.slots is not None and len(part.slots) != len(p.state.slots):
                    raise problem("loading", "the model's optimizer is just changing")
                tasks.append(AssignTask(p.key, p.state, part))
        except Exception as error:
            self.refuse(shard, as_problem(error))
            return ()
        return tasks

    def finish(self, shard: Shard, results: Sequence[TaskResult], now: float) -> None:
        if any(r.state is None for r in results):
            self.refuse(shard, problem("non_finite", "the values hold NaN or infinity in float32; nothing was changed"))
            return
        for p, part, result in zip(self.partitions, self.event.parts, results, strict=True):
            assert result.state is not None
            state = p.assigned(part, result.state)
            if self.model.ready:
                shard.flip(p, state, now)
            else:
                p.state = state  # still version 0: the initial values are not complete yet
                p.lsn += 1
            if self.event.restore:
                shard.held_bytes -= p.drop_staged() + sum(h.data.nbytes for h in p.take_buffered())
            if p.level:
                arrays = (part.data, *(part.slots or ()))
                shard.durability.executed(p, "set", set_head(part, p.version, self.event.restore), arrays)
        parts = tuple(p.stand() for p in self.partitions)
        done = PushDone(
            self.model.key,
            self.model.timeline,
            "applied",
            False,
            min(p.version for p in parts),
            min(p.durable_version for p in parts),
            max(p.incarnation for p in parts),
            parts,
        )
        shard.durability.acknowledge(self.event.request, done, self.partitions, self.partitions[0].level, now)

    def refuse(self, shard: Shard, error: PsError) -> None:
        shard.reply(self.event.request, error)


@dataclass(slots=True, eq=False)
class CommitOperation(Operation):
    """One decided clock of a synchronous model, on one partition: version + 1 whatever it touches, or its clock."""

    commit: CommitDecided = field(kw_only=True)
    _step: Step | None = None
    """The numbers of the step that is computed."""

    def start(self, shard: Shard, now: float) -> Sequence[Task]:
        (p,) = self.partitions
        settings = self.model.spec_of(self.commit.revision)
        if self.commit.timeline != self.model.timeline or self.commit.t != p.clock or settings is None:
            p.committing = False
            shard.committed(self.model, p, now)
            return ()
        revision, spec = settings
        if spec.consistency.mode == "sync":
            changed, fresh = revision != p.revision, p.adopt(spec, revision, self.commit.live_workers)
            if changed:
                configured(shard, p, now, fresh=fresh)
        parts = p.weighted(p.listed(self.commit.contributions))
        divisor = sum(c.weight for c in self.commit.contributions)
        if parts and divisor > 0.0:
            self._step = (p.rate(), [weight for _, weight in parts])
            return [mean_task(p.basis(), parts, divisor, self._step[0])]
        assert p.state is not None
        self._finish(shard, p.state, now)
        return ()

    def finish(self, shard: Shard, results: Sequence[TaskResult], now: float) -> None:
        (p,) = self.partitions
        assert p.state is not None
        if results[0].state is None:
            shard.not_finite += 1
            self._step = None
        self._finish(shard, results[0].state or p.state, now)

    def _finish(self, shard: Shard, state: PartitionState, now: float) -> None:
        (p,) = self.partitions
        p.committing = False
        shard.held_bytes -= p.settle(self.commit.contributions, self.commit.t)
        p.clock = self.commit.t + 1
        p.version = max(p.version, self.commit.t)  # so that the version is the clock from here on (semantics 5)
        shard.flip(p, state, now)
        if p.level:
            shard.durability.executed(p, "commit", commit_head(self.commit, p.version, self._step))
        if self.commit.cut or (p.by_cuts and p.clock == self.model.cut_asked):
            shard.cut(p)
        shard.committed(self.model, p, now)


@dataclass(slots=True, eq=False)
class FlushOperation(Operation):
    """The mean of what one partition has buffered is applied, in order of arrival."""

    early: bool = False
    """Whether it is applied though it is neither full nor old enough."""
    _step: Step | None = None

    def start(self, shard: Shard, now: float) -> Sequence[Task]:
        (p,) = self.partitions
        rule = p.spec.consistency
        full = rule.mode != "buffered" or len(p.buffered) >= rule.count or self.early
        if not p.buffered or not (full or (p.flush_at is not None and now >= p.flush_at)):
            return ()
        parts = p.weighted(p.buffered)
        self._step = (p.rate(), [weight for _, weight in parts])
        return [mean_task(p.basis(), parts, float(len(parts)), self._step[0])]

    def finish(self, shard: Shard, results: Sequence[TaskResult], now: float) -> None:
        (p,) = self.partitions
        shard.held_bytes -= sum(h.data.nbytes for h in p.take_buffered())
        if results[0].state is None:
            shard.not_finite += 1
            p.lsn += 1
            self._step = None
        else:
            shard.flip(p, results[0].state, now)
        if p.level:
            shard.durability.executed(p, "flush", flush_head(p.version, self._step))
            shard.remembers(p, now)


@dataclass(slots=True, eq=False)
class SettingsOperation(Operation):
    """Other settings for one partition: leaving `buffered` flushes, leaving `sync` drops the open clock."""

    spec: ModelSpec = field(kw_only=True)
    revision: int = 0
    live_workers: int = 0
    clock: int = 0
    """The clock a synchronous phase begins with."""

    def start(self, shard: Shard, now: float) -> Sequence[Task]:
        (p,) = self.partitions
        old, new = p.spec.consistency, self.spec.consistency
        if self.revision <= p.revision or old.mode == new.mode == "sync":
            return ()  # within sync a commit says from when on they are in force
        if old.mode == "sync" and p.clock in self.model.commits and p.clock < self.clock:
            # Commits decided before the change come first.
            shard.precede(p, self._again())
            p.committing = True
            shard.precede(p, CommitOperation(self.model, [p], commit=self.model.commits[p.clock]))
            return ()
        full = new.mode != "buffered" or len(p.buffered) >= new.count
        if p.buffered and full:
            shard.precede(p, self._again())
            shard.precede(p, FlushOperation(self.model, [p], early=True))
            return ()
        leaves, enters = (x.mode == "sync" and y.mode != "sync" for x, y in ((old, new), (new, old)))
        if leaves:
            shard.held_bytes -= p.drop_staged()
        fresh = p.adopt(self.spec, self.revision, self.live_workers)
        if enters:
            p.clock = self.clock
        configured(shard, p, now, fresh=fresh, unstage=leaves)
        if enters:
            shard.cut(p)
            shard.committed(self.model, p, now)
        if p.buffered:
            p.flush_at = now + new.interval_ms / 1000.0
            shard.flush_by(p, p.flush_at, now)
        shard.settings_changed(p, now)
        return ()

    def _again(self) -> "SettingsOperation":
        return SettingsOperation(
            self.model,
            self.partitions,
            spec=self.spec,
            revision=self.revision,
            live_workers=self.live_workers,
            clock=self.clock,
        )


def configured(shard: Shard, p: Partition, now: float, *, fresh: bool, unstage: bool = False) -> None:
    """The partition has other settings in force."""
    p.lsn += 1
    if p.level:
        head = config_head(p.settings(), p.version, p.clock, fresh=fresh, unstage=unstage)
        shard.durability.executed(p, "config", head)
        shard.remembers(p, now)
