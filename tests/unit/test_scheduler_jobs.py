"""Jobs of the scheduler: a failed one answers the request that waits for it, and the scheduler goes on."""

import asyncio
import errno
import json
import os
import struct
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from tests.refusals import refused_with

from paramserver import checkpoint
from paramserver.core.layout import Layout
from paramserver.core.partition_state import PartitionState
from paramserver.core.scheduler import io
from paramserver.core.spec import ModelSpec
from paramserver.errors import ConflictError, CorruptState, NotFoundError, PsError, problem
from paramserver.net.credentials import Credentials
from paramserver.types import AnyArray, ModelKey
from paramserver.wire.state import SetFrame, StateFrame
from paramserver_scheduler.checkpoints import CheckpointStore, assignments
from paramserver_scheduler.history import History
from paramserver_scheduler.jobs import Jobs
from paramserver_scheduler.shards import ShardClient

from .restoring import BlindRuntime, saved
from .scheduling import SPEC, Driver, code

FROM_FILE: dict[str, Any] = {"w": {"shape": [64], "init": {"kind": "file", "path": "first.safetensors"}}}


async def performed(d: Driver, state_dir: Path, shards: Any) -> History:
    """Run all jobs that the core has requested to their end, and report the results to it; return the events."""
    runtime: Any = SimpleNamespace(core=d.core, send=d.do, check_leads=AsyncMock())
    unused: Any = Mock()
    history = History(0.0)
    async with asyncio.TaskGroup() as group:
        jobs = Jobs(runtime, CheckpointStore(state_dir), unused, shards, unused, history, group, "s")
        for effect in d.work:
            jobs.start(effect)
        d.work.clear()
    return history


@pytest.mark.parametrize("work", ["checkpoint", "files"])
async def test_a_bug_in_a_job_ends_the_job_alone(tmp_path: Path, work: str) -> None:
    """A bug in a job fails the waiting request with `internal`, and the scheduler's task group goes on."""
    d = Driver()
    shards = Mock(states=Mock(side_effect=ZeroDivisionError), assign=Mock(side_effect=ZeroDivisionError))
    if work == "checkpoint":
        d.model()
        asked = d.send(lambda n: io.RequestCheckpoint(n, "m"))
    else:
        (tmp_path / "first.safetensors").write_bytes(tensor_file("F32", 4))
        d.shard("s0")
        asked = d.send(lambda n: io.CreateModel(n, SPEC | {"params": FROM_FILE}, "x"))

    await performed(d, tmp_path, shards)

    with refused_with("internal"):
        d.result(asked)


@pytest.mark.parametrize(("clocks", "told"), [((2, 2), None), ((2, 1), "conflict"), ((1, 1), "conflict")])
async def test_a_checkpoint_in_sync_whose_partitions_are_not_of_its_clock_is_a_conflict(
    tmp_path: Path, clocks: tuple[int, int], told: str | None
) -> None:
    """A checkpoint in sync fails with `conflict` if partitions were read at another clock; versions may differ.

    Versions differ after assignments; clocks differ if the model rolled back while it was read.
    """
    d = Driver.with_model(consistency={"mode": "sync"}, partitions=2)
    a = d.join("a")
    d.clock(a, 2)
    asked = d.send(lambda n: io.RequestCheckpoint(n, "m"))
    d.wait(1.5)
    state = PartitionState(np.zeros(32, np.float32), (), (0,))
    frames = [StateFrame("m", 1, i, clock + i, clock, 32, 0, (0,), ()) for i, clock in enumerate(clocks)]

    await performed(d, tmp_path, Mock(states=AsyncMock(return_value=[(frame, state) for frame in frames])))

    if told is None:
        assert d.result(asked)["versions"] == [2, 3]
    else:
        assert code(d, asked) == told
        assert not list((tmp_path / "checkpoints").glob("m/*"))


async def test_the_core_is_told_once_a_checkpoint_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before files are written the core hears that all is read, so that training does not wait for the disk."""
    d = Driver.with_model(partitions=1)
    d.send(lambda n: io.RequestCheckpoint(n, "m"))
    seen: list[bool] = []

    def write(*args: Any, **more: Any) -> dict[str, Any]:
        seen.append(d.core._c.models["m"].checkpoints.reading)
        return {"files": {}}

    monkeypatch.setattr(checkpoint, "write", write)
    assert d.core._c.models["m"].checkpoints.reading

    await performed(d, tmp_path, Mock(states=AsyncMock(return_value=held(0))))

    assert seen == [False]


def test_a_checkpoint_is_in_memory_once_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions that were read for a checkpoint are freed as they are put together, before anything is written."""
    d = Driver()
    d.model(partitions=1)
    d.send(lambda n: io.RequestCheckpoint(n, "m"))
    (effect,) = (e for e in d.work if isinstance(e, io.WriteCheckpoint))
    parts = held(0)
    values = [weakref.ref(state.values) for _, state in parts]
    alive: list[bool] = []

    def write(*args: Any, **more: Any) -> dict[str, Any]:
        alive.extend(v() is not None for v in values)
        return {"files": {}}

    monkeypatch.setattr(checkpoint, "write", write)

    CheckpointStore(tmp_path).write("m", "c", effect.document, parts)

    assert alive == [False]


async def test_a_disk_that_refuses_a_checkpoint_is_not_asked_again(tmp_path: Path) -> None:
    """A disk error fails a checkpoint with `disk_refuses` and its text; not retryable, because it would occur again."""
    d = Driver.with_model(partitions=1)
    asked = d.send(lambda n: io.RequestCheckpoint(n, "m"))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "m").touch()

    history = await performed(d, tmp_path, Mock(states=AsyncMock(return_value=held(0))))

    with pytest.raises(ConflictError, match=r"File exists: .*/checkpoints/m'") as told:
        d.result(asked)
    assert (told.value.code, told.value.retryable) == ("disk_refuses", False)
    assert [(e.kind, e.level) for e in history.events] == [("checkpoint_failed", "bad")]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
async def test_a_lack_of_file_descriptors_is_not_blamed_on_the_disk(tmp_path: Path, number: int) -> None:
    """A lack of file descriptors, which passes, is reported as such and as retryable, not as an error of the disk."""
    d = Driver.with_model(partitions=1)
    asked = d.send(lambda n: io.RequestCheckpoint(n, "m"))

    await performed(d, tmp_path, Mock(states=AsyncMock(side_effect=OSError(number, os.strerror(number)))))

    with pytest.raises(PsError, match="file descriptors") as told:
        d.result(asked)
    assert (told.value.code, told.value.retryable) == ("unavailable", True)
    assert "disk" not in told.value.detail


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on open files")
def test_a_checkpoint_that_cannot_be_opened_now_is_not_another_models(tmp_path: Path) -> None:
    """Without a free file descriptor nobody is told that a checkpoint is missing, damaged or of an earlier model."""
    import resource

    store, spec = CheckpointStore(tmp_path), ModelSpec.parse(SPEC)
    checkpoint.write(store.path("m", "c"), spec, {"w": np.zeros(64)}, {}, {}, [], {}, {"creation": "1-2.0"})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        for ask in (store.taken, store.read, store.remove, lambda m, n, c: store.file(m, n, checkpoint.PARAMS, c)):
            with pytest.raises(OSError, match="Too many open files"):
                ask("m", "c", "1-2.0")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not store.taken("m", "c", "1-2.0")


def tensor_file(dtype: str, item_bytes: int) -> bytes:
    """Return a safetensors file with a tensor `w` of 64 zeros in that dtype."""
    head = json.dumps({"w": {"dtype": dtype, "shape": [64], "data_offsets": [0, 64 * item_bytes]}}).encode()
    return struct.pack("<Q", len(head)) + head + bytes(64 * item_bytes)


def test_a_dtype_that_numpy_lacks_is_refused(tmp_path: Path) -> None:
    """A file of initial values with a dtype that numpy lacks is refused as `invalid_field`, and named."""
    (tmp_path / "first.safetensors").write_bytes(tensor_file("F8_E4M3", 1))
    layout = Layout(ModelSpec.parse(SPEC | {"params": FROM_FILE}))

    with refused_with("invalid_field", match=r"first\.safetensors"):
        CheckpointStore(tmp_path).read_parameters(layout, {"w": "first.safetensors"})


async def test_an_address_that_is_none_is_a_shard_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard with an unparsable address is `unavailable`, like one that does not answer."""
    monkeypatch.setattr("paramserver_scheduler.shards.PATIENCE_S", 0.0)
    (tmp_path / "first.safetensors").write_bytes(tensor_file("F32", 4))
    layout = Layout(ModelSpec.parse(SPEC | {"params": FROM_FILE}))
    values = CheckpointStore(tmp_path).read_parameters(layout, {"w": "first.safetensors"})
    shards = ShardClient(Credentials(), lambda: 1)

    with refused_with("unavailable"):
        await shards.states(ModelKey("m", 1), 2, lambda index: "http://shard:port", None)
    with refused_with("unavailable"):
        await shards.assign(assignments(layout, 1, values), lambda index: "http://shard:port")
    await shards.aclose()


@pytest.mark.parametrize(
    ("after", "again"),
    [((2, 7), [(1, 0), (1, 1), (2, 0), (2, 1)]), ((1, 8), [(1, 0), (1, 1), (1, 1)]), ((1, 7), [(1, 0), (1, 1)])],
)
async def test_what_a_restore_has_set_is_set_again_if_a_death_undoes_it(
    after: tuple[int, int], again: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a shard dies during a restore, what its partition and, in sync, all others lost by that is sent again.

    A request that is refused because of the new timeline names the present one then.
    """
    monkeypatch.setattr("paramserver_scheduler.shards.RETRY_S", 0.0)
    shards, places = ShardClient(Credentials(), lambda: 1), [(1, 5), (1, 7)]
    named: list[tuple[int, int]] = []

    async def receive(url: str, frame: SetFrame, arrays: Sequence[AnyArray]) -> None:
        assert frame.timeline is not None
        named.append((frame.timeline, frame.parts[0].partition))
        if len(named) == 2:  # the owner of the second partition dies, before it answers if that begins a timeline
            places[:] = [(after[0], 5 + after[0] - 1), after]
            if after[0] == 2:
                raise problem("rolled_back", "the model went on", timeline=2, clock=3)

    monkeypatch.setattr(shards, "_set", receive)
    states = [(PartitionState(np.zeros(4, np.float32), (), (1,)), 3)] * 2
    await shards.restore(ModelKey("m", 1), states, (), lambda index: "http://shard:1", lambda i: places[i])
    await shards.aclose()

    assert sorted(named) == again


async def test_of_a_file_that_is_read_again_only_what_was_lost_is_set(tmp_path: Path) -> None:
    """When a file is read again after a loss, only lost partitions are set; the others keep their trained values."""
    (tmp_path / "first.safetensors").write_bytes(tensor_file("F32", 4))
    d = Driver("s0", "s1")
    d.send(lambda n: io.CreateModel(n, SPEC | {"params": FROM_FILE}, "x"))
    d.beats()
    shards = Mock(assign=AsyncMock())
    await performed(d, tmp_path, shards)
    first, second = (i for i, owner in enumerate(d.owners()) if owner == "s0")
    del d.shards["s0"]
    d.wait(6)
    places = d.core.read.model("m")["partitions"]

    d.beat("s1", lost=[["m", 1, i, places[i]["incarnation"], False] for i in (first, second)])
    await performed(d, tmp_path, shards)
    await performed(d, tmp_path, shards)

    sent = [call.args[0] for call in shards.assign.await_args_list]
    assert all(frame.first for frames in sent for frame, _ in frames.values())  # they change nothing once trained
    set_of = [sorted(frames) for frames in sent]
    assert set_of == [[0, 1, 2, 3], [first], [first, second]]
    assert d.core.read.model("m")["state"] == "ready"


async def test_the_latest_of_a_deleted_model_is_the_last_whatever_the_clock_says(tmp_path: Path) -> None:
    """A checkpoint is later than those before it even if the clock was set back by an hour meanwhile."""
    d, store = Driver.with_model(partitions=1), CheckpointStore(tmp_path)
    for version, offset_s in enumerate((0.0, -3600.0, -7200.0)):
        d.do(io.ClockStepped(offset_s))
        d.send(lambda n: io.RequestCheckpoint(n, "m"))
        await performed(d, tmp_path, Mock(states=AsyncMock(return_value=held(version))))
        assert store.read("m", "latest").versions == [version]
    times = [c["created_s"] for c in d.core.read.checkpoints("m")]
    assert sorted(set(times)) == times


@pytest.mark.parametrize("holder", ["s", "another"])
async def test_a_checkpoint_of_another_creation_is_not_restored_for_this_ones(tmp_path: Path, holder: str) -> None:
    """A folder here that an earlier model of that name left is not restored, whichever scheduler has the checkpoint."""
    d = saved(tmp_path)
    d.send(lambda n: io.RequestCheckpoint(n, "m", "mine"))
    d.do(io.CheckpointWritten(ModelKey("m", 1), "mine", 10, [0] * 4, scheduler=holder))
    unused, runtime = Mock(), cast(Any, BlindRuntime(d, io.Tick, taken_in=True))
    async with asyncio.TaskGroup() as group:
        jobs = Jobs(runtime, CheckpointStore(tmp_path), unused, unused, unused, unused, group, "s")
        with pytest.raises(PsError, match="earlier model"):
            await jobs.restore("m", "mine", "m", None)


async def test_a_model_created_while_the_checkpoint_is_read_is_not_restored_for_the_one_before(tmp_path: Path) -> None:
    """With `generation`, a restore sets that creation or none; the values of the next one of that name stay."""
    d, shards = saved(tmp_path), Mock(restore=AsyncMock(return_value={}))
    async with asyncio.TaskGroup() as group:
        jobs = with_runtime(d, tmp_path, group, others=Mock(), shards=shards)
        read = jobs._store.read

        def slowly(*args: Any) -> Any:
            d.ask(lambda n: io.DeleteModel(n, "m"))
            d.model()
            return read(*args)

        jobs._store = cast(Any, Mock(read=slowly))
        with refused_with("model_replaced"):
            await jobs.restore("m", "mine", "m", None, generation=1)
    assert not shards.restore.await_count


def held(version: int) -> list[tuple[StateFrame, PartitionState]]:
    """Return the only partition of a model at that version, as its shard sends it."""
    return [(StateFrame("m", 1, 0, version, 0, 64, 0, (0,), ()), PartitionState(np.zeros(64, np.float32), (), (0,)))]


@pytest.mark.parametrize("creation", ["2-5.0", "1-4.0"])
def test_only_what_the_same_creation_wrote_is_replaced_or_removed(tmp_path: Path, creation: str) -> None:
    """A checkpoint is replaced or removed only by the creation of the model that wrote it.

    One of another generation or of another cluster stays.
    """
    store = CheckpointStore(tmp_path)
    own = {"spec": ModelSpec.parse(SPEC | {"partitions": 1}).document(), "workers": {}, "creation": "1-5.0"}
    other = own | {"creation": creation}

    store.write("m", "final", other, held(1))
    assert store.taken("m", "final", "1-5.0")
    with pytest.raises(PsError, match="exists already"):
        store.write("m", "final", own, held(2))
    store.remove("m", "final", "1-5.0")
    assert store.read("m", "final").versions == [1]

    store.remove("m", "final", creation)
    assert not store.path("m", "final").exists()
    assert not store.taken("m", "final", "1-5.0")
    store.write("m", "final", own, held(2))
    store.write("m", "final", own, held(3))
    assert store.read("m", "final").versions == [3]


def test_a_checkpoint_whose_replacement_was_interrupted_is_there_again(tmp_path: Path) -> None:
    """The sweep brings back a checkpoint that was moved aside if the new one is not in its place, else deletes it."""
    store = CheckpointStore(tmp_path)
    own = {"spec": ModelSpec.parse(SPEC | {"partitions": 1}).document(), "workers": {}, "creation": "1-5.0"}
    for name in ("a.1", "b"):
        store.write("m", name, own, held(1))
        path = store.path("m", name)
        path.rename(path.with_name(f".{name}.0123abcd.old"))
        path.with_name(f".{name}.0123abcd.part").mkdir()
    store.write("m", "b", own, held(2))

    store.sweep()

    assert [store.read("m", name).versions for name in ("a.1", "b")] == [[1], [2]]
    assert sorted(path.name for path in store.path("m", "b").parent.iterdir()) == ["a.1", "b"]


def test_the_last_checkpoint_of_a_model_leaves_no_folder(tmp_path: Path) -> None:
    """With its last checkpoint a model's folder goes, which every new leader would look into; others stay."""
    store = CheckpointStore(tmp_path)
    own = {"spec": ModelSpec.parse(SPEC | {"partitions": 1}).document(), "workers": {}, "creation": "1-5.0"}
    for name in ("a", "b"):
        store.write("m", name, own, held(1))
    folder = store.path("m", "a").parent

    store.remove("m", "a", None)
    assert [path.name for path in folder.iterdir()] == ["b"]
    store.remove("m", "b", None)
    assert not folder.exists()
    store.remove("m", "b", None)
    (folder / ".c.0123abcd.part").mkdir(parents=True)
    store.sweep()
    assert list(folder.parent.iterdir()) == []
    store.write("m", "a", own, held(2))
    assert store.read("m", "a").versions == [2]


def test_an_older_checkpoint_is_not_restored_as_the_newest(tmp_path: Path) -> None:
    """While a manifest cannot be read, which checkpoint is `latest` or `best` is not guessed; names find the others."""
    store = CheckpointStore(tmp_path)
    own = {"spec": ModelSpec.parse(SPEC | {"partitions": 1}).document(), "workers": {}, "creation": "1-5.0"}
    for version, name in enumerate(("older", "newer", "newest")):
        metric = {"name": "accuracy", "value": min(version, 1)}
        store.write("m", name, own | {"created_s": float(version), "metric": metric}, held(version))
    (store.path("m", "empty")).mkdir()
    assert [store.read("m", which).versions for which in ("latest", "best")] == [[2], [1]]

    manifest = store.path("m", "newer") / checkpoint.MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:100])

    for which in ("latest", "best"):
        with pytest.raises(CorruptState, match=rf"newer/{checkpoint.MANIFEST}.* which one is {which}"):
            store.read("m", which)
    assert store.read("m", "older").versions == [0]


def test_a_name_that_another_creation_has_is_not_used() -> None:
    """If another creation uses a checkpoint's name, an automatic one takes the next number; a user's request fails."""
    d = Driver.with_model()
    conflict = problem("conflict", "exists already")
    names = []
    asked = d.send(lambda n: io.RequestCheckpoint(n, "m"))
    for taken in (True, True, False):
        effect = d.work.pop()
        assert isinstance(effect, io.WriteCheckpoint)
        names.append(effect.name)
        if taken:
            d.do(io.CheckpointFailed(effect.model, effect.name, conflict, taken=True))
        else:
            d.do(io.CheckpointWritten(effect.model, effect.name, 10, [0] * 4))
    assert names == ["000001-clock-0", "000002-clock-0", "000003-clock-0"]
    assert d.result(asked)["name"] == names[-1]
    asked = d.send(lambda n: io.RequestCheckpoint(n, "m", "final"))
    d.do(io.CheckpointFailed(ModelKey("m", 1), "final", conflict, taken=True))
    with pytest.raises(PsError, match="exists already"):
        d.result(asked)
    assert d.core._c.models["m"].checkpoints.error == "", "only who asked made a mistake"


async def test_deletions_of_a_checkpoint_are_one_after_the_other(tmp_path: Path) -> None:
    """The second of two deletions waits for the first and then finds nothing, so it takes no later one of that name."""
    d = saved(tmp_path)
    d.send(lambda n: io.RequestCheckpoint(n, "m", "mine"))
    d.do(io.CheckpointWritten(ModelKey("m", 1), "mine", 10, [0] * 4, scheduler="s"))
    asked: list[str] = []
    goes_on = asyncio.Event()

    async def remove(model: str, name: str, creation: str) -> bool:
        asked.append(name)
        await goes_on.wait()
        return True

    async with asyncio.TaskGroup() as group:
        jobs = with_runtime(d, tmp_path, group, others=Mock(remove=remove))
        deletions = [asyncio.ensure_future(jobs.delete("m", "mine")) for _ in range(2)]
        await asyncio.wait(deletions, timeout=0.1)
        goes_on.set()
        first, second = await asyncio.gather(*deletions, return_exceptions=True)

    assert asked == ["mine"]
    assert first is None
    assert isinstance(second, NotFoundError)


async def test_a_checkpoint_that_is_being_written_is_deleted_once_it_is_there(tmp_path: Path) -> None:
    """A deletion of a checkpoint that is being written leaves neither its files nor its entry in the list."""
    d = Driver.with_model(partitions=1)
    asked = d.send(lambda n: io.RequestCheckpoint(n, "m", "mine"))
    goes_on = asyncio.Event()

    async def states(*_: Any) -> list[tuple[StateFrame, PartitionState]]:
        await goes_on.wait()
        return held(1)

    async with asyncio.TaskGroup() as group:
        others = Mock(remove=AsyncMock(return_value=True))
        jobs = with_runtime(d, tmp_path, group, others=others, shards=Mock(states=states))
        jobs.start(d.work.pop())
        await asyncio.sleep(0)
        deletion = asyncio.ensure_future(jobs.delete("m", "mine"))
        await asyncio.wait({deletion}, timeout=0.1)
        goes_on.set()
        await deletion

    assert d.result(asked)["name"] == "mine"
    assert d.core.read.checkpoints("m") == []
    assert not (tmp_path / "checkpoints" / "m" / "mine").exists()


@pytest.mark.parametrize("holder", ["s", "t"])
async def test_a_checkpoint_that_is_being_read_is_deleted_once_it_is_restored(tmp_path: Path, holder: str) -> None:
    """The rule of `keep` deletes a checkpoint that is being read for a restore only once it has been read.

    Also one of which only another scheduler has the files.
    """
    d, store = Driver.with_model(partitions=1), CheckpointStore(tmp_path / "holder")
    d.send(lambda n: io.RequestCheckpoint(n, "m", "mine"))
    (effect,) = d.work
    assert isinstance(effect, io.WriteCheckpoint)
    store.write("m", "mine", effect.document, held(7))
    d.do(io.CheckpointWritten(effect.model, "mine", 10, [7], scheduler=holder))
    begun, goes_on, waits = asyncio.Event(), threading.Event(), list[bool]()
    loop = asyncio.get_running_loop()

    def slowly(model: str, name: str, *_: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        assert goes_on.wait(20)
        return store.read(model, name)

    async def read(*args: Any) -> Any:
        return await asyncio.to_thread(slowly, *args)

    async def remove(*args: Any) -> bool:
        store.remove(*args)
        return True

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        shards = Mock(restore=AsyncMock(return_value={}))
        jobs = with_runtime(d, tmp_path, group, others=Mock(read=read, remove=remove), shards=shards)
        if holder == "s":
            jobs._store = cast(Any, Mock(read=slowly, remove=store.remove))
        lock_of = jobs._alone

        def alone(model: str, name: str) -> asyncio.Lock:
            lock = lock_of(model, name)
            waits.append(lock.locked())
            if len(waits) == 2:
                goes_on.set()
            return lock

        jobs._alone = alone  # type: ignore[method-assign]
        restoring = asyncio.ensure_future(jobs.restore("m", "mine", "m", None))
        await begun.wait()
        jobs.start(io.RemoveCheckpoint("m", "mine", effect.document["creation"]))
        assert (await restoring).status == 200

    assert waits == [False, True]
    assert not store.exists("m", "mine")


@pytest.mark.parametrize("checks", [0, 1])
async def test_a_deposed_leader_leaves_the_files_of_its_successor(tmp_path: Path, checks: int) -> None:
    """A job that goes on after a pause neither replaces nor deletes a checkpoint that the next leader has written."""
    d, store = Driver.with_model(partitions=1), CheckpointStore(tmp_path)
    d.send(lambda n: io.RequestCheckpoint(n, "m", "mine"))
    (effect,) = d.work
    assert isinstance(effect, io.WriteCheckpoint)
    store.write("m", "mine", effect.document, held(7))
    over = problem("no_leader", "another one leads")
    async with asyncio.TaskGroup() as group:
        others = Mock(remove=AsyncMock(return_value=True))
        jobs = with_runtime(d, tmp_path, group, others=others, shards=Mock(states=AsyncMock(return_value=held(1))))
        jobs._runtime.check_leads = AsyncMock(side_effect=over)  # type: ignore[method-assign]
        jobs.start(effect)
        jobs.start(io.RemoveCheckpoint("m", "mine", effect.document["creation"]))
    async with asyncio.TaskGroup() as group:
        jobs = with_runtime(d, tmp_path, group, others=others)
        jobs._runtime.check_leads = AsyncMock(side_effect=[None] * checks + [over])  # type: ignore[method-assign]
        with refused_with("no_leader"):
            await jobs.delete("m", "mine")

    assert others.remove.await_count == checks
    assert store.read("m", "mine").versions == [7]
    assert [path.name for path in store.path("m", "mine").parent.iterdir()] == ["mine"]


def with_runtime(d: Driver, state_dir: Path, group: asyncio.TaskGroup, *, others: Any, shards: Any = None) -> Jobs:
    """Return the jobs of scheduler `s`, whose core this driver drives."""
    runtime, history = cast(Any, BlindRuntime(d, io.Tick, taken_in=True)), History(0.0)
    return Jobs(runtime, CheckpointStore(state_dir), others, shards, cast(Any, Mock()), history, group, "s")


def test_only_this_user_reads_checkpoints_below_a_folder_that_is_open(tmp_path: Path) -> None:
    """In a state directory that everybody can read, checkpoints are in a folder that is this user's alone."""
    (tmp_path / "open").mkdir(mode=0o755)
    document = {"spec": ModelSpec.parse(SPEC | {"partitions": 1}).document(), "workers": {}, "creation": "1-5.0"}

    _, path = CheckpointStore(tmp_path / "open").write("m", "mine", document, held(1))

    assert (Path(path).parents[1].stat().st_mode & 0o777, Path(path).parents[2]) == (0o700, tmp_path / "open")


def test_what_was_deleted_elsewhere_by_rule_is_deleted_here(tmp_path: Path) -> None:
    """Automatic checkpoints of the model that are not listed, and older than the newest listed one, are deleted.

    What users named, what is newer (a Redis may have lost its last writes), and what another creation wrote stays.
    """
    store = CheckpointStore(tmp_path)
    own = {"spec": ModelSpec.parse(SPEC | {"partitions": 1}).document(), "workers": {}, "creation": "1-5.0"}
    for name in ("000001-clock-10", "000002-clock-20", "000003-clock-30", "000005-clock-50", "mine"):
        store.write("m", name, own, held(1))
    store.write("m", "000001-clock-11", own | {"creation": "1-4.0"}, held(1))
    best = {"name": "000002-clock-20", "number": 2, "kept": False}
    newest = {"name": "000004-clock-40", "number": 4, "kept": False}  # at another scheduler
    named = {"name": "final", "number": 9, "kept": True}

    store.prune([("m", "1-5.0", [best, newest, named]), ("n", "2-5.0", [])])

    left = sorted(path.name for path in store.path("m", "mine").parent.iterdir())
    assert left == ["000001-clock-11", "000002-clock-20", "000005-clock-50", "mine"]
