"""Assignment of values to partitions, once its turn has come."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paramserver.core.optimizer import slot_names
from paramserver.core.partition_state import held_bytes
from paramserver.core.shard.effects import AssignTask, PushDone, Task
from paramserver.core.shard.events import AssignPart, SetReceived, TaskResult
from paramserver.core.shard.journal import set_head
from paramserver.core.shard.operation import RequestOperation, record_settings_change
from paramserver.core.shard.partition import Partition
from paramserver.errors import PsError, as_problem, problem

if TYPE_CHECKING:
    from paramserver.core.shard.core import ShardCore


@dataclass(slots=True, eq=False)
class SetOperation(RequestOperation):
    """An assignment of values: `PUT params`, a restore, an upload."""

    event: SetReceived = field(kw_only=True)

    def start(self, shard: "ShardCore", now: float) -> Sequence[Task]:
        tasks: list[Task] = []
        try:
            self.model.check(self.event.generation, self.event.timeline)
            if self.event.first and self.model.ready:  # another attempt was faster; values may have been trained since
                shard.reply(self.event.request, PushDone(self.model.key, self.model.timeline, "applied", True, ()))
                return ()
            self._check_expected()
            level = self.partitions[0].level
            if level:
                shard.durability.admit(level, sum(held_bytes(part.ranges, part.data) for part in self.event.parts))
            pairs = list(zip(self.partitions, self.event.parts, strict=True))
            for p, part in pairs:
                self._check_slots(p, part)
            for p, part in pairs:
                if self._changes_settings(p):
                    fresh = p.adopt(self.model.spec, self.model.revision, self.model.live_workers)
                    record_settings_change(shard, p, now, fresh=fresh)
                assert p.state is not None
                tasks.append(AssignTask(p.key, p.state, part))
        except Exception as error:
            self.refuse(shard, as_problem(error))
            return ()
        return tasks

    def _changes_settings(self, p: Partition) -> bool:
        """Whether a restore brings settings into effect that wait for a commit: there is none before it has ended."""
        synchronous = self.model.sync and p.spec.consistency.mode == "sync"
        return self.event.restore and synchronous and p.revision < self.model.revision

    def _check_slots(self, p: Partition, part: AssignPart) -> None:
        """Raise `loading` if the part's optimizer state is not that of the optimizer in force from now on.

        Either this shard has not heard of a change of it yet, or the restore has not.
        """
        names = slot_names((self.model.spec if self._changes_settings(p) else p.spec).optimizer)
        same = self.event.slot_names in (None, names)
        if part.slots is not None and (not same or len(part.slots) != len(names)):
            raise problem("loading", "the model's optimizer is being changed")

    def _check_expected(self) -> None:
        pairs = zip(self.partitions, self.event.parts, strict=True)
        changed = [p.index for p, part in pairs if part.expected not in (None, (p.version, p.token))]
        if changed:
            raise precondition_failed(f"partitions {changed} have changed meanwhile")

    def finish(self, shard: "ShardCore", results: Sequence[TaskResult], now: float) -> None:
        if any(r.state is None for r in results):
            self.refuse(shard, problem("non_finite", "the values hold NaN or infinity in float32; nothing was changed"))
            return
        for p, part, result in zip(self.partitions, self.event.parts, results, strict=True):
            assert result.state is not None
            state = p.assigned(part, result.state)
            if self.model.ready:
                p.version = max(p.version, part.version - 1)
                shard.publish_version(p, state, now)
            else:
                p.state = state
                # Values that are not complete yet have no new version, unless pushes were applied to others before.
                p.version = p.version + 1 if p.version > part.version else part.version
                p.lsn += 1
            if self.event.restore:
                shard.held_bytes -= p.drop_unapplied()
            elif self.model.ready and (shard.plan.at_cut(p) or self.model.at_cut(p)):
                shard.plan.cut(p)  # else the cut of this clock would be of the values before
            if p.level:
                arrays = (part.data, *(part.slots or ()))
                shard.durability.executed(p, "set", set_head(part, p.version, self.event.restore), arrays)
        parts = tuple(p.part_version() for p in self.partitions)
        done = PushDone(self.model.key, self.model.timeline, "applied", False, parts)
        shard.durability.acknowledge(self.event.request, done, self.partitions, self.partitions[0].level, now)


def precondition_failed(detail: str) -> PsError:
    """The error for a conditional assignment whose expected value is not the current one."""
    return problem("precondition_failed", detail, hint="fetch the value and its ETag again")
