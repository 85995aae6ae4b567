"""The queues of operations, one per partition: FIFO, and an operation runs on all its partitions or on none."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from paramserver.core.shard.effects import Apply, Task
from paramserver.core.shard.events import Applied, TaskResult
from paramserver.core.shard.operation import Operation, RequestOperation
from paramserver.core.shard.partition import Partition

if TYPE_CHECKING:
    from paramserver.core.shard.core import ShardCore


class OperationQueues:
    """The queues of all partitions.  An operation enters all of its queues at once, so no two wait for each other."""

    def __init__(self) -> None:
        self._candidates: deque[Operation] = deque()
        self._jobs: dict[int, list[tuple[Operation, int]]] = {}
        """Jobs being computed: the operations of each, with their numbers of tasks."""
        self._last_job = 0

    def add(self, operation: Operation) -> None:
        """Append an operation to the queue of each of its partitions."""
        for partition in operation.partitions:
            partition.operations.append(operation)
        self._candidates.append(operation)

    def insert_next(self, partition: Partition, operation: Operation) -> None:
        """Insert an operation on this partition alone right behind the first one in its queue."""
        partition.operations.insert(1, operation)

    def start(self, shard: "ShardCore", now: float) -> Apply | None:
        """Start every operation that can start; return a job with their tasks, or None if they have none."""
        started: list[tuple[Operation, int]] = []
        due: list[Task] = []
        while True:
            while (operation := self._next()) is not None:
                tasks = operation.start(shard, now)
                if tasks or operation.running:
                    operation.running = True
                    started.append((operation, len(tasks)))
                    due += tasks
                else:
                    self.release(operation)
            if not started:
                return None
            if due:
                break
            for operation, _ in started:  # nothing is to be computed; what is behind them can start
                operation.finish(shard, (), now)
                self.release(operation)
            started.clear()
        self._last_job += 1
        self._jobs[self._last_job] = started
        return Apply(self._last_job, tuple(due))

    def computed(self, done: Applied) -> Iterator[tuple[Operation, Sequence[TaskResult]]]:
        """Yield a job's operations with their results; the caller finishes and releases each before the next."""
        results = iter(done.results)
        for operation, count in self._jobs.pop(done.job):
            yield operation, tuple(islice(results, count))

    def _next(self) -> Operation | None:
        """The next operation that is first in all its queues and not running."""
        while self._candidates:
            operation = self._candidates.popleft()
            if operation.running:
                continue
            if all([p.operations and p.operations[0] is operation for p in operation.partitions]):
                return operation
        return None

    def release(self, operation: Operation) -> None:
        """End an operation: those behind it move up."""
        for partition in operation.partitions:
            if partition.operations and partition.operations[0] is operation:
                partition.operations.popleft()
                if partition.operations:
                    self._candidates.append(partition.operations[0])

    def withdraw(self, partition: Partition) -> list[RequestOperation]:
        """Remove the operations of a partition that are not running, from all queues; return the requests' among them.

        The others are commits, flushes and changes of settings, which whoever serves the partition next will repeat.
        """
        waiting = [op for op in partition.operations if not op.running]
        for operation in waiting:
            for other in operation.partitions:
                if operation in other.operations:
                    other.operations.remove(operation)
                    if other.operations:
                        self._candidates.append(other.operations[0])
        return [op for op in waiting if isinstance(op, RequestOperation)]
