"""The memory of accepted pushes: windows of push ids and idempotency keys."""

import random
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver import limits
from paramserver.core.shard.window import EarlierAnswer, PushMemory
from paramserver.core.spec import ModelSpec
from paramserver.errors import FencedError, PsError
from paramserver.testing.shard_driver import ShardDriver
from paramserver.types import PushId


def accept(memory: PushMemory, seq: int, epoch: int = 1, crc: int = 7) -> EarlierAnswer | None:
    push_id = PushId("w", epoch, seq)
    seen = memory.check(push_id, None, crc)
    if seen is None:
        memory.record(push_id, None, crc, seq)
    return seen


def code(call: PsError) -> str:
    return call.code


@given(st.lists(st.integers(0, 400), max_size=300))
def test_a_window_agrees_with_a_set_of_all_seqs_ever_seen(seqs: list[int]) -> None:
    """Within the window a seq is new exactly once; below it every seq is refused with `outside_window`."""
    memory, seen, highest = PushMemory(), set[int](), -1
    for seq in seqs:
        if seq <= highest - limits.WINDOW:
            with pytest.raises(PsError) as caught:
                accept(memory, seq)
            assert code(caught.value) == "outside_window"
            continue
        answer = accept(memory, seq)
        assert answer == (EarlierAnswer(seq, False) if seq in seen else None)
        seen.add(seq)
        highest = max(highest, seq)
    assert PushMemory.restore(memory.export()).export() == memory.export()


def test_a_hundred_thousand_duplicates_in_random_order_are_all_told() -> None:
    """Each of 100,000 deliveries is recognized as new or duplicate while 64 seqs are in doubt."""
    rng, memory, accepted, low = random.Random(5), PushMemory(), set[int](), 0
    for _ in range(100_000):
        seq = low + rng.randrange(limits.WINDOW)
        assert (accept(memory, seq) is None) == (seq not in accepted)
        accepted.add(seq)
        while low in accepted and max(accepted) - low >= limits.WINDOW - 1:
            accepted.discard(low)
            low += 1
    assert low > limits.WINDOW


def test_the_same_id_with_other_content_is_refused() -> None:
    """A push id that comes again with another checksum is refused with `id_reused`."""
    memory = PushMemory()
    accept(memory, 3, crc=1)

    with pytest.raises(PsError) as caught:
        accept(memory, 3, crc=2)

    assert code(caught.value) == "id_reused"
    assert accept(memory, 3, crc=1) == EarlierAnswer(3, False)


def test_an_epoch_fences_all_lower_ones() -> None:
    """A higher epoch starts a fresh window, and pushes of a lower one are refused."""
    memory = PushMemory()
    accept(memory, 500, epoch=1)

    assert accept(memory, 0, epoch=2) is None
    with pytest.raises(FencedError) as caught:
        accept(memory, 501, epoch=1)

    assert caught.value.members == {"epoch": 2}


def test_a_late_push_is_remembered_as_late() -> None:
    """A duplicate of a late push, which was discarded, is marked late, also after a restore."""
    memory = PushMemory()
    memory.record(PushId("w", 1, 0), None, 7, 0, late=True)

    again = PushMemory.restore(memory.export())

    assert again.check(PushId("w", 1, 0), None, 7) == EarlierAnswer(0, True)


def test_what_is_discarded_is_late_from_then_on_and_nothing_else_is() -> None:
    """A push that is discarded, once or more often, is late; what was not remembered takes no other push's place."""
    memory = PushMemory()
    accept(memory, 0)
    for other in (PushId("w", 1, 4), PushId("w", 2, 0), PushId("v", 1, 0)):
        memory.discard(other)
    assert memory.check(PushId("w", 1, 0), None, 7) == EarlierAnswer(0, False)

    for _ in range(2):
        memory.discard(PushId("w", 1, 0))
        assert memory.check(PushId("w", 1, 0), None, 7) == EarlierAnswer(0, True)


def test_idempotency_keys_are_forgotten_in_order_of_arrival() -> None:
    """IDEMPOTENCY_KEYS_MAX keys are remembered, and the oldest is forgotten first."""
    memory = PushMemory()
    for i in range(limits.IDEMPOTENCY_KEYS_MAX + 1):
        memory.record(None, f"key {i}", i, i + 1)

    assert memory.check(None, "key 0", 0) is None
    assert memory.check(None, "key 1", 1) == EarlierAnswer(2, False)
    with pytest.raises(PsError) as caught:
        memory.check(None, "key 1", 99)

    assert code(caught.value) == "id_reused"


def test_windows_start_small_and_are_bounded() -> None:
    """A window grows from 4 seqs to at most 64, and the least recent worker is forgotten first."""
    memory = PushMemory()
    accept(memory, 0)
    assert len(memory._plain["w"]._seqs) == 4
    for seq in range(1000):
        accept(memory, seq + 1)
    assert len(memory._plain["w"]._seqs) == 64

    for i in range(limits.WORKERS_PER_MODEL_MAX):
        memory.record(PushId(f"other {i}", 1, 0), None, 7, 0)

    assert memory.epoch("w") is None
    assert memory.epoch("other 0") == 1


def test_names_that_anybody_makes_up_push_out_no_joined_worker() -> None:
    """Worker ids made up by clients push out no joined worker, and a snapshot keeps both in their order."""
    memory = PushMemory()
    memory.record(PushId("run/w", 3, 0), None, 7, 1)
    for i in range(limits.WORKERS_PER_MODEL_MAX + 1):
        memory.record(PushId(f"other {i}", 1, 0), None, 7, 0)
    after = PushMemory.restore(memory.export())

    for known in (memory, after):
        assert (known.epoch("run/w"), known.epoch("other 0"), known.epoch("other 1")) == (3, None, 1)
        assert known.check(PushId("run/w", 3, 0), None, 7) == EarlierAnswer(1, False)
    assert after.export() == memory.export()


def test_a_snapshot_makes_anew_only_the_windows_that_have_changed() -> None:
    """The windows of workers that have left cost a snapshot nothing but their place in it, also after a restore."""
    memory = PushMemory()
    for i in range(5):
        memory.record(PushId(f"run/w{i}", 1, 0), None, 7, 1)
    for known in (memory, PushMemory.restore(memory.export())):
        before = {row[0]: row for row in known.export()["windows"]}
        known.record(PushId("run/w1", 1, 1), None, 8, 2)
        known.record(PushId("run/w2", 2, 0), None, 9, 2)
        known.discard(PushId("run/w3", 1, 0))
        after = {row[0]: row for row in known.export()["windows"]}
        assert [after[name] is row for name, row in before.items()] == [True, False, False, False, True]
        again = PushMemory.restore(msgpack.unpackb(msgpack.packb(known.export())))
        assert again.check(PushId("run/w1", 1, 1), None, 8) == EarlierAnswer(2, False)
        assert again.check(PushId("run/w3", 1, 0), None, 7) == EarlierAnswer(1, True)
        assert again.epoch("run/w2") == 2


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("consistency", [{"mode": "async"}, {"mode": "sync"}, {"mode": "buffered", "count": 3}])
def test_content_counts_whenever_it_is_looked_at(consistency: dict[str, Any], index: int) -> None:
    """An id with other content and NaN are refused in every mode, whether the part was checked on arrival or not."""
    driver = ShardDriver()
    shape = {"name": "m", "params": {"w": {"shape": [8]}}, "optimizer": {"name": "sum"}, "partitions": 2}
    driver.serve(ModelSpec.parse(shape | {"consistency": consistency}), workers={"r/w": 1})
    gradient, ident = np.ones(4, np.float32), PushId("r/w", 1, 0)

    done = driver.push({index: gradient}, ident, clock=0)
    again = driver.push({index: gradient.copy()}, ident, clock=0)
    other = driver.replies[driver.submit({index: 2 * gradient}, ident, clock=0)]
    bad = driver.replies[driver.submit({index: np.full(4, np.nan, np.float32)}, PushId("r/w", 1, 1), clock=0)]

    assert (done.duplicate, again.duplicate) == (False, True)
    assert (again.version, again.state) == (done.version, done.state)
    assert isinstance(other, PsError)
    assert other.code == "id_reused"
    assert isinstance(bad, PsError)
    assert bad.code == "non_finite"
    assert f"partition {index} " in bad.detail
