"""Handover of live partitions: moved whole to another shard, or kept under a renewed token (semantics 6)."""

from typing import TYPE_CHECKING

from msgspec.structs import replace

from paramserver.core.shard.effects import Report
from paramserver.core.shard.events import ModelView
from paramserver.core.shard.mean_operations import CommitOperation, FlushOperation
from paramserver.core.shard.operation import RequestOperation
from paramserver.core.shard.partition import Partition
from paramserver.core.shard.queues import OperationQueues
from paramserver.core.shard.served_model import ServedModel
from paramserver.types import PartitionKey, Token

if TYPE_CHECKING:
    from paramserver.core.shard.core import ShardCore


class Handover:
    """Suspends partitions that are to be released, one after the other, until their whole state is stored."""

    def __init__(self, shard: "ShardCore", queues: OperationQueues) -> None:
        self._shard = shard
        self._queues = queues
        self._asked: dict[Partition, int] = {}
        """Release requests of partitions that are served until those before them are stored."""
        self._storing: Partition | None = None
        """The partition that the others wait for."""
        self._unwritten: dict[Partition, None] = {}
        """Suspended partitions whose final state is still to be written."""

    def take_up(self, model: ServedModel, view: ModelView, index: int, token: Token, now: float) -> None:
        """Begin an ownership: with the state kept in memory if this renews a refused one, else by loading it.

        One that has ended here begins no more, as its source may be older than what this shard had; that is reported.
        """
        kept = model.refused.get(index)
        if kept is not None and token <= kept.token:
            return  # a stale document
        if kept is not None and kept.state is not None and view.kept_from.get(index, token) <= kept.token:
            model.partitions[index] = kept
            self._shard.held_bytes += kept.held_bytes
            self.renew(kept, token)
            kept.committing = _computes_mean(kept)
            self._shard.resume(model, kept, now)
            return
        p = Partition.of(PartitionKey(model.key, index), token, model.layout, model.spec, model.revision)
        p.source, model.partitions[index] = view.sources.get(index, view.source), p
        p.given_up = view.kept_from.get(index, token) <= model.given_up.get(index, 0)
        self._shard.perform(Report() if p.given_up else model.loading_of(p))

    def follow(self, model: ServedModel, partition: Partition, number: int, now: float) -> None:
        """Have the partition suspended if its release is requested under this number, or resume it (0: it is not)."""
        if partition.suspended and number != partition.release_number:
            self._call_off(model, partition, now)
        if not number:
            self._asked.pop(partition, None)
        elif not partition.suspended:
            self._asked[partition] = number

    def suspend_next(self) -> list[RequestOperation]:
        """Suspend the next partition if it is its turn; return the requests that were queued for it."""
        if not self._asked or self._storing is not None:
            return []
        partition = next(iter(self._asked))
        return self._suspend(partition, self._asked.pop(partition))

    def give_way(self, partition: Partition) -> None:
        """Let the others go on: this one is stored or gone, or storing it has failed and is tried again."""
        if self._storing is partition:
            self._storing = None

    def _suspend(self, partition: Partition, release_number: int) -> list[RequestOperation]:
        """Let the running operation finish and start no other."""
        partition.release_number = release_number
        self._storing = partition
        self._unwritten[partition] = None
        self._shard.plan.forget(partition)
        partition.committing = _computes_mean(partition)
        return self._queues.withdraw(partition)

    @property
    def waits(self) -> bool:
        """Whether a partition is to be suspended, or the state of one that is suspended is still to be written."""
        return bool(self._unwritten or self._asked)

    def write(self) -> None:
        """Schedule a snapshot of each suspended partition that has no operation left, so that its state is final."""
        for partition in list(self._unwritten):
            if partition.state is not None and not partition.operations:
                del self._unwritten[partition]
                self._shard.plan.urgent(partition)

    def stored(self, partition: Partition, lsn: int) -> bool:
        """Note that the state at that lsn is stored; return whether this released the partition."""
        if not partition.suspended or partition.released:
            return False
        if lsn == partition.lsn and partition not in self._unwritten:
            partition.released = True
            self._shard.supersede(partition)
            self.give_way(partition)
        else:
            self._unwritten[partition] = None
        return partition.released

    def _call_off(self, model: ServedModel, partition: Partition, now: float) -> None:
        """Resume a partition whose move was withdrawn."""
        partition.release_number, partition.released = 0, False
        self.forget(partition)
        if partition.state is None:
            return
        if partition.lsn > partition.mark.stored:
            self._shard.plan.changed(partition, now)
        if model.at_cut(partition):
            self._shard.plan.cut(partition)  # one that waited was dropped for the move
        self._shard.resume(model, partition, now)

    def forget(self, partition: Partition) -> None:
        """Stop tracking a partition: it is no longer owned, or no longer suspended."""
        self._asked.pop(partition, None)
        self._unwritten.pop(partition, None)
        self.give_way(partition)

    def renew(self, partition: Partition, token: Token) -> None:
        """Keep a partition in memory under a new token after Redis was emptied, and have all of it stored again."""
        self._shard.plan.forget(partition)
        partition.token = token
        partition.durable_version, partition.durable_clock, partition.cut_stored = 0, 0, None
        if partition.by_cuts and partition.cut is not None:
            self._shard.plan.store_cut(partition, replace(partition.cut, token=token))
        self._shard.durability.rebase(partition)


def _computes_mean(partition: Partition) -> bool:
    """Whether a commit or a flush is being computed; queued ones have been withdrawn."""
    return any(op.running and isinstance(op, CommitOperation | FlushOperation) for op in partition.operations)
