"""Operations that apply staged or buffered gradients as one mean: a commit of the scheduler, or a flush."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paramserver.core.commit import Commit
from paramserver.core.shard.effects import Task, ValuesKept
from paramserver.core.shard.events import TaskResult
from paramserver.core.shard.journal import Step, commit_head, flush_head
from paramserver.core.shard.operation import Operation, record_settings_change
from paramserver.core.shard.update import mean_task

if TYPE_CHECKING:
    from paramserver.core.shard.core import ShardCore


@dataclass(slots=True, eq=False)
class CommitOperation(Operation):
    """One committed clock of a sync model on one partition; raises the version by one, at least to the new clock."""

    commit: Commit = field(kw_only=True)
    _step: Step | None = None
    """Numbers of the step being computed, for the journal."""

    def start(self, shard: "ShardCore", now: float) -> Sequence[Task]:
        (p,) = self.partitions
        if self.commit.timeline != self.model.timeline or self.commit.t != p.clock:
            p.committing = False
            shard.committed(self.model, p, now)
            return ()
        revision, spec = self.model.settings_of(self.commit, p)
        if spec.consistency.mode == "sync":
            changed, fresh = revision != p.revision, p.adopt(spec, revision, self.commit.live_workers)
            if changed:
                record_settings_change(shard, p, now, fresh=fresh)
        parts = p.weighted(p.listed(self.commit.contributions))
        if parts:
            self._step = (p.rate(), [weight for _, weight in parts])
            return [mean_task(p.update_input(), parts, len(self.commit.contributions), self._step[0])]
        self.running = True  # until the other partitions are computed: else the next commit could be seen here first
        return ()

    def finish(self, shard: "ShardCore", results: Sequence[TaskResult], now: float) -> None:
        (p,) = self.partitions
        assert p.state is not None
        state = results[0].state if results else p.state
        if state is None:
            shard.perform(ValuesKept(p.key))
            state, self._step = p.state, None
        p.committing = False
        shard.held_bytes -= p.end_clock(self.commit.contributions, self.commit.t)
        shard.publish_version(p, state, now)
        if p.level:
            shard.durability.executed(p, "commit", commit_head(self.commit, p.version, self._step))
        if self.commit.cut or self.model.asks_cut(p):
            shard.plan.cut(p, urgent=self.model.view.cut_urgent)
        shard.committed(self.model, p, now)


@dataclass(slots=True, eq=False)
class FlushOperation(Operation):
    """Application of the mean of what one partition has buffered, or staged for clocks that will never be committed."""

    early: bool = False
    """Whether to apply the buffer even if it is neither full nor due."""
    _step: Step | None = None

    def start(self, shard: "ShardCore", now: float) -> Sequence[Task]:
        (p,) = self.partitions
        rule = p.spec.consistency
        # The flush of a buffer may start when pushes after it are staged already: these wait for their commits.
        full = rule.mode not in ("buffered", "sync") or len(p.buffered) >= rule.count or self.early
        held = p.unapplied
        if not held or not (full or (p.flush_at is not None and now >= p.flush_at)):
            return ()
        parts = p.weighted(held)
        self._step = (p.rate(), [weight for _, weight in parts])
        p.committing = True
        return [mean_task(p.update_input(), parts, p.contributions, self._step[0])]

    def finish(self, shard: "ShardCore", results: Sequence[TaskResult], now: float) -> None:
        (p,) = self.partitions
        p.committing = False
        shard.held_bytes -= p.drop_unapplied()
        if results[0].state is None:
            shard.perform(ValuesKept(p.key))
            p.lsn += 1
            self._step = None
        else:
            shard.publish_version(p, results[0].state, now)
        if p.level:
            shard.durability.executed(p, "flush", flush_head(p.version, self._step))
            shard.plan.changed(p, now)
