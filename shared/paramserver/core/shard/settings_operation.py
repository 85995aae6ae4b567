"""A change of settings, once its turn has come: one consistency mode is ended properly before the next begins."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msgspec import structs

from paramserver.core.shard.effects import Task
from paramserver.core.shard.mean_operations import CommitOperation, FlushOperation
from paramserver.core.shard.operation import Operation, record_settings_change
from paramserver.core.spec import ModelSpec

if TYPE_CHECKING:
    from paramserver.core.shard.core import ShardCore


@dataclass(slots=True, eq=False, kw_only=True)
class SettingsOperation(Operation):
    """A change of one partition's settings: leaving `buffered` or `sync` applies what waits."""

    spec: ModelSpec
    revision: int
    live_workers: int
    clock: int
    """Entering sync: the clock at which the phase begins.  Leaving it: commits before this clock are applied first."""

    def start(self, shard: "ShardCore", now: float) -> Sequence[Task]:
        (p,) = self.partitions
        old, new = p.spec.consistency, self.spec.consistency
        if self.revision <= p.revision or old.mode == new.mode == "sync":
            return ()  # within sync, settings take effect with the commit that names them
        if old.mode == "sync" and p.clock in self.model.commits and p.clock < self.clock:
            # Apply the commits decided before the change first.
            shard.run_next(p, replace(self))
            p.committing = True
            shard.run_next(p, CommitOperation(self.model, [p], commit=self.model.commits[p.clock]))
            return ()
        full = new.mode != "buffered" or old.mode == "sync" or len(p.buffered) >= new.count
        if p.unapplied and full:
            shard.run_next(p, replace(self))
            shard.run_next(p, FlushOperation(self.model, [p], early=True))
            return ()
        enters = new.mode == "sync"
        if enters:
            # The phase's first commit brings all else: the settings that it names may be older than those known here.
            fresh = p.adopt(structs.replace(p.spec, consistency=new), p.revision, self.live_workers)
            p.clock = self.clock
        else:
            fresh = p.adopt(self.spec, self.revision, self.live_workers)
        record_settings_change(shard, p, now, fresh=fresh)
        if enters:
            shard.plan.cut(p)
            shard.committed(self.model, p, now)
        if p.buffered:
            at = now + new.interval_ms / 1000.0  # sooner perhaps, and never later: settings may change again and again
            p.flush_at = at if p.flush_at is None else min(p.flush_at, at)
            shard.flush_by(p, p.flush_at, now)
        shard.settings_changed(p, now)
        return ()
