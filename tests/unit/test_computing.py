"""Computing updates: reuse of buffers, the check of gradients, and the parameters of steps."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from paramserver.core.layout import Layout
from paramserver.core.optimizer import slot_count
from paramserver.core.partition_state import PartitionState
from paramserver.core.ranges import of_pairs
from paramserver.core.shard.effects import UpdateTask
from paramserver.core.shard.update import UpdateInput, single_task
from paramserver.core.spec import ModelSpec
from paramserver.types import ModelKey, PartitionKey
from paramserver.wire.tensor import slice_crc
from paramserver_shard.buffers import SMALL_BYTES, BufferPool
from paramserver_shard.computing import compute, processors

COUNTS = (74 << 10, 75 << 10, 74 << 10, 75 << 10)
"""Partition sizes; cuts fall on page boundaries, so those of one model differ by one page."""
SPEC = ModelSpec.parse(
    {"name": "m", "params": {"w": {"shape": [sum(COUNTS)]}}, "partitions": 4, "optimizer": {"name": "sgd", "lr": 1.0}}
)
LAYOUT = Layout(SPEC)


def tasks(pool: BufferPool, *, reuse_direct: bool) -> list[UpdateTask]:
    """Return the tasks of one push of four whole partitions, each gradient in its own buffer."""
    out = []
    pool.take(max(COUNTS))  # as an earlier push did, so that all buffers are of this size
    for i, count in enumerate(COUNTS):
        assert LAYOUT.partition_size(i) == count > SMALL_BYTES // 4
        values, gradient = pool.take(count), pool.take(count)
        values[:], gradient[:] = i, -1.0
        state = PartitionState(values, (), (0,))
        inputs = UpdateInput(PartitionKey(ModelKey("m", 1), i), state, SPEC, LAYOUT.segments[i])
        out.append(single_task(inputs, gradient, "float32", None, 1.0, 1.0, reuse_direct=reuse_direct))
    return out


@pytest.mark.parametrize("reuse_direct", [True, False])
def test_spent_gradients_take_the_next_results(reuse_direct: bool) -> None:
    """Computing a whole-model push takes one buffer if gradients may be consumed, else one for each partition."""
    pool = BufferPool()
    work = tasks(pool, reuse_direct=reuse_direct)
    before = pool.lent_bytes
    results = compute(work, pool)
    assert pool.lent_bytes - before == (1 if reuse_direct else 4) * (before // 8)
    for i, (task, result) in enumerate(zip(work, results, strict=True)):
        assert result.state is not None
        assert (result.state.values == i + 1.0).all()
        assert (task.state.values == i).all()
        if not reuse_direct:
            assert task.direct is not None
            assert (task.direct[0] == -1.0).all()


def test_what_nobody_has_looked_at_is_looked_at_when_it_is_applied() -> None:
    """With `needs_check` a result has the gradient's checksum; a failure says whether the gradient was non-finite."""
    pool = BufferPool()
    looked = [replace(task, needs_check=True) for task in tasks(pool, reuse_direct=False)]
    for task, result in zip(looked, compute(looked, pool), strict=True):
        assert task.direct is not None
        assert result.crc == slice_crc("float32", ((0, task.direct[0].size),), task.direct[0])
    bad, huge = looked[0].direct, looked[1].direct
    assert bad is not None
    assert huge is not None
    bad[0][-1], huge[0][0], looked[1].state.values[0] = np.nan, -3e38, 3e38
    assert [(r.state is None, r.bad_gradient) for r in compute(looked[:3], pool)] == [
        (True, True),
        (True, False),
        (False, False),
    ]


@pytest.mark.parametrize(
    ("name", "unread"), [("sgd", {"active": False}), ("ftrl", {"lr": 0.0}), ("ftrl", {"lr": 1e-21})]
)
def test_what_makes_no_step_is_looked_at_too(name: str, unread: dict[str, Any]) -> None:
    """A gradient that nobody has looked at is refused for NaN in what makes no step: frozen, or at a rate next to 0."""
    pool, optimizer = BufferPool(), replace(SPEC.optimizer, name=name)
    task = tasks(pool, reuse_direct=False)[0]
    values, still = task.state.values, tuple([replace(step, **unread) for step in task.steps])
    state = replace(task.state, slots=(values,) * slot_count(optimizer))
    task = replace(task, state=state, optimizer=optimizer, steps=still, needs_check=True)
    assert compute([task], pool)[0].state is not None
    assert task.direct is not None
    task.direct[0][-1] = np.nan
    assert compute([task], pool)[0].bad_gradient


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw", "ftrl", "sum"])
def test_steps_tell_apart_only_what_the_optimizer_does(name: str) -> None:
    """Steps differ from push to push only if the optimizer counts them (adagrad, adam, adamw).

    For all others they stay equal, so that the kernels' cached tables can be reused.
    """
    spec = ModelSpec.parse(
        {"name": "m", "params": {"w": {"shape": [100]}}, "partitions": 1, "optimizer": {"name": name}}
    )
    values = np.zeros(100, np.float32)
    found = []
    for count in range(3):
        slots = tuple(np.zeros(100, np.float32) for _ in range(slot_count(spec.optimizer)))
        state = PartitionState(values, slots, (count,))
        inputs = UpdateInput(PartitionKey(ModelKey("m", 1), 0), state, spec, Layout(spec).segments[0])
        task = single_task(inputs, np.ones(100, np.float32), "float32", None, 1.0, 0.5)
        assert task.counts == (count + 1,)
        found.append(task.steps)
    assert len(set(found)) == (3 if name in ("adagrad", "adam", "adamw") else 1)


def test_what_a_push_does_not_name_feels_neither_momentum_nor_decay() -> None:
    """Elements before and after the range of a push stay as they are, whatever the optimizer would do to them."""
    rule = {"name": "momentum", "lr": 1.0, "momentum": 0.5, "weight_decay": 0.5}
    spec = ModelSpec.parse({"name": "m", "params": {"w": {"shape": [4]}}, "partitions": 1, "optimizer": rule})
    state = PartitionState(np.ones(4, np.float32), (np.ones(4, np.float32),), (1,))
    inputs = UpdateInput(PartitionKey(ModelKey("m", 1), 0), state, spec, Layout(spec).segments[0])

    (result,) = compute(
        [single_task(inputs, np.ones(2, np.float32), "float32", of_pairs([(1, 3)]), 1.0, 1.0)], BufferPool()
    )

    assert result.state is not None
    for after in (result.state.values, *result.state.slots):
        assert [x == 1.0 for x in after.tolist()] == [True, False, False, True]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux pins processes")
def test_a_process_that_is_pinned_takes_no_more_threads_than_it_has_processors() -> None:
    """A shard that may use one processor of a machine computes in one thread; it took one for each of the machine's."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert processors() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_a_container_with_a_share_of_the_processors_takes_no_more_threads(tmp_path: Path) -> None:
    """Threads beyond the quota of a control group (v1 or v2) around the process would be stopped for part of the time.

    It took a thread for each processor of the machine.  Part of a processor counts as one.
    """
    allowed = processors(tmp_path, tmp_path / "own")
    groups, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("0::/kubepods/pod7/c1\n")
    inner = groups / "kubepods" / "pod7" / "c1"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    assert processors(groups, own) == allowed
    (inner / "cpu.max").write_text(f"{(allowed + 5) * 100_000} 100000\n")
    assert processors(groups, own) == allowed, "the process is pinned to fewer"
    (inner.parent / "cpu.max").write_text("50000 100000\n")
    assert processors(groups, own) == 1
    (inner.parent / "cpu.max").write_text(f"{(allowed - 1) * 100_000 + 1} 100000\n")
    assert processors(groups, own) == allowed
    (groups / "cpu.max").write_text("100000 100000\n")
    assert processors(groups, own) == 1, "what a container sees as its own root"
    (groups / "cpu.max").unlink()

    own.write_text("7:memory:/x\n4:cpu,cpuacct:/docker/ab\n")
    old = groups / "cpu" / "docker" / "ab"
    old.mkdir(parents=True)
    (old / "cpu.cfs_period_us").write_text("50000\n")
    (old / "cpu.cfs_quota_us").write_text("-1\n")
    assert processors(groups, own) == allowed
    (old / "cpu.cfs_quota_us").write_text("50000\n")
    assert processors(groups, own) == 1
