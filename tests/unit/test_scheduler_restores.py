"""Restores by the scheduler, of checkpoints that it has: their beginning, their end, and one that ceases to lead."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from tests.refusals import refused_with

from paramserver import checkpoint, limits
from paramserver.core.scheduler import io
from paramserver.core.spec import ModelSpec
from paramserver.errors import InDoubt, PsError, problem
from paramserver.types import ModelKey
from paramserver_scheduler.checkpoints import CheckpointStore
from paramserver_scheduler.jobs import Jobs
from paramserver_scheduler.runtime import Answer

from .restoring import BlindRuntime, saved
from .scheduling import SPEC, Driver

Places = dict[int, tuple[int, int]]


def begin(d: Driver, mode: str, in_place: bool) -> ModelKey:
    """Begin a restore of model `m`, into the one there is or into a new one."""
    spec = SPEC | {"consistency": {"mode": mode}}
    if in_place:
        d.model(**spec)
        d.ask(lambda n: io.StartRestore(n, "m"))
    else:
        d.send(lambda n: io.CreateModel(n, spec, "", restore=True))
        d.beats()
    return d.core.read.key("m")


def places(d: Driver, key: ModelKey) -> Places:
    """Return where a restore sets each partition now."""
    return {i: d.core.read.place(key, i) for i in range(4)}


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("back", [True, False])
def test_a_restore_that_a_death_has_just_undone_does_not_end(mode: str, in_place: bool, back: bool) -> None:
    """If an owner died after all was set, and before the core hears of it, the restore goes on until all is set again.

    Also while the partitions of the dead shard have no owner, as none is alive.
    """
    d = Driver("s0", "s1") if back else Driver("s0")
    key = begin(d, mode, in_place)
    before = places(d, key)

    if back:
        d.shard("s0")
    else:
        for name, epoch in d.shards.items():
            d.ask(lambda n, name=name, epoch=epoch: io.LeaveShard(n, name, epoch))  # type: ignore[misc]
    with refused_with("conflict", match="lost values"):
        d.ask(lambda n: io.RestoreFinished(n, key, places=before))
    model = d.core._c.models["m"]
    assert model.restoring if in_place else model.initial.awaits_restore

    d.shards.clear()
    d.shard("s0")
    d.shard("s1")
    d.wait(3.0)
    assert d.ask(lambda n: io.RestoreFinished(n, key, places=places(d, key)))["state"] == "ready"
    assert not model.restoring


@pytest.mark.parametrize(("in_place", "stored"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize(
    ("mode", "ack"), [("async", "applied"), ("async", "journaled"), ("sync", "applied"), ("sync", "journaled")]
)
def test_a_restore_by_a_client_that_a_death_has_just_undone_does_not_end(
    mode: str, ack: str, in_place: bool, stored: bool
) -> None:
    """If an owner died after the client had set all, its report ends the restore only once all is set again.

    In place and out of sync it ends nothing: what a death takes there is as before the restore.  A report that comes
    again after the end changes nothing.
    """
    d = Driver("s0", "s1")
    spec = SPEC | {"consistency": {"mode": mode}, "ack": ack}
    if in_place:
        d.model(**spec)
    else:
        d.send(lambda n: io.CreateModel(n, spec, "mine", restore=True))
        d.beats()
    model = d.core._c.models["m"]
    before, set_on = d.given(), model.timeline

    def report(given: list[list[int]], timeline: int) -> Any:
        return d.ask(lambda n: io.ModelRestored(n, "m", model.generation, timeline, 12, given=given))

    d.shard("s0")
    owned = [(i, token) for i, token in d.given() if model.owners[i].shard == "s0"]
    lost = [["m", model.generation, i, token, False] for i, token in owned]
    d.beat("s0", lost=[] if stored else lost)
    d.beats()
    if mode == "async" and in_place:
        assert report(before, set_on)["state"] == "ready"
        return
    began = model.timeline
    for given, timeline in ((before, set_on), (before, began), (d.given()[1:], began), ([], began)):
        with refused_with("conflict", match="lost values"):
            report(given, timeline)
    assert model.ready is in_place

    done = report(d.given(), began)
    assert (done["state"], done["timeline"]) == ("ready", began + (mode == "sync"))
    moved = [[0, 1], *d.given()[1:]]
    assert report(d.given(), began)["timeline"] == report(moved, began)["timeline"] == done["timeline"]


@pytest.mark.parametrize("by", ["the scheduler's restore", "another mode", "a death after its end", "a new leader"])
def test_a_report_of_a_restore_that_did_not_begin_the_timeline_is_refused(by: str) -> None:
    """Where something else began it, or the leader does not know what did, the client is to look what it has to set."""
    d = Driver("s0", "s1")
    d.model(consistency={"mode": "sync"}, ack="journaled")
    model, before = d.core._c.models["m"], d.given()

    def report(timeline: int) -> Any:
        return d.ask(lambda n: io.ModelRestored(n, "m", 1, timeline, 12, given=d.given() if timeline else before))

    match by:
        case "the scheduler's restore":
            d.ask(lambda n: io.StartRestore(n, "m"))
            d.ask(lambda n: io.RestoreFinished(n, ModelKey("m", 1)))
        case "another mode":
            for mode in ("async", "sync"):
                d.ask(lambda n, m=mode: io.PatchModel(n, "m", {"consistency": {"mode": m}}))  # type: ignore[misc]
                d.beats()
        case "a death after its end":
            assert report(0)["timeline"] == 1
            d.shard("s0")
            d.beat("s0", lost=[["m", 1, i, token, False] for i, token in d.given() if model.owners[i].shard == "s0"])
            d.beats()
        case _:
            assert report(0)["timeline"] == report(0)["timeline"] == 1
            d.restart()
            d.beats()
    with refused_with("conflict", match="lost values"):
        report(0)
    began = d.document()["timeline"]
    assert report(began)["timeline"] == report(began)["timeline"] == began + 1


@pytest.mark.parametrize("target", ["m", "copy"])
async def test_what_a_death_undoes_just_before_the_end_is_set_again(tmp_path: Path, target: str) -> None:
    """A restore sets all values again if an owner was replaced while the core was being told that all is set."""
    d = saved(tmp_path)
    sets: list[Places] = []

    class Losing(BlindRuntime):
        async def ask(self, make: Any, *, changes: bool = False) -> Answer:
            if isinstance(make(0), io.RestoreFinished) and len(sets) == 1:
                d.shard("s0")  # it was killed, and has joined again
            return await super().ask(make)

    async def set_all(key: ModelKey, states: Any, names: Any, owner: Any, place: Any) -> Places:
        sets.append({i: place(i) for i in range(4)})
        return sets[-1]

    unused, runtime = Mock(), cast(Any, Losing(d, io.Tick, taken_in=True))
    async with asyncio.TaskGroup() as group:
        shards: Any = Mock(restore=set_all)
        jobs = Jobs(runtime, CheckpointStore(tmp_path), unused, shards, unused, unused, group, "s")
        await jobs.restore("m", "mine", target, None)

    assert len(sets) == 2
    assert sets[0] != sets[1] == places(d, d.core.read.key(target))
    assert d.core.read.model(target)["state"] == "ready"


async def test_many_states_are_restored_in_pieces(tmp_path: Path) -> None:
    """A restore brings the core the workers' states in pieces, between which it can decide other things."""
    states = {w: w * 200_000 for w in "abc"}
    d, asked = saved(tmp_path, **states, d=[4]), []

    class Noting(BlindRuntime):
        async def ask(self, make: Any, *, changes: bool = False) -> Answer:
            asked.append(type(make(0)))
            return await super().ask(make)

    unused, runtime = Mock(), cast(Any, Noting(d, io.Tick, taken_in=True))
    async with asyncio.TaskGroup() as group:
        shards = Mock(restore=AsyncMock(return_value={}))
        jobs = Jobs(runtime, CheckpointStore(tmp_path), unused, shards, unused, unused, group, "s")
        await jobs.restore("m", "mine", "m", None)

    assert asked == [io.StartRestore, *[io.ModelRestored] * 3, io.RestoreFinished]
    assert [d.join(w)["state"] for w in "abcd"] == [*states.values(), [4]]


async def test_a_restore_for_an_optimizer_that_was_just_changed_sets_no_value(tmp_path: Path) -> None:
    """If the model gets an optimizer with other arrays before its restore begins, that is refused and nothing stops."""
    d = saved(tmp_path)

    class Changing(BlindRuntime):
        async def ask(self, make: Any, *, changes: bool = False) -> Answer:
            if isinstance(make(0), io.StartRestore):
                d.ask(lambda n: io.PatchModel(n, "m", {"optimizer": {"name": "adam"}}))
            return await super().ask(make)

    shards, unused, runtime = Mock(restore=AsyncMock()), Mock(), cast(Any, Changing(d, io.Tick, taken_in=True))
    async with asyncio.TaskGroup() as group:
        jobs = Jobs(runtime, CheckpointStore(tmp_path), unused, shards, unused, unused, group, "s")
        with refused_with("conflict", match="optimizer"):
            await jobs.restore("m", "mine", "m", None)

    assert not shards.restore.called
    assert not d.core._c.models["m"].restoring


@pytest.mark.parametrize("target", ["m", "copy"])
async def test_who_joins_while_values_are_restored_has_the_state_for_them(tmp_path: Path, target: str) -> None:
    """A worker that joins a model before all its restored values are set begins with its restored state."""
    d, joined = saved(tmp_path, a=[4]), []

    async def set_all(*args: Any) -> Places:
        joined.append(d.ask(lambda n: io.JoinWorker(n, target, "a"))["state"])
        return {}

    unused, runtime = Mock(), cast(Any, BlindRuntime(d, io.Tick, taken_in=True))
    async with asyncio.TaskGroup() as group:
        shards: Any = Mock(restore=set_all)
        jobs = Jobs(runtime, CheckpointStore(tmp_path), unused, shards, unused, unused, group, "s")
        await jobs.restore("m", "mine", target, None)

    assert joined == [[4]]


async def test_a_restore_whose_states_do_not_fit_sets_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore that brings more states than there is room for is refused before a value is set or commits pause."""
    d = saved(tmp_path, a="x" * 60_000, b="x" * 60_000)
    monkeypatch.setattr(limits, "WORKER_STATES_MAX", 100_000)
    shards, unused, runtime = Mock(restore=AsyncMock()), Mock(), cast(Any, BlindRuntime(d, io.Tick, taken_in=True))
    async with asyncio.TaskGroup() as group:
        jobs = Jobs(runtime, CheckpointStore(tmp_path), unused, shards, unused, unused, group, "s")
        with refused_with("too_large"):
            await jobs.restore("m", "mine", "m", None)

    assert not shards.restore.called
    assert d.join("a")["state"] is None


@pytest.mark.parametrize("taken_in", [True, False])
@pytest.mark.parametrize("kind", [io.StartRestore, io.RestoreFinished])
async def test_a_restore_that_redis_cuts_short_is_over(tmp_path: Path, kind: type, taken_in: bool) -> None:
    """If Redis fails at the start or end of a restore, handled by the core or not, the next restore can start."""
    d = saved(tmp_path)
    unused, blind = Mock(), cast(Any, BlindRuntime(d, kind, taken_in))
    async with asyncio.TaskGroup() as group:
        shards = Mock(restore=AsyncMock(return_value={}))
        jobs = Jobs(blind, CheckpointStore(tmp_path), unused, shards, unused, unused, group, "s")
        with pytest.raises(PsError, match="Redis"):
            await jobs.restore("m", "mine", "m", None)

    assert d.ask(lambda n: io.StartRestore(n, "m"))["name"] == "m"


@pytest.mark.parametrize("taken_in", [True, False])
async def test_a_creation_by_restore_that_redis_cuts_short_can_be_repeated(tmp_path: Path, taken_in: bool) -> None:
    """If Redis fails at the creation of a restore's model, no model without values is left under the name."""
    d = saved(tmp_path)
    unused, blind = Mock(), cast(Any, BlindRuntime(d, io.CreateModel, taken_in))
    async with asyncio.TaskGroup() as group:
        shards = Mock(restore=AsyncMock(return_value={}))
        jobs = Jobs(blind, CheckpointStore(tmp_path), unused, shards, unused, unused, group, "s")
        with pytest.raises(PsError, match="Redis"):
            await jobs.restore("m", "mine", "copy", None, exist_ok=False)
        blind.kind = io.Tick
        await jobs.restore("m", "mine", "copy", None, exist_ok=False)

    assert d.core.read.model("copy")["state"] == "ready"


async def test_a_second_restore_does_not_end_the_first(tmp_path: Path) -> None:
    """A second restore is refused while the first is in progress, and the first goes on and succeeds."""
    d = saved(tmp_path)
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def set_all(*args: Any) -> Places:
        begun.set()
        await goes_on.wait()
        return {}

    unused, runtime = Mock(), cast(Any, BlindRuntime(d, io.Tick, taken_in=True))
    async with asyncio.TaskGroup() as group:
        shards: Any = Mock(restore=set_all)
        jobs = Jobs(runtime, CheckpointStore(tmp_path), unused, shards, unused, unused, group, "s")
        first = asyncio.ensure_future(jobs.restore("m", "mine", "m", None))
        await begun.wait()
        with pytest.raises(PsError, match="being restored"):
            await jobs.restore("m", "mine", "m", None)
        with pytest.raises(PsError, match="being restored"):
            d.ask(lambda n: io.StartRestore(n, "m"))
        goes_on.set()
        assert (await first).status == 200


@pytest.mark.parametrize("begun", [True, False])
async def test_a_restore_is_in_doubt_once_begun_if_its_scheduler_stops(tmp_path: Path, begun: bool) -> None:
    """A scheduler that stops hears of no end: a restore that has begun is in doubt, and no other has done anything."""
    d, stopped = saved(tmp_path), problem("no_leader", "this scheduler is no longer the leader")
    unused, runtime = Mock(), cast(Any, BlindRuntime(d, io.Tick, taken_in=True))

    async def set_all(*args: Any) -> Places:
        runtime.stopped = stopped
        return {}

    if not begun:
        runtime.stopped = stopped
    async with asyncio.TaskGroup() as group:
        shards: Any = Mock(restore=set_all)
        jobs = Jobs(runtime, CheckpointStore(tmp_path), unused, shards, unused, unused, group, "s")
        with refused_with("in_doubt" if begun else "no_leader", match="no longer the leader"):
            await jobs.restore("m", "mine", "m", None)

    assert d.core._c.models["m"].restoring is begun


async def test_who_waits_for_a_restore_is_told_when_its_scheduler_leads_no_more(tmp_path: Path) -> None:
    """The restore is in doubt: the end of a term ends its jobs, and who waits for them is not cancelled with them."""
    d, begun = Driver.with_model(), asyncio.Event()
    values = {"w": np.zeros(64, np.float32)}
    checkpoint.write(tmp_path / "checkpoints" / "m" / "mine", ModelSpec.parse(SPEC), values, {}, {}, [], {}, {})

    async def ask(make: Any, *, changes: bool = False) -> Answer:
        return Answer(200, d.ask(make))

    async def set_all(*args: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def lead() -> None:
        async with asyncio.TaskGroup() as group:
            runtime: Any = SimpleNamespace(core=d.core, send=d.do, ask=ask)
            shards: Any = Mock(restore=set_all)
            jobs = Jobs(runtime, CheckpointStore(tmp_path), Mock(), shards, Mock(), Mock(), group, "s")
            restoring.append(asyncio.ensure_future(jobs.restore("m", "mine", "m", None)))
            await asyncio.Event().wait()

    restoring: list[asyncio.Future[Answer]] = []
    leading = asyncio.ensure_future(lead())
    await begun.wait()
    leading.cancel()

    with pytest.raises(InDoubt, match="leads no more") as told:
        await restoring[0]
    assert told.value.code == "in_doubt"
    assert not told.value.retryable
