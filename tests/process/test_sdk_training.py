"""Workers, their data and the checkpoints of a training, through the Python client on a real cluster."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.refusals import refused_with
from tests.waiting import eventually

import paramserver as ps
from paramserver.client import checkpointing
from paramserver.net.calls import Outcome
from paramserver.net.retry import result_of

from .cluster import Cluster, get, ones

pytestmark = pytest.mark.process


def test_two_workers_in_step_get_the_mean(client: ps.Client, name: str) -> None:
    """In sync mode, every worker sees exactly the mean of both gradients applied after each clock."""
    model = client.create_model(
        name, {"w": (100,)}, optimizer=ps.Sum(), consistency=ps.Sync(min_workers=2), partitions=8
    )
    seen: dict[int, list[float]] = {}

    def work(rank: int) -> None:
        with model.worker(rank=rank) as w:
            for _ in range(5):
                p = w.pull()
                seen.setdefault(w.rank, []).append(float(p["w"][0]))
                w.step({"w": np.full(100, 1.0 + 2.0 * rank)}, loss=1.0)
            seen[w.rank].append(float(w.pull()["w"][0]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()

    assert seen == {r: [0.0, 2.0, 4.0, 6.0, 8.0, 10.0] for r in range(2)}
    assert {p.worker for p in model.metrics("loss")} == {f"{name}/w0", f"{name}/w1"}
    assert model.metrics() == {"loss": model.metrics("loss")}
    assert model.metrics("accuracy") == []


def test_an_interrupt_while_a_worker_is_opened_leaves_none(
    client: ps.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the thread of a worker is being started ends that thread, and no member stays behind."""
    model = client.create_model(name, {"w": (4,)}, consistency=ps.Sync())
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == f"worker of {name}":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), model.worker():
        pass

    assert not [t for t in threading.enumerate() if t.name == f"worker of {name}"]
    assert not any(w["alive"] for w in model.workers())


def test_an_interrupt_while_a_worker_is_left_leaves_none(
    client: ps.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose end is interrupted, while it waits for its last heartbeat, leaves the model all the same."""
    model = client.create_model(name, {"w": (4,)}, consistency=ps.Sync())
    join = threading.Thread.join

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == f"worker of {name}":
            raise KeyboardInterrupt
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt), model.worker():
        pass

    assert [w["alive"] for w in model.workers()] == [False]


def test_a_task_that_is_cancelled_while_it_leaves_its_worker_leaves_none(client: ps.Client, name: str) -> None:
    """An asyncio worker whose end is cancelled, while it awaits its last heartbeat, leaves the model all the same."""
    model = client.create_model(name, {"w": (4,)}, consistency=ps.Sync())

    async def cancelled() -> None:
        async with ps.AsyncClient(client.url) as own:
            worker = own.model(name).worker()
            await worker.__aenter__()
            leaving = asyncio.create_task(worker.__aexit__())
            await asyncio.sleep(0)  # it waits
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving

    asyncio.run(cancelled())
    assert [w["alive"] for w in model.workers()] == [False]


def test_every_call_that_pushes_may_ask_for_a_higher_acknowledgement(client: ps.Client, name: str) -> None:
    """With `ack=`, a step, an exchange and a pushpull return once their push would survive the shard, as pushes do."""
    model = client.create_model(name, {"w": (4,)}, optimizer=ps.Sum())
    grads = {"w": np.ones(4)}
    with model.worker() as w:
        calls: list[Any] = [model.push, model.pushpull, w.push, w.pushpull, w.step, w.exchange]
        for call in calls:
            with refused_with("invalid_field", match="ack: must be one of"):
                call(grads, ack="stored")
            call(grads, ack="journaled")
            then = model.push(grads)
            assert then.durable_version >= then.version - 1, call


def test_a_sync_push_without_a_worker_says_how(client: ps.Client, name: str) -> None:
    """A push to a synchronous model without a worker raises ConflictError, whose hint shows `with model.worker()`."""
    model = client.create_model(name, {"w": (100,)}, consistency=ps.Sync(), partitions=8)

    with pytest.raises(ps.ConflictError, match=r"with model\.worker\(\) as w"):
        model.push(ones())


def test_the_mode_may_change_under_a_worker(client: ps.Client, name: str) -> None:
    """A worker adapts by itself when its model changes from async to sync and back."""
    model = client.create_model(name, {"w": (100,)}, optimizer=ps.Sum(), partitions=8)
    with model.worker() as w:
        w.step(ones())
        model.set(consistency=ps.Sync())
        eventually(lambda: w.step(ones()).state == "staged", what="a staged push")
        before = w.pull()["w"][0]
        w.step(ones())
        assert w.pull()["w"][0] == before + 1
        model.set(consistency=ps.Async())
        eventually(lambda: w.step(ones()).state == "applied", what="an applied push")


def test_a_step_may_have_a_gradient_for_some_elements(client: ps.Client, name: str) -> None:
    """A step with `ranges` changes these elements only, and in sync it ends the iteration on all shards."""
    model = client.create_model(name, {"w": (100,)}, optimizer=ps.Sum(), partitions=8, consistency=ps.Sync())
    with model.worker() as w:
        for i in range(3):
            w.step({"w": [1.0, 2.0]}, ranges={"w": [(50 * (i % 2), 50 * (i % 2) + 2)]})
        values = w.pull()
        assert (w.clock(), values["w"].sum()) == (4, 9.0)
    assert values["w"][[0, 1, 50, 51]].tolist() == [2.0, 4.0, 1.0, 2.0]


def test_tasks_are_worked_through_once_by_living_workers(client: ps.Client, name: str) -> None:
    """A task whose worker left before finishing it goes to the next worker, and a finished dataset yields no tasks."""
    model = client.create_model(name, {"w": (4,)})
    model.add_tasks("train", size=10, task_size=3)
    with model.worker() as w:
        first = next(iter(w.tasks("train")))
    with model.worker() as w:
        ranges = [(t.start, t.stop) for t in w.tasks("train")]
    with model.worker() as w:
        assert list(w.tasks("train")) == []

    assert (first.start, first.stop) in ranges
    assert sorted(ranges) == [(0, 3), (3, 6), (6, 9), (9, 10)]


def test_a_range_whose_loop_was_left_is_worked_on_all_the_same(client: ps.Client, name: str) -> None:
    """A task whose loop was left, by `break` or an exception, is handed out again to the same worker."""
    model = client.create_model(name, {"w": (4,)})
    model.add_tasks("train", size=4, task_size=1)
    with model.worker() as w:
        for _ in w.tasks():
            break
        with suppress(ZeroDivisionError):
            for _ in w.tasks():
                raise ZeroDivisionError
        starts = [t.start for t in w.tasks()]

    assert sorted(starts) == [0, 1, 2, 3]


def test_an_evaluation_that_raises_waits_on(client: ps.Client, name: str) -> None:
    """An evaluation whose function raises stays pending until a worker completes it."""
    model = client.create_model(name, {"w": (4,)})
    with model.worker() as w:
        model.evaluate()
        eventually(lambda: w.evaluation_waits, what="the evaluation")
        with pytest.raises(ZeroDivisionError):
            w.evaluate(lambda p: {"accuracy": 1 / 0})
        assert w.evaluation_waits
        assert w.evaluate(lambda p: {"accuracy": 0.5}) == {"accuracy": 0.5}
        assert w.evaluate(lambda p: {"accuracy": 0.5}) is None

    assert [p.value for p in model.metrics("accuracy")] == [0.5]


def test_a_worker_keeps_state_and_evaluates(client: ps.Client, name: str) -> None:
    """`w.state` is restored for the next worker of the same name, and a worker runs a requested evaluation."""
    model = client.create_model(name, {"w": (4,)})
    with model.worker("anna") as w:
        w.state["seen"] = 12
        model.evaluate()
        eventually(lambda: w.evaluation_waits, what="the evaluation")
        assert w.evaluate(lambda p: {"accuracy": float(p["w"].sum()) + 0.5}) == {"accuracy": 0.5}
    with model.worker("anna") as w:
        assert w.state == {"seen": 12}

    assert [p.value for p in model.metrics("accuracy")] == [0.5]


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_gradients_are_not_based_on_what_is_evaluated(client: ps.Client, name: str, kind: str) -> None:
    """The values that an evaluation pulls are not those of the loop: a gradient of older ones counts as stale."""
    rule = ps.Async(lag="reject", lag_bound=1)
    model = client.create_model(name, {"w": (4,)}, optimizer=ps.Sum(), consistency=rule)
    grads, seen = {"w": np.ones(4)}, list[float]()

    def measure(values: ps.Params) -> dict[str, float]:
        seen.append(float(values["w"][0]))
        return {"accuracy": 0.5}

    def others_go_on() -> None:
        for _ in range(3):
            model.push(grads)
        model.evaluate()

    async def awaited() -> None:
        async with ps.AsyncClient(client.url) as aio, aio.model(name).worker() as w:
            await w.pull()
            await asyncio.to_thread(others_go_on)
            while await w.evaluate(measure) is None:
                await asyncio.sleep(0.05)
            await w.step(grads)

    def blocking() -> None:
        with model.worker() as w:
            w.pull()
            others_go_on()
            eventually(lambda: w.evaluate(measure), what="the evaluation")
            w.step(grads)

    with refused_with("too_stale"):
        asyncio.run(awaited()) if kind == "asyncio" else blocking()
    assert seen == [3.0]


def test_a_worker_given_up_joins_again(client: ps.Client, name: str) -> None:
    """A worker whose lease was ended by the server joins again under the same id, with a new epoch."""
    model = client.create_model(name, {"w": (100,)}, optimizer=ps.Sum(), partitions=8)
    with model.worker() as w:
        w.step(ones())
        path = f"/models/{name}/workers/{w.name.replace('/', '%2F')}"
        client.request("DELETE", path)
        eventually(
            lambda: w.step(ones()).state and [x["epoch"] for x in model.workers() if x["worker"] == w.name] == [2],
            what="joining again",
        )
        # A gradient in flight when the lease ended may still be dropped.
        eventually(lambda: w.step(ones()).state == "applied", what="a push under the new epoch")


def test_a_checkpoint_goes_on_as_if_nothing_had_been(client: ps.Client, name: str, tmp_path: Path) -> None:
    """A model restored under another name and partition count continues bit for bit like the original, with Adam."""
    from safetensors.numpy import load_file

    rng = np.random.default_rng(3)
    w0 = rng.normal(size=(40, 30)).astype(np.float32)
    model = client.create_model(name, {"w": w0}, optimizer=ps.Adam(lr=0.01), partitions=5)
    for _ in range(3):
        model.push({"w": rng.normal(size=(40, 30))})
    manifest = model.checkpoint(tmp_path / "ckpt")

    other = client.restore(tmp_path / "ckpt", as_=f"{name}.2"[-60:].lstrip("."), partitions=3)

    assert manifest["version"] == 3
    assert np.array_equal(load_file(tmp_path / "ckpt" / "model.safetensors")["w"], model.pull()["w"])
    last = rng.normal(size=(40, 30))
    model.push({"w": last})
    other.push({"w": last})
    assert np.array_equal(model.pull()["w"], other.pull()["w"])
    assert not np.array_equal(other.pull()["w"], w0)


def test_a_checkpoint_that_the_cluster_keeps_becomes_another_model(client: ps.Client, name: str) -> None:
    """A kept checkpoint is restored under another name, over a model that exists only with `exist_ok`."""
    model = client.create_model(name, {"w": (4,)}, optimizer=ps.Sum())
    copy = client.model(f"{name}-2")
    model.push(ones(4))
    model.save("one")
    model.push(ones(4))

    async def restore_both() -> list[float]:
        async with ps.AsyncClient(client.url) as own:
            await own.model(name).restore("one", as_=copy.name, exist_ok=True)
            await own.model(name).restore("one")
            return [float((await own.model(n).pull())["w"][0]) for n in (copy.name, name)]

    assert model.restore("one", as_=copy.name, partitions=3).name == copy.name
    assert copy.pull()["w"].tolist() == [1.0] * 4
    assert copy.info()["spec"]["partitions"] == 3
    with refused_with("model_exists", match="exist_ok"):
        model.restore("one", as_=copy.name)
    copy.push(ones(4))
    assert asyncio.run(restore_both()) == [1.0, 1.0]


def test_a_model_restored_in_place_keeps_its_codec(client: ps.Client, name: str) -> None:
    """What `restore` returns for the same model sends gradients as the object that was asked."""
    client.create_model(name, {"w": (4,)}, optimizer=ps.Sum()).save("one")
    finer = {"w": np.full(4, 1 + 2**-10)}  # 1 in bfloat16

    async def restore_and_push() -> None:
        async with ps.AsyncClient(client.url) as own:
            await (await own.model(name, codec="bf16").restore("one")).push(finer)

    client.model(name, codec="bf16").restore("one").push(finer)
    assert client.model(name).pull()["w"].tolist() == [1.0] * 4
    asyncio.run(restore_and_push())
    assert client.model(name).pull()["w"].tolist() == [1.0] * 4


KILLED = """
import os, signal, sys
import paramserver as ps
from paramserver.client import checkpointing
checkpointing.result_of = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
ps.connect(sys.argv[1]).restore(sys.argv[2], as_=sys.argv[3])
"""
"""A restore that is killed once the first of the partitions are set."""


def test_the_script_that_made_a_model_takes_the_one_that_is_restored_from_a_folder(
    client: ps.Client, name: str, tmp_path: Path
) -> None:
    """A restored model has the spec of the checkpoint's, down to the initial values of the program that trains it."""
    params = {"w": np.ones(64, np.float32), "b": ps.Param((8, 8), init="kaiming_normal")}
    model = client.create_model(name, params)
    model.push({"w": np.ones(64, np.float32)})
    model.checkpoint(tmp_path / "ckpt")
    before = model.pull()
    model.delete()
    client.restore(tmp_path / "ckpt")

    again = client.create_model(name, params, exist_ok=True).pull()

    assert {n: a.tolist() for n, a in again.items()} == {n: a.tolist() for n, a in before.items()}


def test_a_model_restored_in_part_is_not_served(client: ps.Client, name: str, tmp_path: Path) -> None:
    """A model that a killed client has restored in part refuses pushes and pulls; the error says what to do.

    It is complete once it is restored again with `exist_ok`, or deleted and restored.
    """
    modes: dict[str, ps.Async | ps.Sync] = {"async": ps.Async(), "sync": ps.Sync()}
    halves = {mode: client.model(f"{name}-{mode}-2"[-60:]) for mode in modes}
    for mode, consistency in modes.items():
        model = client.create_model(
            f"{name}-{mode}"[-60:], {"w": np.ones(64, np.float32)}, consistency=consistency, partitions=16
        )
        model.checkpoint(tmp_path / mode)

    def kill_a_restore(mode: str) -> None:
        command = [sys.executable, "-P", "-c", KILLED, client.url, str(tmp_path / mode), halves[mode].name]
        assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGKILL
        assert halves[mode].info()["state"] == "initializing"

    with ThreadPoolExecutor() as pool:
        calls: list[Future[Any]] = []
        for mode, half in halves.items():
            kill_a_restore(mode)
            # Each is repeated until its timeout.
            calls.append(pool.submit(half.push, {"w": np.ones(64)}, timeout=8.0))
            calls.append(pool.submit(half.pull, timeout=8.0))
    for call in calls:
        with refused_with("initializing", match="again with exist_ok, or delete it"):
            call.result()
    for mode, half in halves.items():
        with refused_with("model_exists", match="exist_ok=True"):
            client.restore(tmp_path / mode, as_=half.name)
        client.restore(tmp_path / mode, as_=half.name, exist_ok=True)
        again = half.pull()

        half.delete()
        kill_a_restore(mode)
        client.model(half.name).delete()
        client.restore(tmp_path / mode, as_=half.name)
        assert again["w"].tolist() == half.pull()["w"].tolist() == [1.0] * 64


def test_what_a_dying_shard_loses_during_a_restore_is_set_again(
    own_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore during which a shard dies, after it took values and before it stored them, sets these again."""
    watch, client = ps.connect(own_cluster.url), ps.connect(own_cluster.url)

    def tokens(copy: str) -> list[int]:
        found = watch.model(copy).info()
        return [p["incarnation"] for p in found["partitions"]] if found["served"] else []

    def restored_over_a_death(of: str, mode: Any) -> int:
        """Return the pid of the shard that was killed."""
        copy, victims = f"{of}-copy", []
        model = client.create_model(of, {"w": np.ones(64, np.float32)}, consistency=mode, partitions=16)
        model.checkpoint(tmp_path / of)

        def after_a_death(outcome: Outcome, read: Any, *, reads: bool) -> Any:
            monkeypatch.undo()
            before = tokens(copy)
            victims.append(own_cluster.kill("shards"))
            eventually(lambda: tokens(copy) not in (before, []), what="other owners")
            return result_of(outcome, read, reads=reads)

        monkeypatch.setattr(checkpointing, "result_of", after_a_death)
        assert client.restore(tmp_path / of, as_=copy).pull()["w"].tolist() == [1.0] * 64
        return victims[0]

    with watch, client:
        killed = restored_over_a_death("async", ps.Async())
        eventually(lambda: own_cluster.replaced("shards", 0, killed), what="a new shard")
        eventually(lambda: get(f"{own_cluster.shards[0]}/readyz").is_success, what="its joining")
        restored_over_a_death("sync", ps.Sync())


def test_a_checkpoint_sets_its_model_back_whose_settings_have_changed(
    client: ps.Client, name: str, tmp_path: Path
) -> None:
    """A checkpoint is restored over its model, whose settings have changed since creation, only with `exist_ok`.

    The model keeps its present settings.  A model with other parameters is refused and not changed.
    """
    model = client.create_model(name, {"w": np.zeros(4, np.float32)}, optimizer=ps.SGD(lr=1.0))
    model.push({"w": -np.ones(4)})
    model.set(lr=0.5)
    model.checkpoint(tmp_path / "ckpt")
    model.set(lr=0.25)
    model.push({"w": -np.ones(4)})

    with pytest.raises(ps.ConflictError):
        client.restore(tmp_path / "ckpt")
    client.restore(tmp_path / "ckpt", exist_ok=True)

    assert model.pull()["w"].tolist() == [1.0] * 4
    model.push({"w": -np.ones(4)})
    assert model.pull()["w"].tolist() == [1.25] * 4
    other = client.create_model(name + "-o", {"v": np.zeros(4, np.float32)})
    with pytest.raises(ps.PsError, match="lacks parameter 'v'"):
        client.restore(tmp_path / "ckpt", as_=other.name, exist_ok=True)
    assert other.pull()["v"].tolist() == [0.0] * 4


@pytest.mark.parametrize("keeper", ["client", "cluster"])
@pytest.mark.parametrize("changed", ["after", "before"])
def test_state_of_another_optimizer_is_dropped(
    client: ps.Client, name: str, tmp_path: Path, keeper: str, changed: str
) -> None:
    """A checkpoint's optimizer state is dropped if it is of another optimizer with as many arrays.

    The optimizer changes after the checkpoint, which is restored in place, or before it, when no commit has made the
    partitions adopt it yet, and the model is created anew from it.
    """
    model = client.create_model(name, ones(), optimizer=ps.Momentum(lr=0.1), consistency=ps.Sync(), partitions=2)
    with model.worker() as w:
        w.step({"w": -np.ones(100)})  # Adagrad would take the root of this buffer
    if changed == "before":
        model.set(optimizer=ps.Adagrad(lr=0.1))
    model.checkpoint(tmp_path / "ckpt") if keeper == "client" else model.save("mine")
    if changed == "after":
        model.set(optimizer=ps.Adagrad(lr=0.1))
        with model.worker() as w:
            w.step(ones())
    else:
        model.delete()
    if keeper == "client":
        client.restore(tmp_path / "ckpt", exist_ok=True)
    else:
        model.restore("mine")

    with model.worker() as w:
        before = w.pull()["w"]
        w.step(ones())
        np.testing.assert_allclose(w.pull()["w"], before - 0.1, rtol=1e-6)


def test_a_restore_brings_an_optimizer_into_effect_that_waits_for_a_commit(client: ps.Client, name: str) -> None:
    """In sync, a restore after a change of the optimizer does not wait for the commit that would bring it about."""
    model = client.create_model(name, ones(), optimizer=ps.SGD(lr=1.0), consistency=ps.Sync(), partitions=2)
    model.save("x")
    model.set(optimizer=ps.Adam(lr=0.5))
    model.restore("x")

    with model.worker() as w:
        before = w.pull()["w"]
        w.step(ones())
        np.testing.assert_allclose(w.pull()["w"], before - 0.5, rtol=1e-6)


@pytest.mark.parametrize("ack", ["applied", "journaled"])
def test_the_clusters_checkpoint_of_a_training_is_of_one_clock(
    shared_cluster: Cluster, client: ps.Client, name: str, ack: str
) -> None:
    """The cluster's checkpoint of a model in training holds, for every element, exactly the commits up to its clock."""
    from safetensors.numpy import load_file

    size = 32 * 65536
    model = client.create_model(name, {"w": (size,)}, optimizer=ps.Sum(), consistency=ps.Sync(), partitions=32, ack=ack)
    stop = threading.Event()

    def train() -> None:
        with model.worker() as w:
            while not stop.is_set():
                w.step(ones(size))

    training = threading.Thread(target=train)
    training.start()
    try:
        eventually(lambda: model.info()["clock"] > 2, what="the first clocks")
        saved = httpx.post(f"{shared_cluster.url}/models/{name}/checkpoints", timeout=60).json()
        eventually(lambda: model.info()["clock"] > saved["clock"], what="another clock")
    finally:
        stop.set()
        training.join()
    assert set(saved["versions"]) == {saved["clock"]}
    values = load_file(Path(saved["path"]) / "model.safetensors")["w"]
    assert np.unique(values).tolist() == [float(saved["clock"])]


def test_a_checkpoint_on_this_machine_holds_the_workers_states(client: ps.Client, name: str, tmp_path: Path) -> None:
    """A checkpoint in a local folder has the state of each worker that set one, even if it left, and of no other."""
    model = client.create_model(name, {"w": (4,)})
    with model.worker("anna") as w, model.worker("ben"):
        w.state["seen"] = 12

    model.checkpoint(tmp_path / "ckpt")

    assert json.loads((tmp_path / "ckpt" / "workers.json").read_text()) == {f"{name}/anna": {"seen": 12}}


@pytest.mark.parametrize("keeper", ["client", "cluster"])
def test_workers_of_a_restored_model_begin_with_their_states(
    client: ps.Client, name: str, tmp_path: Path, keeper: str
) -> None:
    """Workers of a model restored under another name, after a delete or in place begin with their saved states.

    A worker that is joined during a restore in place keeps its own state until it joins again.
    """

    def restore(**how: Any) -> None:
        if keeper == "client":
            client.restore(tmp_path / "ckpt", **how)
        else:
            into = {"as": how["as_"]} if "as_" in how else {}
            answer = httpx.post(f"{client.url}/models/{name}/restore", json={"checkpoint": "mine", **into}, timeout=30)
            assert answer.is_success, answer.text

    def begins_with(model: str) -> Any:
        with client.model(model).worker("anna") as w:
            return dict(w.state)

    model = client.create_model(name, {"w": (4,)})
    with model.worker("anna") as w, model.worker("ben"):
        w.state["seen"] = 12
    model.checkpoint(tmp_path / "ckpt") if keeper == "client" else model.save("mine")

    copy = f"{name}-2"[-60:]
    restore(as_=copy)
    assert begins_with(copy) == {"seen": 12}
    with model.worker("anna") as w:
        w.state["seen"] = 40
        w.step(ones(4))
    with model.worker("anna") as w:
        assert w.state == {"seen": 40}
        restore(exist_ok=True)
        assert w.state == {"seen": 40}
    assert begins_with(name) == {"seen": 12}
    model.delete()
    restore()
    assert begins_with(name) == {"seen": 12}
