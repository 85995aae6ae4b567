"""Values that answers by frame keep in memory until they are sent, and the bound on those that nobody else needs.

Such an answer, unless it is small and copied, refers to the versions of partitions that it began with.  While these are
present it takes no memory of its own.  Once pushes have replaced them, each version is kept by the last answer that has
some of it: for most of a minute if its client does not read (see `middleware`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from paramserver.core.partition_state import PartitionState
from paramserver.errors import problem
from paramserver.types import F32, ModelKey
from paramserver_shard.frames import FrameBody

MEMORY_SHARE: Final = 2
"""Answers are refused from when superseded values take one part in this many of the process's memory."""
Present: TypeAlias = Callable[[ModelKey, Sequence[tuple[int, int]]], Sequence[F32] | None]
"""See `ShardCore.present`."""


class _Held:
    """One piece of memory that answers refer to."""

    __slots__ = ("answers", "memory", "superseded_bytes")

    def __init__(self, memory: Any) -> None:
        self.memory: Final = memory
        self.answers = 0
        self.superseded_bytes = 0
        """Its size, once its values are no longer present."""


class UnsentValues:
    """The values in the answers of one shard that are being sent.  Used only by the event loop's thread."""

    def __init__(self, present: Present, memory_bytes: int) -> None:
        """`memory_bytes` is the memory limit of the process."""
        self._present = present
        self.superseded_bytes_max: Final = memory_bytes // MEMORY_SHARE
        self.superseded_bytes = 0
        """Memory of superseded versions; what several answers have counts once."""
        self._held: dict[int, _Held] = {}
        """By `id` of the memory."""

    def check(self) -> None:
        """Raise Unavailable (`queue_full`) while superseded values take too much memory."""
        if self.superseded_bytes > self.superseded_bytes_max:
            held, most = self.superseded_bytes, self.superseded_bytes_max
            detail = f"answers that are still to be read hold {held} bytes of replaced values; the limit is {most}"
            raise problem("queue_full", detail)

    @contextmanager
    def holding(self, answer: FrameBody) -> Iterator[None]:
        """Count the values of an answer that is being sent."""
        parts = [part for part in answer.parts if part.pieces]
        held = [self._hold(part.pieces[0]) for part in parts]
        if parts and self._present(answer.model, [(p.partition, p.version) for p in parts]) is None:
            for part, one in zip(parts, held, strict=True):  # replaced while others' parts of the answer were awaited
                if self._present(answer.model, [(part.partition, part.version)]) is None:
                    self._count(one)
        try:
            yield
        finally:
            for one in held:
                self._release(one)

    def superseded(self, states: Iterable[PartitionState]) -> None:
        """Count these states, which pulls return no more, if answers have them."""
        if self._held:
            for state in states:
                if (one := self._held.get(id(_memory_of(state.values)))) is not None:
                    self._count(one)

    def _hold(self, values: F32) -> _Held:
        memory = _memory_of(values)
        one = self._held.get(id(memory))
        if one is None:
            one = self._held[id(memory)] = _Held(memory)
        one.answers += 1
        return one

    def _count(self, one: _Held) -> None:
        if not one.superseded_bytes:
            one.superseded_bytes = memoryview(one.memory).nbytes
            self.superseded_bytes += one.superseded_bytes

    def _release(self, one: _Held) -> None:
        one.answers -= 1
        if not one.answers:
            del self._held[id(one.memory)]
            self.superseded_bytes -= one.superseded_bytes


def _memory_of(values: F32) -> Any:
    """Return the object whose memory an array is in; views of one array have the same."""
    return values if values.base is None else values.base
