"""The history behind the status page: what is a problem, events made from changes, and the stream of statuses."""

import asyncio
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

import paramserver
from paramserver import limits
from paramserver.core.scheduler import io
from paramserver.core.scheduler.runs import RESTARTS_MAX
from paramserver.errors import PsError, problem
from paramserver.types import ModelKey
from paramserver_scheduler import overview, status_broadcast, watch
from paramserver_scheduler.history import History
from paramserver_scheduler.redis_memory import RedisMemory
from paramserver_scheduler.rings import Grid
from paramserver_scheduler.schema import ClusterStatus, ModelStatus, NodeStatus, RunStatus, Status
from paramserver_scheduler.service import Service
from paramserver_scheduler.status_broadcast import StatusBroadcast
from paramserver_scheduler.telemetry import ClusterMetrics

from .scheduling import EPOCH_S, Driver
from .test_many_models import of_models
from .test_rings import read

NOW = 1_700_000_000


def status(now: float, *, shards: dict[str, tuple[str, int]], runs: dict[str, str], redis: Any = "ok") -> Status:
    nodes = [
        NodeStatus(
            name=name, role="shard", state=state, alive=state in ("active", "draining"), addresses=[], epoch=epoch,
            heartbeat_age_s=0.5, cpu_cores=0.25,
        )
        for name, (state, epoch) in shards.items()
    ]  # fmt: skip
    made = [
        RunStatus(
            id=r, name="", model="m", entry="a:b", state=state, reason="", workers=1, placed=1, created_s=now,
            ran_s=1.0, clocks=1, stop={}, progress=None,
        )
        for r, state in runs.items()
    ]  # fmt: skip
    cluster = ClusterStatus(
        state="ok", problems=[], version="0", term=1, map_epoch=1, uptime_s=1.0, redis=redis, now=now
    )
    return Status(cluster=cluster, nodes=nodes, models=[], runs=made, events=[])


def model(name: str, pushes_per_s: float) -> ModelStatus:
    times = dict.fromkeys(("push_p50_s", "push_p99_s", "pull_p50_s", "pull_p99_s", "lag", "lr"), None)
    return ModelStatus(
        name=name, generation=1, revision=1, timeline=0, state="ready", mode="async", optimizer="sgd", created_s=NOW,
        parameters=1, elements=1, partitions=1, served=1, shards=[], owners=[], loading=[], moving=[], version=3,
        durable_version=3, durable_behind=0, durable_behind_s=0.0, clock=0, waiting_for=[], updates_per_s=pushes_per_s,
        pushes_per_s=pushes_per_s, pulls_per_s=0.0, in_bytes_per_s=0.0, out_bytes_per_s=0.0, workers=[], latest={},
        not_finite={}, values_kept=0, **times,
    )  # fmt: skip


def test_a_model_at_work_has_series_however_many_are_idle() -> None:
    """With more idle models than series allowed, a model that gets pushes is recorded from its first second."""
    history, idle = History(0.0), [model(f"idle-{i}", 0.0) for i in range(limits.STATUS_SERIES_MAX)]
    for second in range(3):
        now = status(NOW + second, shards={}, runs={})
        busy = [model("busy", 5.0)] if second == 2 else []
        history.record(now.model_copy(update={"models": idle + busy}), float(second))

    grid = Grid.of(NOW, NOW + 2, 1, NOW + 2)
    ((_, values),) = read(history.rings, "model.pushes_per_s", {"model": "busy"}, grid)
    assert values == [None, None, 5.0]
    assert len(read(history.rings, "model.version", {"model": "idle-0"}, grid)) == 1


async def test_workers_that_are_gone_are_shown_and_not_counted() -> None:
    """A worker that left is listed for a while, and not counted as live."""
    d, service = of_models(1)
    for name in ("a", "b"):
        d.ask(partial(io.JoinWorker, model="m00", name=name))
    d.ask(lambda n: io.LeaveWorker(n, "m00", "m00/b", None))

    found = await overview.describe(service)

    assert {w.worker: w.state for w in found.models[0].workers} == {"m00/a": "active", "m00/b": "left"}
    service.history.record(found, d.now)
    grid = Grid.of(found.cluster.now, found.cluster.now, 1, found.cluster.now)
    for series in ("cluster.workers", "model.workers"):
        ((_, values),) = read(service.history.rings, series, {}, grid)
        assert values == [1.0]
    assert told(found, "paramserver_model_workers", "model") == {"m00": 1}


async def test_a_run_that_has_ended_makes_no_progress() -> None:
    """The clocks of a later run of the same model are not counted for one that was stopped."""
    d, service = of_models(1)
    worker = d.ask(partial(io.JoinWorker, model="m00", name="a"))
    create = partial(io.CreateRun, model="m00", entry="a.b:c", stop={"clocks": 20})

    async def progress() -> list[float | None]:
        return [run.progress for run in (await overview.describe(service)).runs]

    d.ask(create)
    d.send(partial(io.ReportClock, model="m00", worker=worker["worker"], epoch=1, clock=5))
    assert await progress() == [0.0]  # nobody has taken a place
    d.ask(partial(io.PatchRun, run="run-1", state="stopped"))
    d.ask(create)
    d.send(partial(io.ReportClock, model="m00", worker=worker["worker"], epoch=1, clock=15))
    assert await progress() == [0.0, None]


async def test_an_exception_that_ends_no_run_is_an_event() -> None:
    """A function that is called again leaves a trace: who raised, the last line of what, and how often in all."""
    d, service = of_models(1)
    d.ask(partial(io.CreateRun, model="m00", entry="a.b:c"))
    d.ask(partial(io.JoinPool, name="p", allow=["a"]))
    for error in ("", "Traceback\n  File\nValueError: no \x1b[2J data" + 1000 * "." + "\n", "ValueError: the end"):
        if error:
            d.ask(partial(io.PlaceDone, run="run-1", place=0, member="p", epoch=1, error=error))
        for _ in range(2):
            service.history.record(await overview.describe(service), d.now)

    assert [(e.kind, e.level, e.text[:58]) for e in service.history.events] == [
        ("run_restarted", "bad", "run run-1 goes on after an exception of worker 0: ValueErr"),
        ("run_restarted", "bad", "run run-1 goes on after an exception of worker 0: ValueErr"),
    ]
    assert service.history.events[0].text.endswith(": ValueError: the end")
    assert "no ?[2J data..." in service.history.events[1].text
    assert len(service.history.events[1].text) < 300
    assert d.core.read.run("run-1")["error"] == "worker 0: ValueError: the end"


def start_runs(d: Driver) -> None:
    """Start a long run, then one more short run than a status shows, each of which ends."""
    d.ask(partial(io.CreateRun, model="m00", entry="a.b:c"))
    for number in range(overview.RUNS + 1):
        d.ask(partial(io.CreateRun, model="m01", entry="a.b:c"))
        d.ask(partial(io.PatchRun, run=f"run-{number + 2}", state="stopped"))


async def test_a_long_run_is_shown_however_many_shorter_ones_have_ended_since() -> None:
    """The status has every run that has not ended, and of the others the newest."""
    d, service = of_models(2)
    start_runs(d)

    shown = [run.id for run in (await overview.describe(service)).runs]

    assert shown == [*(f"run-{number}" for number in range(overview.RUNS + 2, 2, -1)), "run-1"]


async def test_the_end_of_a_long_run_is_an_event() -> None:
    """A run that ends after the newest others have begun is in one more status, from which its event is made."""
    d, service = of_models(2)
    start_runs(d)
    service.history.record(await overview.describe(service), d.now)
    d.ask(partial(io.PatchRun, run="run-1", state="stopped"))
    shown = []
    for _ in range(2):
        found = await overview.describe(service)
        service.history.record(found, d.now)
        shown.append("run-1" in {run.id for run in found.runs})

    assert shown == [True, False]
    assert [e.text for e in service.history.events] == ["run run-1 is stopped: stopped by request"]


async def test_what_is_not_durable_is_that_of_the_partition_with_most() -> None:
    """Pushes that leave out a partition's parameters keep the model's version low; what they did may be lost."""
    d, service = of_models(1)
    ((name, epoch),) = d.shards.items()
    owned = [(p["index"], p["incarnation"]) for p in d.core.read.model("m00")["partitions"]]
    rows = [["m00", 1, i, token, *((20, 5) if i == 0 else (0, 0)), 0, 0, 0, 0] for i, token in owned]
    d.ask(lambda n: io.ShardHeartbeat(n, name, epoch, {}, rows))

    (found,) = (await overview.describe(service)).models

    assert (found.version, found.durable_version, found.durable_behind) == (0, 0, 15)


async def test_prometheus_reads_how_long_a_partition_has_stored_nothing() -> None:
    """The time grows while one partition stores nothing more, although another does; it ends with the next snapshot."""
    d, service = of_models(1)
    ((name, epoch),) = d.shards.items()
    tokens = {p["index"]: p["incarnation"] for p in d.core.read.model("m00")["partitions"]}

    async def after_s(seconds: float, stuck: tuple[int, int], other: tuple[int, int]) -> tuple[float, float]:
        d.now += seconds
        rows = [["m00", 1, i, token, *(stuck if i == 0 else other), 0, 0, 0, 0] for i, token in tokens.items()]
        d.ask(lambda n: io.ShardHeartbeat(n, name, epoch, {}, rows))
        cast(Any, service).now = d.now
        found = await overview.describe(service)
        (behind,) = told(found, "paramserver_model_durable_behind_versions").values()
        (behind_s,) = told(found, "paramserver_model_durable_behind_seconds").values()
        return behind, behind_s

    assert await after_s(1.0, (100, 100), (1, 1)) == (0, 0)
    assert await after_s(1.0, (120, 100), (9, 1)) == (20, 1.0)
    assert await after_s(2.0, (140, 100), (9, 9)) == (40, 3.0)
    assert await after_s(1.0, (160, 150), (20, 9)) == (11, 1.0)
    assert await after_s(1.0, (160, 160), (20, 20)) == (0, 0)
    d.ask(lambda n: io.StartRestore(n, "m00"))
    assert await after_s(60.0, (170, 160), (20, 20)) == (10, 0)  # what it sets is stored once it has ended


async def test_a_dead_shard_is_a_problem_until_it_is_no_longer_listed() -> None:
    """Status and metrics show a dead shard for as long as `GET /shards` lists it, or until it joins again."""
    d, service = of_models(1)
    d.shard("s1")
    del d.shards["s1"]

    async def shown(after_s: float) -> tuple[set[str], list[str], dict[str, float]]:
        d.wait(after_s)
        found = await overview.describe(cast(Service, SimpleNamespace(**(vars(service) | {"now": d.now}))))
        assert [n.name for n in found.nodes] == [s["name"] for s in d.core.read.shards(d.now)]
        return {n.name for n in found.nodes}, found.cluster.problems, told(found, "paramserver_shards", "state")

    names, problems, counted = await shown(limits.LEASE_S + 1)
    assert (names, counted["dead"]) == ({"s0", "s1"}, 1)
    assert "Shard s1 is dead, its last heartbeat was 6 s ago" in problems[0]
    names, problems, counted = await shown(limits.SHARD_DEAD_LISTED_S - 60)
    assert (names, counted["dead"]) == ({"s0", "s1"}, 1)
    assert "its last heartbeat was 59 min ago" in problems[0]
    assert await shown(60) == ({"s0"}, [], {"active": 1, "draining": 0, "left": 0, "dead": 0})
    d.shard("s1")
    assert (await shown(0))[2]["active"] == 2


async def test_a_clock_that_is_set_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Status, events and time series are of the machine's present time, though its clock is set while a leader leads.

    Series that would then reach into the future are forgotten: nothing could be added to them for as long.
    """
    d, service = of_models(1)
    service = cast(Service, SimpleNamespace(**(vars(service) | {"runtime": SimpleNamespace(redis_away="", send=d.do)})))
    service.history.wall_offset_s = EPOCH_S
    unix_s = EPOCH_S + d.now
    monkeypatch.setattr(watch, "monotonic", lambda: d.now)
    monkeypatch.setattr(watch, "time", lambda: unix_s)

    async def series_after(step_s: float) -> int:
        nonlocal unix_s
        unix_s += step_s
        watch.follow_clock(service)
        found = await overview.describe(service)
        assert found.cluster.now == unix_s
        service.history.record(found, d.now)
        service.history.add(d.now, "kind", f"after {step_s}")
        assert service.history.events[0].at == unix_s
        grid = Grid.of(EPOCH_S, EPOCH_S + 86400, 60, EPOCH_S + 86400)
        ((_, values),) = read(service.history.rings, "cluster.shards", {}, grid)
        return sum(v is not None for v in values)

    assert await series_after(0.0) == 1
    assert await series_after(7200.0) == 2
    assert await series_after(-5.0) == 2, "the newest slot is soon reached again"
    assert await series_after(-3600.0) == 1


async def test_a_shard_of_another_version_is_a_problem() -> None:
    """Shards that joined with another version than the leader's are named, because nodes are upgraded together."""
    d, service = of_models(1)
    for name, version in (("s1", "0.0.9"), ("s2", paramserver.__version__), ("s3", "0.0.9"), ("s4", "")):
        d.ask(partial(io.JoinShard, name=name, addresses=[f"http://{name}:1"], version=version))

    (problem,) = (await overview.describe(service)).cluster.problems

    assert "s1, s3" in problem
    assert f"version 0.0.9, the leading scheduler {paramserver.__version__}" in problem


async def test_shards_that_could_not_take_the_partitions_of_a_lost_one_are_a_problem() -> None:
    """The status says once, before a shard is lost, that the others lack the memory for its partitions, and what to do.

    Not for a few MiB, by which a process's memory varies anyway, nor while the limit of a shard is not known.
    """
    d, service = of_models(0)
    d.shard("s1")
    spec = {"name": "big", "params": {"w": {"shape": [50 << 20]}}, "partitions": 8, "optimizer": {"name": "momentum"}}
    d.send(partial(io.CreateModel, spec=spec, nonce="secret"))

    async def problems(free_mib: int, limit_mib: int = 1000) -> list[str]:
        for name in d.shards:
            d.beat(name, memory={"limit_bytes": limit_mib << 20, "used_bytes": (limit_mib - free_mib) << 20})
        return (await overview.describe(service)).cluster.problems

    assert await problems(400) == []
    assert await problems(390) == []
    (problem,) = await problems(100)
    assert "400 MiB" in problem
    assert "100 MiB" in problem
    assert "add a shard" in problem
    assert await problems(0, limit_mib=0) == []
    del d.shards["s1"]
    d.wait(limits.LEASE_S + 1)
    assert not any("MiB" in p for p in await problems(0)), "nobody is left to take anything"


async def test_prometheus_reads_how_many_problems_there_are() -> None:
    """The number of problems that the status lists is a metric, so a checkpoint that fails can raise an alert."""
    d, service = of_models(2)
    assert told(await overview.describe(service), "paramserver_problems") == {"": 0}
    for model in ("m00", "m01"):
        d.send(partial(io.RequestCheckpoint, model=model, name="mine"))
        (asked,) = [e for e in d.work if isinstance(e, io.WriteCheckpoint) and e.model.name == model]
        d.do(io.CheckpointFailed(asked.model, asked.name, problem("disk_refuses", "the disk is full")))

    found = await overview.describe(service)

    assert [p.partition(":")[0] for p in found.cluster.problems] == ["Model m00", "Model m01"]
    assert told(found, "paramserver_problems") == {"": 2}


async def test_prometheus_reads_which_models_are_paused() -> None:
    """A model whose run is paused has workers and a version that stands still, which is not to raise an alert."""
    d, service = of_models(2)
    for model in ("m00", "m01"):
        d.ask(partial(io.CreateRun, model=model, entry="a.b:c"))
    d.ask(partial(io.PatchRun, run="run-1", state="paused"))

    assert told(await overview.describe(service), "paramserver_model_paused", "model") == {"m00": 1, "m01": 0}


async def test_a_redis_that_is_nearly_full_is_a_problem() -> None:
    """From nine tenths of its `maxmemory` on, Redis is a problem of the cluster; without a limit it never is."""
    _, service = of_models(1)
    memory = service.redis_memory
    assert told(await overview.describe(service), "paramserver_redis_memory_bytes") == {}
    memory.used_bytes, memory.limit_bytes = 899, 1000
    found = await overview.describe(service)
    assert found.cluster.problems == []
    assert told(found, "paramserver_redis_memory_limit_bytes") == {"": 1000}
    memory.used_bytes = 950
    found = await overview.describe(service)
    assert [p.partition(";")[0] for p in found.cluster.problems] == ["Redis uses 95 % of its maxmemory"]
    assert told(found, "paramserver_redis_memory_bytes") == {"": 950}
    memory.limit_bytes = None
    assert (await overview.describe(service)).cluster.problems == []


async def test_the_watch_of_redis_ends_though_its_client_has_lost_the_cancellation() -> None:
    """It ends even if the Redis client swallows the cancellation; else a scheduler that is told to stop never would."""
    asked = asyncio.Event()

    class Swallowing:
        async def info(self, _: str) -> dict[str, int]:
            if not asked.is_set():
                asked.set()
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
            return {"used_memory": 1, "maxmemory": 0}

    watching = asyncio.ensure_future(RedisMemory().watch(cast(Any, Swallowing())))
    await asked.wait()
    watching.cancel()
    await asyncio.wait({watching}, timeout=4.0)
    assert watching.cancelled()


async def test_runs_that_end_are_counted_however_many_have_ended_before() -> None:
    """Each run that ends is counted under its state; the gauge of the newest runs stays at 20 once all have failed."""
    d, service = of_models(1)
    member = d.ask(lambda n: io.JoinPool(n, "p", ["a"]))

    async def fail() -> Status:
        run = d.ask(lambda n: io.CreateRun(n, "m00", "a:b"))
        for _ in range(RESTARTS_MAX + 1):
            d.ask(lambda n: io.PlaceDone(n, run["id"], 0, member["member"], member["epoch"], "boom"))
        return await overview.describe(service)

    for _ in range(overview.RUNS):
        found = await fail()
    before = told(found, "paramserver_runs", "state"), told(found, "paramserver_runs_ended", "state")
    found = await fail()

    assert before == (
        {"waiting": 0, "running": 0, "paused": 0, "finished": 0, "failed": 20, "stopped": 0},
        {"finished": 0, "failed": 20, "stopped": 0},
    )
    assert told(found, "paramserver_runs", "state")["failed"] == 20
    assert told(found, "paramserver_runs_ended", "state") == {"finished": 0, "failed": 21, "stopped": 0}


def told(found: Status, metric: str, label: str = "") -> dict[str, float]:
    """Return what Prometheus reads of that metric, by the value of the label."""
    metrics = ClusterMetrics()
    metrics.status = found
    return {s.labels.get(label, ""): s.value for m in metrics.collect() if m.name == metric for s in m.samples}


async def test_results_that_were_not_finite_are_a_problem() -> None:
    """What shards tell of values kept is summed up for the model, and stated with what to do."""
    d, service = of_models(1)
    for name in d.shards:
        d.beat(name, metrics={"models": {"m00": {"values_kept": 3}}})

    found = await overview.describe(service)

    assert found.models[0].values_kept == 3
    (problem,) = found.cluster.problems
    assert "m00" in problem
    assert "lower the learning rate" in problem


def test_results_that_were_not_finite_are_an_event() -> None:
    """The first of a model's results that are discarded is told, and again the first after a minute without any."""
    history, told = History(0.0), []
    for second, kept in enumerate((0, 2, 2, 3, 0, 4)):
        diverging = model("m", 5.0).model_copy(update={"values_kept": kept})
        now = status(NOW + second, shards={}, runs={})
        history.record(now.model_copy(update={"models": [diverging]}), float(second))
        told += [(e.kind, e.level) for e in history.events if e.at == second]

    assert told == [("values_kept", "bad")] * 2
    assert "model m " in history.events[0].text


def test_events_are_what_differs_from_the_second_before() -> None:
    """Each change of a shard, run or Redis since the last second is one event with a level; the first has none."""
    history = History(0.0)
    seconds: list[dict[str, Any]] = [
        {"shards": {"a": ("active", 1), "b": ("active", 1)}, "runs": {"run-1": "running"}},
        {"shards": {"a": ("dead", 1), "b": ("draining", 1)}, "runs": {"run-1": "running"}, "redis": "away"},
        {"shards": {"a": ("dead", 1), "b": ("left", 1)}, "runs": {"run-1": "failed", "run-2": "waiting"}},
        {"shards": {"a": ("active", 2), "b": ("left", 1)}, "runs": {"run-1": "failed", "run-2": "running"}},
    ]
    told: list[list[tuple[str, str]]] = []
    for i, second in enumerate(seconds):
        before = len(history.events)
        history.record(status(NOW + i, **second), float(i))
        told.append(sorted((e.kind, e.level) for e in list(history.events)[: len(history.events) - before]))

    assert told == [
        [],
        [("redis_away", "bad"), ("shard_dead", "bad"), ("shard_draining", "info")],
        [("redis_back", "good"), ("run_failed", "bad"), ("run_waiting", "info"), ("shard_left", "info")],
        [("run_running", "good"), ("shard_joined", "good")],
    ]
    grid = Grid.of(NOW, NOW + 3, 1, NOW + 3)
    ((_, alive),) = read(history.rings, "cluster.shards", {}, grid)
    assert alive == [2, 1, 0, 1]
    ((_, load),) = read(history.rings, "node.cpu_cores", {"node": "a"}, grid)
    assert load == [0.25, None, None, 0.25]


@pytest.mark.parametrize("shards", [1, 2])
def test_only_a_return_to_an_earlier_state_is_told_as_a_rollback(shards: int) -> None:
    """A model that is made synchronous or restored is told as that; one that a shard's death takes back is bad news."""
    d, history = Driver.with_model(), History(0.0)
    if shards == 1:
        d.ask(lambda n: io.LeaveShard(n, "s0", d.shards.pop("s0")))
        d.beats()
    history.begin(d.core.read)
    seen = len(d.published)
    d.ask(lambda n: io.PatchModel(n, "m", {"consistency": {"mode": "sync"}}))
    d.beats()
    clock = d.document()["clock"]
    d.ask(lambda n: io.StartRestore(n, "m"))
    d.ask(lambda n: io.RestoreFinished(n, ModelKey("m", 1), None, 50))
    d.beats()
    d.shard("s1")  # a restart: its partitions are lost
    for document in d.published[seen:]:
        if document["type"] == "model":
            history.note(document, d.now)

    what = "was restored, or has lost a part of its journal, and continues"
    told = [(e.kind, e.text, e.level) for e in reversed(history.events) if e.kind != "model_changed"]
    assert told == [
        ("model_in_sync", f"model m is synchronous from clock {clock} on", "info"),
        ("model_restored", f"model m {what} at clock 50", "info"),
        ("model_rolled_back", f"model m was rolled back to clock {d.document()['clock']}", "bad"),
    ]


def test_what_is_shown_is_of_the_newest_second_after_the_clock_was_set_back() -> None:
    """The newest value of a metric is not averaged with those that were reported before the clock was set back."""
    d = Driver.with_model()
    for offset_s, loss in ((300.0, 2.0), (300.0, 4.0), (0.0, 0.25), (0.0, 0.75)):
        d.do(io.ClockStepped(offset_s))
        d.ask(lambda n, loss=loss: io.ReportMetrics(n, "m", {"loss": loss}))  # type: ignore[misc]
        assert d.core.read.latest("m")["loss"][1] == {2.0: 2.0, 4.0: 3.0, 0.25: 0.25, 0.75: 0.5}[loss]


def test_what_a_new_leader_finds_is_not_told_as_news() -> None:
    """Models and live workers that a new leader takes over cause no events; a worker that dies then does."""
    d, history = Driver.with_model(), History(0.0)
    for name in ("a", "b"):
        d.join(name)
    d.restart()
    history.begin(d.core.read)
    seen = len(d.published)
    d.core._c.model_changed(d.core._c.models["m"])
    d.beats()
    d.ask(lambda n: io.LeaveWorker(n, "m", "m/b"))
    for document in d.published[seen:]:
        history.note(document, d.now)

    assert {document["type"] for document in d.published[seen:]} >= {"model", "roster"}
    assert [e.kind for e in history.events] == ["worker_gone"]


def test_a_rollback_with_new_settings_is_told_as_one() -> None:
    """A model that loses a shard and workers at once, whose rates are by their number, is told as rolled back."""
    d, history = Driver.with_model(), History(0.0)
    document = d.document()
    history.note(document, d.now)
    owners = [[shard, token + 1, *rest] for shard, token, *rest in document["owners"]]
    new = {key: document[key] + 1 for key in ("revision", "timeline")}
    history.note({**document, **new, "owners": owners}, d.now)
    assert [e.kind for e in history.events][:2] == ["model_rolled_back", "model_changed"]


def test_events_are_bounded() -> None:
    """At most STATUS_EVENTS_MAX events are kept, the newest first, and an event repeated at once is kept once."""
    history = History(0.0)
    count = limits.STATUS_EVENTS_MAX + 10
    for i in range(2 * count):
        history.add(float(i), "k", f"event {i // 2}")

    assert [e.text for e in history.events] == [f"event {n}" for n in range(count - 1, 9, -1)]


async def _read(broadcast: StatusBroadcast, seen: list[bytes]) -> None:
    async for event in broadcast.stream():
        seen.append(event)


async def test_a_stream_shows_the_newest_status_and_ends_with_the_scheduler() -> None:
    """A stream sends the newest status at once, then each new one, and ends when the broadcast is closed."""
    broadcast, seen = StatusBroadcast(), list[bytes]()
    broadcast.publish(b'{"n":1}')
    reading = asyncio.ensure_future(_read(broadcast, seen))
    await asyncio.sleep(0)
    broadcast.publish(b'{"n":2}')
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    broadcast.close()
    await asyncio.wait_for(reading, 5)

    assert seen == [b'event: status\ndata: {"n":1}\n\n', b'event: status\ndata: {"n":2}\n\n']


async def test_streams_are_bounded() -> None:
    """Of streams that are opened at once, STATUS_STREAMS_MAX are, until one is closed, or given up before it began."""
    broadcast = StatusBroadcast()
    broadcast.publish(b"{}")
    streams = [broadcast.stream() for _ in range(limits.STATUS_STREAMS_MAX)]
    with pytest.raises(PsError, match="the limit of"):
        broadcast.stream()
    for stream in streams[1:]:
        await anext(stream)
    del streams[0]
    streams.append(broadcast.stream())
    with pytest.raises(PsError, match="the limit of"):
        broadcast.stream()
    await streams[0].aclose()
    streams.append(broadcast.stream())

    for stream in streams:
        await stream.aclose()


async def test_a_stream_without_news_shows_that_its_node_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between statuses that are long in coming the stream has comments, and then the next status."""
    monkeypatch.setattr(status_broadcast, "ALIVE_S", 0.0)
    broadcast = StatusBroadcast()
    broadcast.publish(b"1")
    stream = broadcast.stream()

    assert [await anext(stream) for _ in range(3)] == [b"event: status\ndata: 1\n\n", *[b": alive\n\n"] * 2]
    broadcast.publish(b"2")
    assert await anext(stream) == b"event: status\ndata: 2\n\n"
    await stream.aclose()
