"""The scheduler's runtime with a real core and Redis: what is published is stored, and decisions share writes."""

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from redis import Redis
from starlette.types import Message
from tests.refusals import refused_with
from tests.servers import free_port, running_redis

from paramserver.core.scheduler import io
from paramserver.core.scheduler.cluster import Cluster
from paramserver.core.scheduler.core import SchedulerCore
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError, problem
from paramserver.types import ModelKey
from paramserver_node import roles
from paramserver_node.redis import connect
from paramserver_node.settings import SchedulerSettings
from paramserver_scheduler import runtime as runtime_module
from paramserver_scheduler.app import make_app
from paramserver_scheduler.checkpoints import CheckpointStore
from paramserver_scheduler.hub import Hub, Published
from paramserver_scheduler.jobs import Jobs
from paramserver_scheduler.lease import Lease
from paramserver_scheduler.main import StopRequested, lead
from paramserver_scheduler.redis_memory import RedisMemory
from paramserver_scheduler.runtime import Runtime
from paramserver_scheduler.store import StateStore

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def emptied(redis_url: str) -> None:
    """Empty Redis before each test."""
    with Redis.from_url(redis_url) as plain:
        plain.flushall()


@asynccontextmanager
async def running(redis_url: str, seen: list[tuple[Mapping[str, Any], Any]]) -> AsyncIterator[Runtime]:
    """Run a runtime that decides; `seen` gets each published document with Redis' cluster field at that moment."""
    with Redis.from_url(redis_url) as plain:
        async with connect(redis_url) as redis:
            lease = Lease(redis, name="s", place="here", url="http://127.0.0.1:1")
            assert await lease.try_acquire()
            store = StateStore(redis, lease)
            documents = await store.open()
            core = SchedulerCore.restore(documents, time.monotonic(), store.term, time.time())
            hub = Hub(lambda document: seen.append((document, plain.hget("ps:state", "cluster"))))
            runtime = Runtime(core, store, hub)
            deciding = asyncio.ensure_future(runtime.run())
            try:
                yield runtime
            finally:
                deciding.cancel()
                with suppress(asyncio.CancelledError):
                    await deciding


def join(runtime: Runtime, name: str) -> Any:
    """An awaitable that joins a shard."""
    return runtime.ask(lambda n: io.JoinShard(n, name, ["http://127.0.0.1:1"]))


async def test_nothing_is_seen_before_it_is_stored(redis_url: str) -> None:
    """The epoch of each published map is already in Redis."""
    seen: list[tuple[Mapping[str, Any], Any]] = []
    async with running(redis_url, seen) as runtime:
        for i in range(5):
            answer = await join(runtime, f"early-{i}")
            assert answer.status == 201

    maps = [(document["map_epoch"], json.loads(stored)["map_epoch"]) for document, stored in seen]
    assert len(maps) >= 5
    assert all(stored >= published for published, stored in maps)


async def test_decisions_share_a_write(redis_url: str) -> None:
    """Two hundred concurrent joins are all answered with at most ten writes to Redis."""
    with Redis.from_url(redis_url) as plain:
        async with running(redis_url, []) as runtime:
            await join(runtime, "first")
            before = plain.info("commandstats")["cmdstat_evalsha"]["calls"]
            answers = await asyncio.gather(*(join(runtime, f"many-{i}") for i in range(200)))
            writes = plain.info("commandstats")["cmdstat_evalsha"]["calls"] - before

    assert {a.body["name"] for a in answers if a.body} == {f"many-{i}" for i in range(200)}
    assert 1 <= writes <= 10


async def test_a_feed_misses_nothing(redis_url: str) -> None:
    """A feed starts with the complete state and continues with every document published after it."""
    async with running(redis_url, []) as runtime:
        feeds: list[Any] = []
        asking = [join(runtime, f"a-{i}") for i in range(20)]
        opening = runtime.ask(
            lambda n: io.OpenFeed(n),
            on_reply=lambda a: feeds.append(runtime.hub.subscribe([*map(Published, (a.body or {})["documents"])])),
        )
        asking += [join(runtime, f"b-{i}") for i in range(20)]
        await asyncio.gather(*asking[:20], opening, *asking[20:])
        runtime.hub.close()
        documents = [json.loads(line) async for line in feeds[0].lines()]
        epochs = [d["map_epoch"] for d in documents if d["type"] == "map"]

    assert len(epochs) == 21
    assert epochs == list(range(epochs[0], epochs[0] + 21))


async def test_only_keys_of_models_that_are_gone_are_deleted(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Redis came back with older data, the keys of a deleted model go, and no other key does."""
    monkeypatch.setattr("paramserver_scheduler.jobs.SETTLE_S", 0.0)
    stay = {b"{a.b.2/0}:token", b"{a.b.2/10}:journal", b"{new.4/0}:lsn", b"ps:state", b"{a.1}:token", b"{a.1/x}:token"}
    unused: Any = Mock()
    with Redis.from_url(redis_url) as plain:
        for key in (*stay, "{a.b.1/0}:token", "{a.3/10}:journal", "{a.3/0}:part:1"):
            plain.set(key, 1)
        async with connect(redis_url) as redis, asyncio.TaskGroup() as group:
            jobs = Jobs(Mock(check_leads=AsyncMock()), unused, unused, unused, redis, unused, group, "s")
            jobs.start(io.ForgetOthers(frozenset([ModelKey("a.b", 2)]), 3))

        assert {*plain.keys()} == stay


async def test_who_hangs_up_is_forgotten(redis_url: str) -> None:
    """A request that waits for a model ends with an error when its client disconnects."""
    async with running(redis_url, []) as runtime:
        hung_up = asyncio.Event()

        async def receive() -> Message:
            await hung_up.wait()
            return {"type": "http.disconnect"}

        await join(runtime, "s")
        spec = {"name": "waits", "params": {"w": {"shape": [1]}}}
        asking = asyncio.ensure_future(runtime.ask(lambda n: io.CreateModel(n, spec, "x"), receive))
        async with asyncio.timeout(10):
            while not any(m["name"] == "waits" for m in runtime.core.read.models()):
                await asyncio.sleep(0)
        hung_up.set()

        with pytest.raises(PsError, match="the client disconnected"):
            await asking


async def test_closing_answers_who_waits_for_redis_too(redis_url: str) -> None:
    """Closing answers requests that wait for Redis, even if Redis comes back at the same moment."""
    async with running(redis_url, []) as runtime:
        runtime.note_redis("Redis does not answer")
        asking = asyncio.ensure_future(join(runtime, "a"))
        await asyncio.sleep(0)  # it has started, and waits
        runtime.note_redis("")
        runtime.close(problem("no_leader", "another one leads"))
        with pytest.raises(PsError, match="another one leads"):
            async with asyncio.timeout(10.0):
                await asking


async def test_closing_answers_everyone(redis_url: str) -> None:
    """When the runtime is closed, waiting and new requests are refused, and feeds end."""
    async with running(redis_url, []) as runtime:
        await join(runtime, "s")
        feed = runtime.hub.subscribe([])
        spec = {"name": "never", "params": {"w": {"shape": [1]}}}
        asking = asyncio.ensure_future(runtime.ask(lambda n: io.CreateModel(n, spec, "x")))
        await asyncio.sleep(0)
        runtime.close(problem("unavailable", "stopping"))

        with pytest.raises(PsError, match="stopping"):
            await asking
        with pytest.raises(PsError, match="stopping"):
            await join(runtime, "late")
        assert [line async for line in feed.lines()] == []


async def test_what_is_decided_is_answered_before_a_leader_that_is_told_to_stop_ends(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose decision is on its way to Redis gets its answer; what comes later is refused."""
    monkeypatch.setattr(runtime_module, "FINISH_S", 30.0)
    http, stop = make_app(), asyncio.Event()
    http.state.forwarder = None  # nothing is forwarded
    http.state.checkpoints = CheckpointStore(tmp_path)
    async with connect(redis_url) as redis:
        lease = Lease(redis, name="s", place="here", url="http://127.0.0.1:1")
        assert await lease.try_acquire()
        leading = asyncio.ensure_future(lead(SchedulerSettings(), redis, redis, http, lease, stop))
        async with asyncio.timeout(20):
            while http.state.service is None:
                assert not leading.done(), leading
                await asyncio.sleep(0)
        runtime = http.state.service.runtime
        asking = asyncio.ensure_future(runtime.ask(lambda n: io.JoinPool(n, None, []), changes=True))
        await asyncio.sleep(0)  # it has started, and waits
        assert runtime.core.read.pool(time.monotonic())

        stop.set()
        await asyncio.sleep(0)  # the leader knows
        with pytest.raises(PsError, match="no longer the leader"):
            await join(runtime, "late")
        assert (await asking).status == 201
        with pytest.raises(ExceptionGroup) as ended:
            await leading
    assert ended.group_contains(StopRequested)


@pytest.mark.parametrize(("changes", "told"), [(True, "in_doubt"), (False, "no_leader")])
async def test_what_may_be_stored_as_a_leader_ends_is_in_doubt(redis_url: str, changes: bool, told: str) -> None:
    """While Redis does not confirm a decision, the end of the leader leaves its request in doubt."""
    with Redis.from_url(redis_url) as plain:
        async with running(redis_url, []) as runtime:
            plain.client_pause(60_000, all=False)  # writes wait
            try:
                asking = asyncio.ensure_future(runtime.ask(lambda n: io.JoinPool(n, None, []), changes=changes))
                await asyncio.sleep(0)  # it has started, and waits
                runtime.close(problem("no_leader", "another one leads"))
                with refused_with(told):
                    await asking
            finally:
                plain.client_unpause()


def create(runtime: Runtime, name: str, *, changes: bool = False) -> Any:
    """An awaitable that creates a model."""
    spec = {"name": name, "params": {"w": {"shape": [1]}}}
    return runtime.ask(lambda n: io.CreateModel(n, spec, "x"), changes=changes)


@pytest.mark.parametrize("gone", ["the leader", "Redis"])
async def test_a_creation_that_is_stored_and_not_served_yet_is_in_doubt(
    redis_url: str, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the leader ends before a new model is served, or Redis fails, its creator is not told that there is none."""
    monkeypatch.setattr(runtime_module, "STORE_WAIT_S", 0.0)
    monkeypatch.setattr(runtime_module, "RETRY_S", 0.0)
    async with running(redis_url, []) as runtime, asyncio.timeout(20):
        await join(runtime, "s")
        created = asyncio.ensure_future(create(runtime, "m", changes=True))
        await asyncio.sleep(0)  # it has started, and waits
        await join(runtime, "t")  # what came before is stored by now
        with Redis.from_url(redis_url) as plain:
            assert plain.hget("ps:state", "model:m") is not None

        if gone == "Redis":
            refusal = problem("storage_unavailable", "Redis refuses: OOM")
            monkeypatch.setattr(runtime._store, "write", AsyncMock(side_effect=refusal))
            with refused_with("storage_unavailable"):
                await join(runtime, "u")
        else:
            ended = problem("no_leader", "another one leads")
            await runtime.finish(ended)
            runtime.close(ended)
        with refused_with("in_doubt"):
            await created


async def test_who_waits_for_a_checkpoint_is_not_refused_for_a_write_of_something_else(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis may refuse a write while a checkpoint is written: the request stays open until that is done.

    Refused meanwhile, it would be sent again, and find its own checkpoint there.
    """
    monkeypatch.setattr(runtime_module, "STORE_WAIT_S", 0.0)
    monkeypatch.setattr(runtime_module, "RETRY_S", 0.0)
    begun: asyncio.Queue[io.Effect] = asyncio.Queue()
    async with running(redis_url, []) as runtime, asyncio.timeout(20):
        runtime.jobs = Mock(start=begun.put_nowait)
        await join(runtime, "s")
        created = asyncio.ensure_future(create(runtime, "m"))
        await asyncio.sleep(0)  # it has started, and waits until it is served
        model = runtime.core._c.models["m"]
        rows = [["m", model.generation, i, owner.token, 0, 0, 1, 0, 0, 0] for i, owner in enumerate(model.owners)]
        await runtime.ask(lambda n: io.ShardHeartbeat(n, "s", 1, partitions=rows))
        await created
        asked = asyncio.ensure_future(runtime.ask(lambda n: io.RequestCheckpoint(n, "m"), changes=True))
        effect = await begun.get()
        assert isinstance(effect, io.WriteCheckpoint)

        with monkeypatch.context() as full:
            refusal = problem("storage_unavailable", "Redis refuses: OOM")
            full.setattr(runtime._store, "write", AsyncMock(side_effect=refusal))
            with refused_with("storage_unavailable"):
                await join(runtime, "t")
        assert not asked.done()
        runtime.send(io.CheckpointWritten(effect.model, effect.name, 10, [0] * len(rows)))

        assert (await asked).status == 201


async def test_a_bug_that_has_changed_nothing_is_its_request_alone(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug that has changed nothing fails its own request with `internal`; others are served as before."""
    async with running(redis_url, []) as runtime:
        await join(runtime, "s")
        with monkeypatch.context() as broken:
            broken.setattr(ModelSpec, "parse", Mock(side_effect=ZeroDivisionError))
            with pytest.raises(PsError) as met:
                await create(runtime, "m")

        assert met.value.code == "internal"
        assert (await join(runtime, "t")).status == 201


async def test_a_bug_that_leaves_something_half_decided_ends_the_scheduler(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in the middle of a decision ends the scheduler: nothing of it is stored, and all requests are answered."""
    told: list[str] = []

    async def until_it_ends(plain: Redis) -> None:
        async with running(redis_url, []) as runtime:
            await join(runtime, "s")
            waits = asyncio.ensure_future(create(runtime, "waits"))
            async with asyncio.timeout(10):
                while plain.hget("ps:state", "model:waits") is None:
                    await asyncio.sleep(0)
            monkeypatch.setattr(Cluster, "save_clock", Mock(side_effect=ZeroDivisionError))
            for asking in (create(runtime, "half"), waits, join(runtime, "late")):
                with pytest.raises(PsError) as met:
                    await asking
                told.append(met.value.code)

    with Redis.from_url(redis_url) as plain:
        with pytest.raises(ExceptionGroup) as ended:
            await until_it_ends(plain)
        assert ended.group_contains(ZeroDivisionError)
        assert told == ["internal", "unavailable", "unavailable"]
        assert plain.hget("ps:state", "model:half") is None


class State(dict[str, int]):
    """A worker's state, in a type of its own so that its instances can be counted."""


def held() -> int:
    """Number of workers' states and replies in memory."""
    gc.collect()
    return sum(type(o) in (State, io.Reply) for o in gc.get_objects())  # isinstance would ask lazy objects


@pytest.fixture
def frozen() -> Iterator[None]:
    """Hide the objects that there are already from the garbage collector: they take most of the time of a count."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("frozen")
async def test_what_waits_for_redis_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While Redis is away, repeated worker states do not accumulate; the last one is stored afterwards."""
    monkeypatch.setattr(runtime_module, "STORE_WAIT_S", 0.02)
    monkeypatch.setattr(runtime_module, "RETRY_S", 0.01)
    port = free_port()
    with ExitStack() as server:
        url = server.enter_context(running_redis(tmp_path, port))
        async with running(url, []) as runtime:
            await join(runtime, "s")
            runtime.send(io.CreateModel(0, {"name": "m", "params": {"w": {"shape": [1]}}}, "x"))
            await runtime.ask(lambda n: io.JoinWorker(n, "m", "a"))
            server.close()
            counts = []
            for i in range(16):
                await runtime.ask(lambda n, i=i: io.WorkerHeartbeat(n, "m", "m/a", 1, state=State(i=i)))  # type: ignore[misc]
                with pytest.raises(PsError, match="Redis"):
                    await runtime.ask(lambda n: io.OpenFeed(n))
                counts.append(held())
            server.enter_context(running_redis(tmp_path, port))
            with Redis.from_url(url) as plain:
                async with asyncio.timeout(20):
                    while json.loads(plain.hget("ps:state", "worker:m:m/a") or "{}").get("state") != {"i": 15}:
                        await asyncio.sleep(0)

    assert 0 < max(counts[8:]) <= max(counts[:8]) <= 8


def test_every_route_has_a_role() -> None:
    """Every route of the scheduler has a role; internal ones are for nodes and admins, but for checkpoints' files."""
    app = make_app()
    found = {str(getattr(route, "path", route)): roles.role_of(route) for route in roles.routes(app)}

    assert len(found) > 25
    assert None not in found.values()
    assert found["/"] == "open"
    open_to_readers = {p for p, role in found.items() if p.startswith("/internal") and role not in ("node", "admin")}
    assert open_to_readers == {"/internal/checkpoints/{m}/{name}/{file}"}


async def test_a_scheduler_leads_although_its_folder_of_checkpoints_cannot_be_read(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that answers no question, as on a mount whose server is gone, is warned of, and the scheduler leads."""
    http, stop = make_app(), asyncio.Event()
    http.state.forwarder = None  # nothing is forwarded
    http.state.checkpoints = CheckpointStore(tmp_path / ("n" * 300))  # a name too long for any file system: an OSError
    async with connect(redis_url) as redis, connect(redis_url, timeout_s=None) as bulk_redis:
        lease = Lease(redis, name="s", place="here", url="http://127.0.0.1:1")
        assert await lease.try_acquire()
        leading = asyncio.ensure_future(lead(SchedulerSettings(), redis, bulk_redis, http, lease, stop))
        try:
            async with asyncio.timeout(20):
                while http.state.service is None and not leading.done():
                    await asyncio.sleep(0.01)
        finally:
            stop.set()
            with pytest.RaisesGroup(StopRequested):
                await leading

    assert any("checkpoints.stay" in message and "too long" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("policy", "said"),
    [("noeviction", False), ("volatile-lru", False), ("allkeys-lru", True), ("allkeys-random", True)],
)
async def test_a_redis_that_would_evict_what_is_stored_is_a_problem(redis_url: str, policy: str, said: bool) -> None:
    """The status names a policy by which Redis deletes stored state once it is full, before it has done so.

    No key here has a time to live, so the policies that delete only such keys delete nothing.
    """
    memory = RedisMemory()
    with Redis.from_url(redis_url) as plain:
        plain.config_set("maxmemory-policy", policy)
        async with connect(redis_url) as redis, asyncio.timeout(20):
            watching = asyncio.ensure_future(memory.watch(redis))
            try:
                while memory.used_bytes is None:
                    await asyncio.sleep(0.01)
            finally:
                watching.cancel()
                plain.config_set("maxmemory-policy", "noeviction")
    assert (policy in memory.problem) is said
