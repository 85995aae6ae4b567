"""Values that answers by frame keep in memory until they are sent, and the bound on those that nobody else needs.

Such an answer, unless it is small and copied, refers to the versions of partitions that it began with.  While these are
present it takes no memory of its own.  Once pushes have replaced them, each version is kept by the last answer that has
some of it: for most of a minute if its client does not read (see `middleware`).  A copy, as of many ranges, is kept by
its answer alone, and counts from the beginning.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from paramserver.core.partition_state import PartitionState
from paramserver.errors import problem
from paramserver.types import F32, ModelKey
from paramserver_shard.buffers import SMALL_BYTES
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
        self.answers: dict[str, int] = {}  # not a Counter: there may be a thousand of these in an answer
        """How many answers have it, by client."""
        self.superseded_bytes = 0
        """Its size, once it has no present values."""


class UnsentValues:
    """The values in the answers of one shard that are being sent.  Used only by the event loop's thread."""

    def __init__(self, present: Present, memory_bytes: int) -> None:
        """`memory_bytes` is the memory limit of the process."""
        self._present = present
        self.superseded_bytes_max: Final = memory_bytes // MEMORY_SHARE
        self.client_bytes_max: Final = self.superseded_bytes_max // 2
        """How much of it one client's answers may keep."""
        self.superseded_bytes = 0
        """Memory of superseded versions and of copies; what several answers have counts once."""
        self._of_client: Counter[str] = Counter()
        """The same for each client that has some."""
        self._held: dict[int, _Held] = {}
        """By `id` of the memory."""

    def check(self, client: str, body_bytes: int) -> None:
        """Check whether this client (an address) may be sent an answer of that size; a small one always may be.

        Raises Unavailable: `too_many_requests` while its own answers keep too much memory, `queue_full` while all do.
        """
        if body_bytes < SMALL_BYTES:
            return
        for code, whose, held, most in (
            ("too_many_requests", "this client's answers", self._of_client[client], self.client_bytes_max),
            ("queue_full", "answers", self.superseded_bytes, self.superseded_bytes_max),
        ):
            if held > most:
                detail = f"{whose} that are still to be read hold {held} bytes of replaced values; the limit is {most}"
                raise problem(code, detail)

    @contextmanager
    def holding(self, client: str, answer: FrameBody) -> Iterator[None]:
        """Count the values of an answer that is being sent to this client."""
        parts = [part for part in answer.parts if part.pieces and not part.collected]
        held = [self._hold(part.pieces[0], client) for part in parts]
        versions = [(part.partition, part.version) for part in parts]
        present: Sequence[F32 | None] | None = self._present(answer.model, versions)
        if present is None:  # some were replaced while others' parts of the answer were awaited
            present = [(self._present(answer.model, [one]) or (None,))[0] for one in versions]
        for values, one in zip(present, held, strict=True):
            if values is None or _memory_of(values) is not one.memory:
                self._count(one)
        try:
            yield
        finally:
            for one in held:
                self._release(one, client)

    def superseded(self, states: Iterable[PartitionState]) -> None:
        """Count these states, which pulls return no more, if answers have them."""
        if self._held:
            for state in states:
                if (one := self._held.get(id(_memory_of(state.values)))) is not None:
                    self._count(one)

    def _hold(self, values: F32, client: str) -> _Held:
        memory = _memory_of(values)
        one = self._held.get(id(memory))
        if one is None:
            one = self._held[id(memory)] = _Held(memory)
        before = one.answers.get(client, 0)
        if one.superseded_bytes and not before:
            self._of_client[client] += one.superseded_bytes
        one.answers[client] = before + 1
        return one

    def _count(self, one: _Held) -> None:
        if not one.superseded_bytes:
            one.superseded_bytes = memoryview(one.memory).nbytes
            self.superseded_bytes += one.superseded_bytes
            for client in one.answers:
                self._of_client[client] += one.superseded_bytes

    def _release(self, one: _Held, client: str) -> None:
        if one.answers[client] > 1:
            one.answers[client] -= 1
            return
        del one.answers[client]
        if one.superseded_bytes:
            self._of_client[client] -= one.superseded_bytes
            if not self._of_client[client]:
                del self._of_client[client]
        if not one.answers:
            del self._held[id(one.memory)]
            self.superseded_bytes -= one.superseded_bytes


def _memory_of(values: F32) -> Any:
    """Return the object whose memory an array is in; views of one array have the same."""
    return values if values.base is None else values.base
