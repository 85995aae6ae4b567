"""The Python client on a real cluster."""

import asyncio
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import paramserver as ps

from .cluster import Cluster, eventually
from .gateway import gateway

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.fixture
def client(shared_cluster: Cluster) -> Iterator[ps.Client]:
    with ps.connect(shared_cluster.url) as c:
        yield c


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A model name that no other test uses."""
    return str(request.node.name)[:60].replace("[", ".").replace("]", "").replace(":", "-")


def ones(n: int = 100) -> dict[str, Any]:
    return {"w": np.ones(n, np.float32)}


def test_values_go_in_and_come_out(client: ps.Client, name: str) -> None:
    """Initial values, pushes, ranges, assignments and settings take effect, and pulls keep each array's shape."""
    w = np.arange(640, dtype=np.float32).reshape(64, 10)
    model = client.create_model(name, {"w": w, "b": (10,)}, optimizer=ps.SGD(lr=1.0), partitions=7)

    p = model.pull()
    assert np.array_equal(p["w"], w)
    done = model.push({"w": np.ones((64, 10)), "b": np.full(10, 2.0)}, base=p)
    assert (done.state, done.version, done.duplicate) == ("applied", 1, False)
    p = model.pushpull({"b": np.ones(10)}, base=p, out=p)
    assert np.array_equal(p["w"], w - 1)
    assert p["b"].tolist() == [-3.0] * 10
    model.push({"w": [10.0]}, ranges={"w": [(5, 6)]})
    assert model.pull(ranges={"w": [(4, 7)]})["w"].tolist() == [3.0, -6.0, 5.0]
    model.assign({"b": np.linspace(0, 1, 10)})
    assert np.allclose(model.pull("b")["b"], np.linspace(0, 1, 10))
    model.set(lr=0.25)
    assert model.info()["spec"]["optimizer"]["lr"] == 0.25
    assert name in client.models()
    assert model.pull(dtype="float16").flat.dtype == np.float16


def test_the_url_of_a_model_is_not_a_clusters(shared_cluster: Cluster) -> None:
    """`connect` refuses a URL with a path that the node lacks, and names the URL without it."""
    with pytest.raises(ps.RequestError, match=rf"/models/m' is not the URL.* {shared_cluster.url}\)"):
        ps.connect(f"{shared_cluster.url}/models/m")


def test_values_may_lie_in_the_other_byte_order(client: ps.Client, name: str) -> None:
    """Initial and assigned values may be big-endian arrays."""
    model = client.create_model(name, {"w": np.arange(3, dtype=">f4"), "i": np.arange(2, dtype=">i8")})
    assert [a.tolist() for a in model.pull().values()] == [[0.0, 1.0, 2.0], [0.0, 1.0]]
    model.assign({"w": np.array([3.0, 4.0, 5.0], ">f8")})
    assert model.pull()["w"].tolist() == [3.0, 4.0, 5.0]


def test_assigned_values_that_cannot_be_held_change_nothing(client: ps.Client, name: str) -> None:
    """`assign` with invalid values raises RequestError, which lists every invalid parameter, and changes nothing."""
    model = client.create_model(name, {"a": (1,), "b": (1,), "c": (1,), "d": (1,)})
    with pytest.raises(ps.RequestError) as e:
        model.assign({"a": [1.0], "b": [np.nan], "c": [1e300], "d": ["x"]})
    assert [(x["where"], x["code"]) for x in e.value.errors] == [
        ("b", "non_finite"),
        ("c", "non_finite"),
        ("d", "invalid_dtype"),
    ]
    assert model.pull().flat.tolist() == [0.0] * 4


def test_the_same_spec_again_is_fine_only_if_asked_for(client: ps.Client, name: str) -> None:
    """Creating an existing model with `exist_ok` keeps its values; without it, or with another spec, it fails."""
    model = client.create_model(name, {"w": np.zeros(100)}, optimizer=ps.Sum(), partitions=8)
    model.push(ones())

    client.create_model(name, {"w": np.zeros(100)}, optimizer=ps.Sum(), exist_ok=True, partitions=8)
    assert model.pull()["w"].tolist() == [1.0] * 100
    with pytest.raises(ps.ConflictError, match="exist_ok"):
        client.create_model(name, {"w": np.zeros(100)}, optimizer=ps.Sum(), partitions=8)
    with pytest.raises(ps.ConflictError):
        client.create_model(name, {"w": np.zeros(101)}, optimizer=ps.Sum(), exist_ok=True, partitions=8)


def test_many_clients_create_it_at_once(shared_cluster: Cluster, name: str) -> None:
    """Clients that create the same model at once with `exist_ok` all see its complete initial values."""
    w = np.random.default_rng(0).normal(size=(300, 50)).astype(np.float32)
    found: list[bool] = []

    def create() -> None:
        with ps.connect(shared_cluster.url) as c:
            model = c.create_model(name, {"w": w, "v": w.T.copy()}, exist_ok=True)
            p = model.pull()
            found.append(np.array_equal(p["w"], w) and np.array_equal(p["v"], w.T))

    threads = [threading.Thread(target=create) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()

    assert found == [True] * 4


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


def test_tasks_are_worked_through_once_by_living_workers(client: ps.Client, name: str) -> None:
    """A task whose worker left before finishing it goes to the next worker, and a finished dataset yields no tasks."""
    model = client.create_model(name, {"w": (4,)})
    model.add_tasks("train", size=10, chunk=3)
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
    model.add_tasks("train", size=4, chunk=1)
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


def test_behind_a_gateway_everything_goes_through_the_url(
    shared_cluster: Cluster, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If no shard address can be reached, training goes through the client's URL, and one log line says so."""
    with gateway(shared_cluster.url) as g, ps.connect(g.url) as client:
        model = client.create_model(
            name, {"w": np.zeros(1000)}, optimizer=ps.Sum(), consistency=ps.Sync(), partitions=8
        )
        with model.worker() as w:
            for _ in range(3):
                w.pull()
                w.step(ones(1000), loss=0.5)
            assert w.pull()["w"].tolist() == [3.0] * 1000
        assert g.pushes == 3

    assert sum("route.proxied" in r.getMessage() for r in caplog.records) == 1


def test_lost_answers_do_not_count_twice(shared_cluster: Cluster, name: str) -> None:
    """A push whose response was lost after it was applied is retried as a duplicate, and counts once."""
    with gateway(shared_cluster.url) as g, ps.connect(g.url) as client:
        model = client.create_model(name, {"w": np.zeros(1000)}, optimizer=ps.Sum(), partitions=8)
        g.lose_every = 3
        duplicates = sum(model.push(ones(1000)).duplicate for _ in range(20))
        g.lose_every = 0

        assert model.pull()["w"].tolist() == [20.0] * 1000
        assert g.lost == duplicates > 5


def test_threads_share_one_client(client: ps.Client, name: str) -> None:
    """Pushes from several threads that share one client each count once."""
    model = client.create_model(name, {"w": (100,)}, optimizer=ps.Sum(), partitions=8)

    def work() -> None:
        for _ in range(20):
            model.push(ones())

    threads = [threading.Thread(target=work) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()

    assert model.pull()["w"].tolist() == [120.0] * 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_goes_on_by_itself(client: ps.Client, name: str) -> None:
    """A forked child can push through its parent's model object, but not use its parent's worker."""
    model = client.create_model(name, {"w": (100,)}, optimizer=ps.Sum(), partitions=8)
    model.push(ones())
    with model.worker() as w:
        w.step(ones())
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for _ in range(3):
                    model.push(ones())
                try:
                    w.step(ones())
                except ps.ConflictError:
                    code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        w.step(ones())
    model.push(ones())

    assert model.pull()["w"].tolist() == [7.0] * 100


def test_asyncio_has_the_same_surface(shared_cluster: Cluster, name: str) -> None:
    """The asyncio client has the blocking one's operations, and the blocking one works inside a running event loop."""

    async def main() -> None:
        async with ps.AsyncClient(shared_cluster.url) as client:
            model = await client.create_model(
                name, {"w": np.zeros(100)}, optimizer=ps.Sum(), exist_ok=True, partitions=8
            )
            await asyncio.gather(*(model.push(ones()) for _ in range(10)))
            assert (await model.pull())["w"].tolist() == [10.0] * 100
            await model.add_tasks("train", size=4, chunk=2)
            async with model.worker() as w:
                starts = []
                async for task in w.tasks("train"):
                    starts.append(task.start)
                    await w.step(ones(), loss=0.1)
                p = await w.pushpull(ones())
                assert p["w"].tolist() == [13.0] * 100
            assert starts == [0, 2]
            await model.add_tasks("again", size=2, chunk=1)
            async with model.worker() as w:
                async for _ in w.tasks("again"):
                    break
                assert sorted([t.start async for t in w.tasks("again")]) == [0, 1]
            run = await client.create_run(name, "m:main", stop={"minutes": 1})
            assert run["id"] in {r["id"] for r in await client.runs()}
            await client.set_run(run["id"], state="stopped")
            assert (await client.get_run(run["id"]))["model"] == name
            with ps.connect(shared_cluster.url) as blocking:
                assert blocking.model(name).pull()["w"].tolist() == [13.0] * 100
            await model.delete()
            with pytest.raises(ps.NotFoundError):
                await model.pull()

    asyncio.run(main())


@pytest.mark.parametrize("codec", ["int8", "topk:0.1"])
def test_encoded_pushes_at_once_lose_nothing(shared_cluster: Cluster, name: str, codec: str) -> None:
    """What int8 and topk leave out of concurrent pushes is sent with later ones, exactly once."""

    async def main() -> None:
        rng, total = np.random.default_rng(1), np.zeros(4096)
        async with ps.AsyncClient(shared_cluster.url) as client:
            model = await client.create_model(name, {"w": (4096,)}, optimizer=ps.Sum(), partitions=2)
            async with model.worker(codec=codec) as w:
                for _ in range(10):
                    given = [rng.standard_normal(4096, np.float32) for _ in range(4)]
                    pushed = await asyncio.gather(*(w.push({"w": g}) for g in given))
                    # On a machine so busy that the lease expires, what was under way is dropped, and says so.
                    total += sum(g for g, p in zip(given, pushed, strict=True) if p.state != "dropped")
                for _ in range(10):
                    await w.push({"w": np.zeros(4096)})
            np.testing.assert_allclose((await model.pull())["w"], total, atol=1e-3)

    asyncio.run(main())


def test_shared_arrays_are_read_only_and_reused(client: ps.Client, name: str) -> None:
    """`pull(copy=False)` returns the same read-only arrays for as long as they satisfy `min_version`."""
    model = client.create_model(name, {"w": (100,)}, optimizer=ps.Sum(), partitions=8)
    model.push(ones())

    first = model.pull(copy=False)
    again = model.pull(copy=False, min_version=1)
    model.push(ones())
    newer = model.pull(copy=False, min_version=2)

    assert again is first
    assert newer is not first
    assert newer["w"][0] == 2.0
    with pytest.raises(ValueError, match="read-only"):
        first["w"][0] = 5.0


def test_shared_arrays_end_with_their_model(client: ps.Client, name: str) -> None:
    """After a model is deleted, and after it is created again, `pull(copy=False)` does not return the old arrays."""
    model = client.create_model(name, {"w": (100,)}, optimizer=ps.Sum(), partitions=8)
    model.push(ones())
    model.pull(copy=False)
    assert model.pull(copy=False, min_version=1)["w"].tolist() == [1.0] * 100

    model.delete()
    with pytest.raises(ps.NotFoundError):
        model.pull(copy=False, min_version=1)
    client.create_model(name, {"w": np.full(50, 5.0)}, optimizer=ps.Sum())
    model.push(ones(50))

    assert model.pull(copy=False, min_version=1)["w"].tolist() == [6.0] * 50


def test_a_version_that_does_not_come_is_said(client: ps.Client, name: str) -> None:
    """A pull whose `min_version` is not reached within `wait_s` raises ConflictError with the present version."""
    model = client.create_model(name, {"w": (100,)}, partitions=8)
    model.push(ones())

    with pytest.raises(ps.ConflictError) as e:
        model.pull(min_version=5, wait_s=0.2)

    assert (e.value.code, e.value.members["version"]) == ("version_not_reached", 1)


def test_a_local_cluster_comes_and_goes(caplog: pytest.LogCaptureFixture) -> None:
    """`ps.local` yields a client of a working cluster, which is stopped when the block ends."""
    caplog.set_level(logging.INFO)
    with ps.local(shards=1) as client:
        model = client.create_model("m", {"w": np.ones(5)}, optimizer="sum")
        model.push({"w": np.ones(5)})
        assert model.pull()["w"].tolist() == [2.0] * 5
        url = client.url

    with pytest.raises(ps.Unreachable):
        ps.connect(url)
