"""A shard that stops: what it stores in the time it has, what it says if that is too short, and what comes later."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from msgspec.structs import replace
from redis.exceptions import ConnectionError as RedisConnectionError

from paramserver.core.commit import Commit
from paramserver.core.layout import Layout
from paramserver.core.shard.core import ShardCore
from paramserver.core.shard.events import (
    AssignPart,
    CommitDecided,
    ModelView,
    PullReceived,
    PushPart,
    PushReceived,
    SetReceived,
)
from paramserver.core.spec import ModelSpec
from paramserver.errors import InDoubt, Unavailable, problem
from paramserver.types import ModelKey, make_token
from paramserver_node import redis as node_redis
from paramserver_shard.buffers import BufferPool
from paramserver_shard.directory import Directory
from paramserver_shard.main import expect_state
from paramserver_shard.membership import Membership
from paramserver_shard.pacing import Budget
from paramserver_shard.runtime import Runtime
from paramserver_shard.serving import Serving
from paramserver_shard.snapshot_store import SaveResult
from paramserver_shard.stopping import Stopping

from . import virtual_time

SPEC = ModelSpec.parse({"name": "m", "params": {"w": {"shape": [8]}}, "partitions": 1})
KEY = ModelKey("m", 1)
PARTITIONS = 4
CLOCK = 3
"""The clock that the models of these tests have reached."""
SNAPSHOT_BYTES = 32
"""Bytes of one partition's values."""


class SlowStore:
    """Stands in for `SnapshotStore`: writes at the pace of Redis, and within a budget, on the time of the loop."""

    def __init__(self, redis_s: float, budget_s: float) -> None:
        """`redis_s` and `budget_s` are the seconds that writing one partition takes Redis and the budget."""
        self._redis_s = redis_s
        self._budget = Budget(SNAPSHOT_BYTES / budget_s, asyncio.get_running_loop().time)

    async def save(self, *_: Any, urgent: bool, **__: Any) -> SaveResult:
        await self._budget.spend(SNAPSHOT_BYTES, urgent=urgent)
        await asyncio.sleep(self._redis_s)
        return SaveResult.STORED

    def hurry(self) -> None:
        self._budget.lift()


class Leader:
    """Stands in for `Membership` and the scheduler behind it, which other shards may follow, too."""

    def __init__(
        self,
        view: ModelView,
        *,
        clock: int = CLOCK,
        targets: int = 0,
        away_until_s: float = 0.0,
        mapped: int = PARTITIONS,
        stored_s: float = 0.0,
        away_from_s: float = 0.0,
    ) -> None:
        """The model has reached `clock`; `targets` other shards could take partitions, but never do.

        From `away_from_s` until `away_until_s` nobody answers.  `mapped`: how many partitions the shard has by the
        leader's map.  By `stored_s` the last commit is stored of which the leader knows.
        """
        self.epoch, self.stopping = 1, False
        self.serving = Serving()
        self.serving.on_changed = lambda *_: self.closed.append(
            (asyncio.get_running_loop().time(), len(list(self.runtime.core.cuts())))
        )
        self.closed: list[tuple[float, int]] = []
        """When it stopped serving, and of how many partitions a cut was stored then."""
        self.left_at: float | None = None
        self.ended_s = 0.0
        self.runtime: Runtime
        self._view, self._clock, self._targets, self._away_until_s = view, clock, targets, away_until_s
        self._mapped, self._stored_s = mapped, stored_s
        self._away_from_s = away_from_s

    def _answer(self) -> None:
        if self._away_from_s <= asyncio.get_running_loop().time() < self._away_until_s:
            raise problem("no_leader", "no scheduler answers")

    async def drain(self, *, cut: bool) -> tuple[int, int]:
        self._answer()
        if cut:
            self.runtime.feed(replace(self._view, cut_asked=self._clock, cut_urgent=True))
        return self._targets, self._mapped

    def cuts(self) -> dict[ModelKey, int | None]:
        stored = {row.partition for row in self.runtime.core.cuts() if row.clock == self._clock}
        return {KEY: self._clock if len(stored) == PARTITIONS else None}

    async def leave(self, *, stored: bool) -> bool:
        self._answer()
        now = asyncio.get_running_loop().time()
        if stored and now < self._stored_s:
            return False
        self.left_at = now
        return True


def stopped(
    mode: str = "sync",
    *,
    clock: int = CLOCK,
    owned: int = PARTITIONS,
    stop_s: float = 25.0,
    redis_s: float = 0.0,
    budget_s: float = 1e-9,
    **leader: Any,
) -> tuple[Leader, Stopping]:
    """Tell a shard to stop that has a model of four partitions at that clock, of which nothing is stored."""

    async def work() -> tuple[Leader, Stopping]:
        fields = {"params": {"w": {"shape": [8 * PARTITIONS]}}, "partitions": PARTITIONS}
        spec = ModelSpec.parse({"name": "m", "optimizer": {"name": "sum"}, "consistency": {"mode": mode}} | fields)
        tokens = {i: make_token(1, 1 + i) for i in range(owned)}
        view = ModelView(KEY, spec, Layout(spec), 0, 0, 0, True, tokens, "init", {})
        async with asyncio.TaskGroup() as group:
            member = Leader(view, clock=clock, **leader)
            store, unused = cast(Any, SlowStore(redis_s, budget_s)), cast(Any, AsyncMock())
            runtime = member.runtime = Runtime(ShardCore(), Directory("s"), BufferPool(), store, unused, group)
            runtime.scheduler = cast(Any, Mock())
            runtime.feed(view)
            await asyncio.sleep(0)
            for t in range(clock):
                runtime.feed(CommitDecided(KEY, Commit(t, 0, (), 0, 0, False)))
            if mode != "sync":
                for p in runtime.core.models["m"].partitions.values():
                    p.lsn += 1
            stopping = Stopping(cast(Any, member), runtime, stop_s)
            asked, stop = asyncio.Event(), asyncio.Event()
            asked.set()
            await stopping.run(asked, stop)
            assert stop.is_set()
            member.ended_s = asyncio.get_running_loop().time()
            assert member.ended_s <= stop_s
        return member, stopping

    return virtual_time.run(work())


@pytest.mark.parametrize("clock", [CLOCK, 0])
def test_the_last_cut_has_all_the_time_there_is_and_no_budget(clock: int, caplog: pytest.LogCaptureFixture) -> None:
    """A synchronous model that no other shard can take is cut where it stands, though that takes more than a moment.

    Its first cut still waits for the budget, which would let it pass an hour later.  At clock 0 it is the last one.
    """
    leader, stopping = stopped(clock=clock, redis_s=2.0, budget_s=3600.0)

    assert not stopping.lost
    assert leader.cuts() == {KEY: clock}
    assert leader.left_at is not None
    assert leader.left_at > 4.0, "four writes of 2 s, two at a time"
    assert "synchronous model" not in caplog.text


def test_a_commit_that_is_not_applied_yet_is_waited_for() -> None:
    """A model whose cut is as new as its partitions, but not as its last commit, is beyond its cut."""
    partition = Mock(by_cuts=True, clock=CLOCK)
    model = Mock(key=KEY, ready=True, clock=CLOCK + 1, partitions={0: partition})
    member, runtime = Mock(cuts=lambda: {KEY: CLOCK}), Mock(core=Mock(models={"m": model}))
    assert Stopping(member, runtime, 25.0)._beyond_cuts == {"m": (CLOCK + 1, CLOCK)}


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("sync", "synchronous model 'm' begins anew: no time"),
        ("async", "partitions could not be stored"),
    ],
)
def test_what_could_not_be_stored_in_time_is_said(mode: str, told: str, caplog: pytest.LogCaptureFixture) -> None:
    """A shard whose Redis is too slow leaves in time all the same, and says what is lost."""
    with caplog.at_level(logging.ERROR):
        leader, stopping = stopped(mode, redis_s=15.0)

    assert stopping.lost
    assert told in caplog.text
    assert leader.left_at == pytest.approx(20.0, abs=0.2)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_longer_time_to_stop_is_used(mode: str) -> None:
    """With more time to stop, a shard stores what it could not store in less."""
    leader, stopping = stopped(mode, stop_s=180.0, redis_s=15.0)

    assert not stopping.lost
    assert leader.left_at is not None
    assert leader.left_at > 25.0


@pytest.mark.parametrize(("stop_s", "served_s"), [(10.0, 3.75), (25.0, 15.0), (85.0, 60.0)])
def test_most_of_the_time_to_store_is_for_handing_over(stop_s: float, served_s: float) -> None:
    """A shard serves what others may still take over for three quarters of the time that it has for storing."""
    leader, _ = stopped("async", stop_s=stop_s, targets=1)

    assert leader.closed[0][0] == pytest.approx(served_s, abs=0.2)


def test_a_partition_that_is_on_its_way_to_a_shard_that_stops_is_waited_for() -> None:
    """A shard that has nothing, but by the leader's map, serves on until that is moved away, too."""
    leader, _ = stopped("async", owned=0, targets=1, mapped=1)

    assert leader.closed[0][0] == pytest.approx(15.0, abs=0.2)


def test_a_commit_that_only_the_leader_knows_is_waited_for() -> None:
    """A shard that has stored all it knows leaves when the leader says that no commit goes with it, or at the end."""
    assert stopped(owned=0, mapped=0, stored_s=3.0)[0].left_at == pytest.approx(3.0, abs=0.2)
    assert stopped(owned=0, mapped=0, stored_s=1e9)[0].left_at == pytest.approx(20.0, abs=0.2)


def test_a_cut_that_moves_wait_for_is_not_held_up_by_the_budget() -> None:
    """A cut that has begun, before whose end no partition of its model moves, is stored while others may take over."""
    leader, _ = stopped(redis_s=1.0, budget_s=3600.0, targets=1)

    assert leader.closed[0][1] == PARTITIONS


def test_a_model_that_others_could_take_but_do_not_is_cut() -> None:
    """What is left of a synchronous model when the time for handing over has passed is cut where it stands."""
    leader, stopping = stopped(targets=1)

    assert not stopping.lost
    assert leader.closed[0][0] == pytest.approx(15.0, abs=0.2)
    assert leader.left_at == pytest.approx(15.2, abs=0.3)


@pytest.mark.parametrize(("away_s", "served_s"), [(3.0, 15.0), (12.0, 5.0)])
def test_a_scheduler_that_is_away_for_a_moment_is_asked_again_for_moves(away_s: float, served_s: float) -> None:
    """A shard that is told to stop while another scheduler takes over goes on serving; it gives up after 5 s."""
    leader, _ = stopped("async", targets=1, away_until_s=away_s)

    assert leader.closed[0][0] == pytest.approx(served_s, abs=1.1)


@pytest.mark.parametrize(("back_s", "left_s"), [(4.0, 4.0), (1e9, None)])
def test_a_scheduler_that_is_away_as_a_shard_leaves_is_asked_again(back_s: float, left_s: float | None) -> None:
    """Its partitions move at once when another scheduler leads; without one, the shard ends after 5 s all the same."""
    leader, stopping = stopped("async", away_from_s=0.1, away_until_s=back_s)

    assert not stopping.lost
    assert leader.left_at == (left_s and pytest.approx(left_s, abs=0.5))
    assert leader.ended_s < 7.0


def test_a_shard_without_partitions_does_not_wait_for_a_scheduler() -> None:
    """Nothing moves when it leaves, so it ends at once also if no scheduler answers."""
    leader, _ = stopped(owned=0, mapped=0, away_until_s=1e9)

    assert leader.ended_s < 1.0


@pytest.mark.parametrize("away_s", [0.5, 12.0])
def test_a_scheduler_that_is_away_for_a_while_is_asked_for_the_cut_again(away_s: float) -> None:
    """A synchronous model is cut although no scheduler answers when the shard is told to stop, if one does in time."""
    leader, stopping = stopped(away_until_s=away_s)

    assert not stopping.lost
    assert leader.left_at == pytest.approx(away_s, abs=1.5)


def test_without_any_scheduler_a_synchronous_model_is_not_waited_for_beyond_the_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If no scheduler answers at all, the shard says which model goes back, and why."""
    _, stopping = stopped(away_until_s=1e9)

    assert stopping.lost
    assert "synchronous model 'm' begins anew: no scheduler answers" in caplog.text


def spent(budget: Callable[[], Budget], lift_at_s: float) -> float:
    """Return when a second write may begin whose budget is lifted at that time."""

    async def work() -> float:
        loop, limit = asyncio.get_running_loop(), budget()
        loop.call_at(lift_at_s, limit.lift)
        for _ in range(2):
            await limit.spend(100, urgent=False)
        return loop.time()

    return virtual_time.run(work())


def test_a_lifted_budget_lets_what_waits_for_it_pass() -> None:
    """A write that waits for its budget begins when the budget is lifted, or when its turn has come before that."""

    def budget() -> Budget:
        return Budget(1.0, asyncio.get_running_loop().time)

    assert spent(budget, lift_at_s=7.0) == pytest.approx(7.0)
    assert spent(budget, lift_at_s=1000.0) == pytest.approx(100.0)


async def test_a_shard_that_is_told_to_stop_while_it_joins_leaves_again() -> None:
    """It is given no partitions that end with it, as the scheduler does not wait for its lease to expire."""
    requests: list[str] = []
    answered, asked, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def request(method: str, *_: Any, **__: Any) -> dict[str, Any]:
        requests.append(method)
        if method == "POST":
            await answered.wait()
        return {"epoch": 7}

    core: Any = Mock(models={}, unsaved=list)
    others: list[Any] = [Mock() for _ in range(3)]
    redis: Any = Mock(mget=AsyncMock(return_value=(None, None)))
    membership = Membership("s", [], Mock(request=request), redis, Directory("s"), Mock(core=core), *others)
    membership._terms = AsyncMock()
    async with asyncio.timeout(20.0):
        member = asyncio.ensure_future(membership.run())
        while not requests:
            await asyncio.sleep(0)
        stopping = asyncio.ensure_future(Stopping(membership, Mock(core=core), 25.0).run(asked, stop))
        asked.set()
        while not membership.serving.closed:
            await asyncio.sleep(0)
        answered.set()
        await stopping
        await member
    assert (requests, stop.is_set()) == (["POST", "DELETE"], True)


@pytest.mark.parametrize("loading", [False, True], ids=["later", "while it loads"])
def test_a_partition_that_is_assigned_to_a_stopping_shard_does_not_end_it(loading: bool) -> None:
    """A map that names a stopping shard as an owner, just before or after it closes, loads and raises nothing."""
    view = ModelView(KEY, SPEC, Layout(SPEC), 0, 0, 0, True, {0: make_token(1, 1)}, "init", {})

    async def stop() -> None:
        async with asyncio.TaskGroup() as group:
            unused = cast(Any, Mock())
            runtime = Runtime(ShardCore(), Directory("s"), BufferPool(), unused, unused, group)
            runtime.scheduler = unused
            if loading:
                runtime.feed(view)
            runtime.close()
            if not loading:
                runtime.feed(view)
            with pytest.raises(Unavailable, match="is stopping"):
                await runtime.pull(PullReceived("m", (0,)))
            with pytest.raises(Unavailable, match="is stopping"):
                await runtime.submit(int)

    asyncio.run(stop())


@pytest.mark.parametrize(
    "change",
    [
        PushReceived("m", (PushPart(0, np.ones(8, np.float32), "float32", 0, True),)),
        SetReceived("m", (AssignPart(0, np.ones(8, np.float32), "float32", True),)),
    ],
    ids=["push", "assignment"],
)
async def test_what_waits_to_be_durable_as_a_shard_ends_is_in_doubt(change: PushReceived | SetReceived) -> None:
    """A push or assignment that is applied, but not journaled yet, is in doubt when the shard ends; a pull is not.

    It was said to be safe to repeat: without an id it could count twice.
    """
    spec = replace(SPEC, ack="journaled")
    view = ModelView(KEY, spec, Layout(spec), 0, 0, 0, True, {0: make_token(1, 1)}, "init", {})

    async def append(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    journal = AsyncMock(append=append, read=AsyncMock(return_value=[]))
    store = AsyncMock(manifest=AsyncMock(return_value=[]))
    async with asyncio.TaskGroup() as group:
        runtime = Runtime(ShardCore(), Directory("s"), BufferPool(), cast(Any, store), cast(Any, journal), group)
        runtime.scheduler = cast(Any, Mock())
        runtime.feed(view)
        await runtime.pull(PullReceived("m", (0,)))
        changed = asyncio.create_task(runtime.push(change))
        pulled = asyncio.create_task(runtime.pull(PullReceived("m", (0,), min_version=2, wait_s=60.0)))
        await asyncio.sleep(0)
        assert runtime.core.models["m"].partitions[0].version == 1
        runtime.close()

    changed_error, pulled_error = await asyncio.gather(changed, pulled, return_exceptions=True)
    assert isinstance(changed_error, InDoubt)
    assert isinstance(pulled_error, Unavailable)
    assert pulled_error.code == "unavailable"


async def test_a_shard_that_waits_for_redis_stops_though_its_client_has_lost_the_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `--expect-state` it stops even if the Redis client swallows the cancellation with an error of its own."""
    asked = asyncio.Event()

    async def exists(_: str) -> int:
        if not asked.is_set():
            asked.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        raise RedisConnectionError("refused")

    monkeypatch.setattr(node_redis, "connect", lambda _: Mock(exists=exists, aclose=AsyncMock()))
    waiting = asyncio.ensure_future(expect_state("redis://nowhere"))
    await asked.wait()
    waiting.cancel()
    await asyncio.wait([waiting], timeout=5.0)
    ended = waiting.cancelled()
    waiting.cancel()
    assert ended
