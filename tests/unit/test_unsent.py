"""Values that answers in flight keep: counted once pushes have replaced them, until the last such answer is sent."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
from tests.refusals import refused_with

from paramserver.core.partition_state import PartitionState
from paramserver.errors import Unavailable
from paramserver.types import F32, ModelKey
from paramserver_shard.buffers import SMALL_BYTES, BufferPool
from paramserver_shard.exchange import GotPart, slices
from paramserver_shard.frames import FrameBody
from paramserver_shard.unsent import UnsentValues

KEY = ModelKey("m", 1)
COUNT = 1 << 16
SIZE = 4 * COUNT


class Shard:
    """A shard with two partitions, whose values are replaced."""

    def __init__(self, size_bytes: int = SIZE, memory_bytes: int = 0) -> None:
        self.pool = BufferPool()
        self.count = size_bytes // 4
        self.version = 1
        self.values = [self.pool.take(self.count) for _ in range(2)]
        self.unsent = UnsentValues(self.present, memory_bytes or 4 * size_bytes)

    def present(self, key: ModelKey, parts: Any) -> list[F32] | None:
        """Return present values, as the core does."""
        return [self.values[i] for i, _ in parts] if all(version == self.version for _, version in parts) else None

    def push(self) -> None:
        """Replace all values."""
        states = [PartitionState(values, (), (1,)) for values in self.values]
        self.values = [self.pool.take(self.count) for _ in range(2)]
        self.version += 1
        self.unsent.superseded(states)

    def pulled(self, ranges: Any = None) -> FrameBody:
        """Return the answer to a pull of both partitions."""
        parts = [GotPart(i, self.version, 1, 0, slices(values, ranges)) for i, values in enumerate(self.values)]
        return FrameBody(SimpleNamespace(key=KEY), "float32", 0, parts)  # type: ignore[arg-type]


def test_present_values_count_nothing_and_replaced_ones_once() -> None:
    """However many answers have a version, it counts once, from when it is replaced until the last one is sent."""
    shard = Shard()
    with ExitStack() as last:
        with ExitStack() as first:
            for stack in (first, first, last):
                stack.enter_context(shard.unsent.holding("a", shard.pulled()))
            assert shard.unsent.superseded_bytes == 0
            for _ in range(3):
                shard.push()
            assert 2 * SIZE <= shard.unsent.superseded_bytes == shard.pool.lent_bytes - 2 * SIZE
        assert shard.unsent.superseded_bytes >= 2 * SIZE
    assert shard.unsent.superseded_bytes == 0
    assert not shard.unsent._held


def test_beyond_the_bound_answers_are_refused_until_some_are_sent() -> None:
    """Once unsent answers keep half of memory in replaced values, no large one is sent until some have been."""
    shard = Shard()
    with ExitStack() as stack:
        for client in ("a", "b"):
            shard.unsent.check("c", SIZE)
            stack.enter_context(shard.unsent.holding(client, shard.pulled()))
            shard.push()
        with refused_with("queue_full", Unavailable, "still to be read"):
            shard.unsent.check("c", SIZE)
        shard.unsent.check("c", SMALL_BYTES - 1)
    shard.unsent.check("c", SIZE)


def test_a_client_that_keeps_half_of_that_stops_only_itself() -> None:
    """What one client does not read is refused to it at half of the bound, while others are sent theirs."""
    shard = Shard(memory_bytes=16 * SIZE)
    with ExitStack() as stack:
        for _ in range(2):
            shard.unsent.check("a", SIZE)
            stack.enter_context(shard.unsent.holding("a", shard.pulled()))
            with shard.unsent.holding("b", shard.pulled()):  # counts for both, until one has read it
                shard.push()
        stack.enter_context(shard.unsent.holding("a", shard.pulled(np.array([(5, 6)]))))
        shard.push()
        with refused_with("too_many_requests", Unavailable, "this client's answers"):
            shard.unsent.check("a", SIZE)
        shard.unsent.check("b", SIZE)
    shard.unsent.check("a", SIZE)
    assert not shard.unsent._of_client


def test_a_copy_of_ranges_counts_from_the_beginning() -> None:
    """An answer of several ranges that are copied keeps its copy, whichever values are present."""
    shard = Shard()
    with shard.unsent.holding("a", shard.pulled(np.array([(0, 2), (3, COUNT)]))):
        assert shard.unsent.superseded_bytes == 2 * (SIZE - 4)
        shard.push()
        assert shard.unsent.superseded_bytes == 2 * (SIZE - 4)
    assert shard.unsent.superseded_bytes == 0


def test_what_other_shards_sent_does_not_count_twice() -> None:
    """Values that were collected from another shard are in flight, and are no values that this one has replaced."""
    shard = Shard()
    part = GotPart(0, 9, 1, 0, (np.zeros(COUNT, np.float32),), collected=True)
    with shard.unsent.holding("a", FrameBody(SimpleNamespace(key=KEY), "float32", 0, [part])):  # type: ignore[arg-type]
        assert shard.unsent.superseded_bytes == 0


def test_an_answer_of_a_range_keeps_all_of_its_version() -> None:
    """A range counts as the memory that it keeps from being reused; small partitions, which no pool has, count too."""
    for size_bytes in (SIZE, SMALL_BYTES // 2):
        shard = Shard(size_bytes)
        with shard.unsent.holding("a", shard.pulled(np.array([(5, 6)]))):
            shard.push()
            assert shard.unsent.superseded_bytes >= 2 * size_bytes


def test_what_was_replaced_before_it_is_sent_counts_at_once() -> None:
    """Values that were replaced while the answer waited for those of another shard count as soon as it is sent."""
    shard = Shard()
    answer = shard.pulled()
    shard.push()
    with shard.unsent.holding("a", answer):
        assert shard.unsent.superseded_bytes >= 2 * SIZE
    assert shard.unsent.superseded_bytes == 0


def test_a_small_answer_is_taken_whole_and_keeps_no_version() -> None:
    """The frame of an answer that was taken is that of one in chunks, and the values that it began with are free."""
    shard, ranges = Shard(), np.array([(5, 6)])
    answer = shard.pulled(ranges)
    wanted = b"".join(answer.chunks(answer.header()))
    assert answer.take() == wanted
    assert (len(wanted) > 8, answer.values_bytes) == (True, 8)
    shard.push()
    assert shard.pool.lent_bytes == 2 * SIZE
