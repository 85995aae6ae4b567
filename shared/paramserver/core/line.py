"""The lines in which operations wait for partitions: in order of arrival in each, all partitions or none."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from paramserver.core.operation import Operation, Shard
from paramserver.core.partition import Partition
from paramserver.core.shard_io import Applied, Apply, Task, TaskResult


class Lines:
    """Who is next.  An operation is put into the lines of all its partitions at once, so no two wait for each other."""

    def __init__(self) -> None:
        self._candidates: deque[Operation] = deque()
        self._jobs: dict[int, list[tuple[Operation, int]]] = {}
        """What is being computed: operations, each with how many tasks it has."""
        self._last_job = 0

    def add(self, operation: Operation) -> None:
        """Put it at the end of the line of each of its partitions."""
        for partition in operation.partitions:
            partition.operations.append(operation)
        self._candidates.append(operation)

    def precede(self, partition: Partition, operation: Operation) -> None:
        """Put an operation of that one partition right behind the one that is first now."""
        partition.operations.insert(1, operation)

    def start(self, shard: Shard, now: float) -> Apply | None:
        """Start all that can start; what is to be computed for them, if anything."""
        started: list[tuple[Operation, int]] = []
        due: list[Task] = []
        while (operation := self._next()) is not None:
            tasks = operation.start(shard, now)
            if tasks:
                operation.running = True
                started.append((operation, len(tasks)))
                due += tasks
            else:
                self.release(operation)
        if not started:
            return None
        self._last_job += 1
        self._jobs[self._last_job] = started
        return Apply(self._last_job, tuple(due))

    def computed(self, done: Applied) -> Iterator[tuple[Operation, Sequence[TaskResult]]]:
        """The operations of a job, each with the results of its tasks; to be finished and released one by one."""
        results = iter(done.results)
        for operation, count in self._jobs.pop(done.job):
            yield operation, tuple(islice(results, count))

    def _next(self) -> Operation | None:
        """An operation that is first in all its lines and not running."""
        while self._candidates:
            operation = self._candidates.popleft()
            if operation.running or operation.over:
                continue
            if all([p.operations and p.operations[0] is operation for p in operation.partitions]):
                return operation
        return None

    def release(self, operation: Operation) -> None:
        """It is over: those behind it move up."""
        operation.over = True
        for partition in operation.partitions:
            if partition.operations and partition.operations[0] is operation:
                partition.operations.popleft()
                if partition.operations:
                    self._candidates.append(partition.operations[0])

    def withdraw(self, partition: Partition) -> list[Operation]:
        """Take what is not running out of the line of a partition, and out of every other line it stands in."""
        waiting = [op for op in partition.operations if not op.running]
        for operation in waiting:
            for other in operation.partitions:
                if operation in other.operations:
                    other.operations.remove(operation)
                    if other.operations:
                        self._candidates.append(other.operations[0])
        return waiting
