"""Commits of synchronous models: which one a partition takes next, and what none will list any more."""

from functools import partial
from typing import TYPE_CHECKING

from paramserver.core.shard.effects import Resync
from paramserver.core.shard.events import CommitDecided
from paramserver.core.shard.journal import drop_head
from paramserver.core.shard.mean_operations import CommitOperation
from paramserver.core.shard.operation import record_settings_change
from paramserver.core.shard.partition import Partition
from paramserver.core.shard.queues import OperationQueues
from paramserver.core.shard.served_model import ServedModel
from paramserver.core.shard.timers import Timers

if TYPE_CHECKING:
    from paramserver.core.shard.core import ShardCore

_RETRY_S = 1.0


class CommitDesk:
    """Brings the partitions of synchronous models from clock to clock."""

    def __init__(self, shard: "ShardCore", queues: OperationQueues, timers: Timers) -> None:
        self._shard = shard
        self._queues = queues
        self._timers = timers

    def decided(self, event: CommitDecided, now: float) -> None:
        model = self._shard.find_model(event.model)
        if model is None or event.commit.timeline != model.timeline:
            return
        if event.needs_report:
            model.needs_report_at = max(model.needs_report_at, event.commit.t)
        model.record_commit(event.commit)
        for p in model.partitions.values():
            self.advance(model, p, now)

    def advance(self, model: ServedModel, p: Partition, now: float) -> None:
        """Queue the partition's next commit if it is known; request a resync of the feed if it was missed."""
        if not p.ready or p.committing or p.spec.consistency.mode != "sync" or not model.sync:
            return
        if p.clock < model.view.began:
            # It is still on an older timeline: the commits it lacks and the gradients it has staged no longer count.
            self._shard.held_bytes -= p.drop_staged()
            p.clock = model.view.began
            record_settings_change(self._shard, p, now, fresh=False, unstage=True)
        commit = model.commits.get(p.clock)
        if commit is not None:
            p.committing = True
            self._queues.add(CommitOperation(model, [p], commit=commit))
        elif model.clock > p.clock and now >= model.resync_at:
            model.resync_at = now + _RETRY_S
            self._shard.perform(Resync())
            self._timers.at(model.resync_at, partial(self._retry, model, p))

    def _retry(self, model: ServedModel, p: Partition, now: float) -> None:
        if self._shard.has(model, p):
            self.advance(model, p, now)

    def drop_ended(self, model: ServedModel, p: Partition) -> None:
        """Drop what workers staged under epochs that have ended, once no commit can list it."""
        # A commit that is already decided may still list them, even one not received yet.
        if not p.staged or p.clock < model.clock or p.committing or p.suspended:
            return
        if model.sync:
            slots = p.ended(model.workers, model.departed)
        else:  # the mean of what is staged is still to come
            slots = [k for k in p.staged if k[:2] in model.departed]
        if slots:
            self._shard.held_bytes -= p.drop(slots)
            p.lsn += 1
            if p.level:
                self._shard.durability.executed(p, "drop", drop_head(slots, p.version))
