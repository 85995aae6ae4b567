"""The Python client on a real cluster."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tests.refusals import refused_with

import paramserver as ps

from .cluster import Cluster, ones
from .gateway import Gateway, gateway

pytestmark = pytest.mark.process


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


def test_a_parameter_may_be_larger_than_a_request(client: ps.Client, name: str) -> None:
    """A parameter of more than 64 MiB is created from values, pulled and assigned, whatever the partitions."""
    w = np.arange(17_000_000, dtype=np.float32)
    model = client.create_model(name, {"a": (3,), "w": w}, partitions=2)
    assert np.array_equal(model.pull()["w"], w)
    model.assign({"w": -w})
    assert np.array_equal(model.pull()["w"], -w)
    model.delete()


def test_the_url_of_a_model_is_not_a_clusters(shared_cluster: Cluster) -> None:
    """`connect` refuses a URL with a path that the node lacks, and names the URL without it."""
    with pytest.raises(ps.RequestError, match=rf"/models/m' is not the URL.* {shared_cluster.url}\)"):
        ps.connect(f"{shared_cluster.url}/models/m")


def test_a_creator_that_lost_the_answer_goes_on_to_upload(shared_cluster: Cluster, name: str) -> None:
    """If the answer to `create_model` is lost, the client uploads the values before its token expires."""
    with gateway(shared_cluster.url) as g, ps.connect(g.url) as client:
        g.lose_next.add("POST /models")
        model = client.create_model(name, {"w": np.arange(3.0)}, timeout=20)
        assert not g.lose_next
        assert model.pull()["w"].tolist() == [0.0, 1.0, 2.0]


def test_a_reader_of_a_model_that_was_replaced_is_told_to_pull_again(
    shared_cluster: Cluster, client: ps.Client, name: str
) -> None:
    """A pull under the map of a deleted model says that it was created again; the next pull gets the new values."""
    model = client.create_model(name, {"w": np.ones(4)})
    with ps.connect(shared_cluster.url) as other:
        reader = other.model(name)
        assert reader.pull()["w"].tolist() == [1.0] * 4
        model.delete()
        client.create_model(name, {"w": np.full(4, 2.0)})
        with pytest.raises(ps.FencedError, match="was deleted and created again") as e:
            reader.pull()
        assert "pull again" in e.value.hint
        assert reader.pull()["w"].tolist() == [2.0] * 4


def recreated(shared_cluster: Cluster, name: str) -> None:
    """Delete the model, as somebody else who knows nothing of us, and create another one of that name."""
    with ps.connect(shared_cluster.url) as other:
        other.model(name).delete()
        other.create_model(name, {"w": np.full(4, 5.0)}, optimizer=ps.Sum())


def test_a_handle_of_a_deleted_model_changes_no_later_one(
    shared_cluster: Cluster, client: ps.Client, name: str
) -> None:
    """What changes, stores, restores or deletes a model is refused if it was created again since the handle had it.

    It had the one that it made, or first pulled from or pushed to.  A new handle is for the present one.
    """
    made = client.create_model(name, {"w": np.ones(4)}, optimizer=ps.Sum())
    pulled, pushed = client.model(name), client.model(name)
    pulled.pull()
    pushed.push(ones(4))
    made.save("mine")
    recreated(shared_cluster, name)

    for handle in (made, pulled, pushed):
        calls: list[Callable[[], Any]] = [partial(handle.set, lr=0.5), handle.save, handle.restore, handle.delete]
        for call in calls:
            with refused_with("model_replaced", ps.FencedError, match="by a new handle"):
                call()

    model = client.model(name)
    model.set(evaluate_every=7)
    assert (model.info()["spec"]["evaluate_every"], model.checkpoints()) == (7, [])
    assert model.pull()["w"].tolist() == [5.0] * 4


def test_on_asyncio_too_a_handle_changes_no_later_model(shared_cluster: Cluster, name: str) -> None:
    """On asyncio, what changes a model is refused if it was created again since the handle had it."""

    async def run() -> None:
        async with ps.AsyncClient(shared_cluster.url) as client:
            made = await client.create_model(name, {"w": np.ones(4)}, optimizer=ps.Sum())
            pulled = client.model(name)
            await pulled.pull(copy=False)
            recreated(shared_cluster, name)
            for handle in (made, pulled):
                calls: list[Callable[[], Any]] = [partial(handle.set, lr=0.5), handle.save, handle.restore]
                for call in (*calls, handle.delete):
                    with refused_with("model_replaced", ps.FencedError):
                        await call()
            await client.model(name).delete()

    asyncio.run(run())


def test_a_handle_restores_a_deleted_model_and_is_for_that_one_then(client: ps.Client, name: str) -> None:
    """A model that is gone is restored through the handle that made it, which then changes and deletes the new one."""
    model = client.create_model(name, {"w": np.ones(4)}, optimizer=ps.Sum())
    before = model.info()["generation"]
    model.save("mine")
    model.delete()

    assert model.restore("mine") is model

    assert model.info()["generation"] > before
    model.set(evaluate_every=7)
    copy = model.restore("mine", as_=f"{name}-2"[-60:])
    copy.delete()
    model.delete()
    with pytest.raises(ps.NotFoundError):
        model.info()


def test_a_cancelled_join_leaves_no_member_behind(shared_cluster: Cluster, client: ps.Client, name: str) -> None:
    """A task that is cancelled while its worker joins leaves the model, if the join was granted all the same."""
    model = client.create_model(name, {"w": (4,)}, consistency=ps.Sync())

    async def cancelled(g: Gateway) -> None:
        async with ps.AsyncClient(g.url) as own:
            entering = asyncio.create_task(own.model(name).worker().__aenter__())
            assert await asyncio.to_thread(g.held.wait, 60)
            entering.cancel()
            await asyncio.sleep(0)  # the task is told
            g.release.set()
            with pytest.raises(asyncio.CancelledError):
                await entering

    with gateway(shared_cluster.url) as g:
        g.hold_next = f"POST /models/{name}/workers"
        asyncio.run(cancelled(g))
        assert [w["alive"] for w in model.workers()] == [False]


@pytest.mark.skipif(sys.platform == "win32", reason="a process sends itself SIGINT")
def test_a_join_that_ctrl_c_ends_leaves_no_member_behind(shared_cluster: Cluster, client: ps.Client, name: str) -> None:
    """A worker that is interrupted while it joins leaves the model, if the join was granted all the same."""
    model = client.create_model(name, {"w": (4,)}, consistency=ps.Sync())

    def ctrl_c(g: Gateway) -> None:
        assert g.held.wait(60)
        os.kill(os.getpid(), signal.SIGINT)
        g.release.set()

    with gateway(shared_cluster.url) as g, ps.connect(g.url) as own:
        g.hold_next = f"POST /models/{name}/workers"
        threading.Thread(target=ctrl_c, args=(g,)).start()
        with pytest.raises(KeyboardInterrupt), own.model(name).worker():
            pass
        assert [w["alive"] for w in model.workers()] == [False]


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
        assert g.pushes >= 3

    assert sum("route.proxied" in r.getMessage() for r in caplog.records) == 1


def test_behind_a_gateway_folders_are_saved_and_restored(shared_cluster: Cluster, name: str, tmp_path: Path) -> None:
    """A checkpoint goes into a folder and comes out of one where no shard can be reached, through either kind of node.

    It holds the optimizer's state, too: after the same push, the copy has the same values.
    """
    with gateway(shared_cluster.url) as g, ps.connect(g.url) as client:
        model = client.create_model(name, {"w": np.arange(1000.0)}, optimizer=ps.Adam(lr=0.1), partitions=8)
        model.push(ones(1000))
        model.checkpoint(tmp_path / "c")
        copy = client.restore(tmp_path / "c", as_=f"{name}-2")
        for each in (model, copy):
            each.push(ones(1000))
        assert np.array_equal(copy.pull()["w"], model.pull()["w"])
    with gateway(shared_cluster.shards[0]) as g, ps.connect(g.url) as client:
        client.model(name).checkpoint(tmp_path / "c", overwrite=True)
        client.restore(tmp_path / "c", as_=f"{name}-2", exist_ok=True)


def test_lost_answers_do_not_count_twice(shared_cluster: Cluster, name: str) -> None:
    """A push whose response was lost after it was applied is retried as a duplicate, and counts once."""
    with gateway(shared_cluster.url) as g, ps.connect(g.url) as client:
        model = client.create_model(name, {"w": np.zeros(1000)}, optimizer=ps.Sum(), partitions=8)
        g.lose_every = 3
        duplicates = sum(model.push(ones(1000)).duplicate for _ in range(20))
        g.lose_every = 0

        assert model.pull()["w"].tolist() == [20.0] * 1000
        assert min(g.lost, duplicates) > 5


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
            await model.add_tasks("train", size=4, task_size=2)
            async with model.worker() as w:
                starts = []
                async for task in w.tasks("train"):
                    starts.append(task.start)
                    await w.step(ones(), loss=0.1)
                p = await w.pushpull(ones())
                assert p["w"].tolist() == [13.0] * 100
            assert starts == [0, 2]
            await model.add_tasks("again", size=2, task_size=1)
            async with model.worker() as w:
                async for _ in w.tasks("again"):
                    break
                assert sorted([t.start async for t in w.tasks("again")]) == [0, 1]
            await model.delete_tasks("again")
            assert [d["dataset"] for d in await model.tasks()] == ["train"]
            run = await client.create_run(name, "m:main", stop={"minutes": 1})
            assert run["id"] in {r["id"] for r in await client.runs()}
            await client.set_run(run["id"], state="stopped")
            assert (await client.get_run(run["id"]))["model"] == name
            with ps.connect(shared_cluster.url) as blocking:
                assert blocking.model(name).pull()["w"].tolist() == [13.0] * 100
                blocking.model(name).delete_tasks("train")
            with pytest.raises(ps.NotFoundError):
                await model.delete_tasks("train")
            await model.delete()
            with pytest.raises(ps.NotFoundError):
                await model.pull()

    asyncio.run(main())


def test_a_workers_pushpull_may_have_a_gradient_for_some_elements(client: ps.Client, name: str) -> None:
    """A worker's `pushpull` with `ranges` adds to these elements only, and returns the values of all."""
    rng = np.random.default_rng(9)
    sums = {n: rng.normal(size=size).astype(np.float32) for n, size in (("w", 100), ("b", 10))}
    model = client.create_model(name, dict(sums), optimizer=ps.Sum(), partitions=8)
    ranges = {"w": [(3, 40), (90, 100)]}

    def added() -> dict[str, Any]:
        grads = {"w": rng.normal(size=47).astype(np.float32), "b": rng.normal(size=10).astype(np.float32)}
        sums["w"][np.r_[3:40, 90:100]] += grads["w"]
        sums["b"] += grads["b"]
        return grads

    async def on_a_loop() -> ps.Params:
        async with ps.AsyncClient(client.url) as own, own.model(name).worker() as w:
            return await w.pushpull(added(), ranges=ranges)

    with model.worker() as w:
        p = w.pushpull(added(), ranges=ranges)
        p = w.pushpull(added(), ranges=ranges, out=p)
    assert all(np.array_equal(p[n], values) for n, values in sums.items())
    p = asyncio.run(on_a_loop())
    assert all(np.array_equal(p[n], values) for n, values in sums.items())


@pytest.mark.parametrize("consistency", [ps.Async(), ps.Sync(), ps.SSP(2)], ids=lambda c: type(c).__name__)
def test_a_table_is_trained_by_rows(client: ps.Client, name: str, consistency: Any) -> None:
    """Rows come in the order asked, and are pushed in any; a pull before each step has the sums of all before it."""
    rng = np.random.default_rng(3)
    table, b = rng.integers(-9, 9, (500, 2, 3)).astype(np.float32), np.zeros(4, np.float32)
    model = client.create_model(name, {"t": table, "b": b}, optimizer=ps.Sum(), partitions=8, consistency=consistency)

    def batch() -> tuple[Any, Any]:
        ids = rng.integers(0, 500, rng.integers(1, 90))
        g = rng.integers(-9, 9, (ids.size, 2, 3)).astype(np.float32)
        np.add.at(table, ids, g)
        b[:] += 1
        return {"t": ids}, {"t": g, "b": np.ones(4)}

    async def on_a_loop() -> None:
        async with ps.AsyncClient(client.url) as own, own.model(name).worker() as w:
            for _ in range(3):
                rows, grads = batch()
                await w.step(grads, rows=rows)
                assert np.array_equal((await w.pull(rows=rows))["t"], table[rows["t"]])
                assert np.array_equal((await own.model(name).pull(rows=rows, copy=False))["t"], table[rows["t"]])

    with model.worker() as w:
        for _ in range(3):
            rows, grads = batch()
            before = w.pull(["b"], rows=rows)
            w.step(grads, rows=rows)
            after = w.pull(["b"], rows=rows)
            assert np.array_equal(after["t"], table[rows["t"]])
            assert (after["b"] - before["b"]).tolist() == [1.0] * 4
        rows, grads = batch()
        if consistency != ps.Sync():
            assert np.array_equal(w.pushpull(grads, rows=rows)["t"], table)
        else:
            w.step(grads, rows=rows)
    asyncio.run(on_a_loop())
    p = model.pull()
    assert np.array_equal(p["t"], table)
    assert np.array_equal(p["b"], b)
    if consistency == ps.Async():
        rows, grads = batch()
        assert np.array_equal(model.pushpull(grads, rows=rows)["t"], table)


def test_a_push_may_have_more_rows_than_a_request(client: ps.Client, name: str) -> None:
    """Rows of which several requests to one shard are made are one push and one step, and are pulled alike."""
    model = client.create_model(name, {"t": (160_000, 1), "b": (3,)}, optimizer=ps.Adam(lr=0.5), partitions=4)
    rows = {"t": np.arange(0, 160_000, 2)[::-1]}

    done = model.push({"t": np.ones((80_000, 1), np.float32)}, rows=rows)
    p = model.pull()

    assert (done.state, done.version, p.version) == ("applied", 1, 1)
    assert p["t"].ravel().tolist() == pytest.approx([-0.5, 0.0] * 80_000)
    assert np.array_equal(model.pull(rows=rows)["t"], p["t"][rows["t"]])


def test_a_worker_on_a_loop_is_opened_by_one_task(shared_cluster: Cluster, name: str) -> None:
    """Of two tasks that open one worker at once, one is refused, and the other's end leaves no worker behind.

    The errors outside the block say whether it has not begun or is over.
    """

    async def main() -> None:
        async with ps.AsyncClient(shared_cluster.url) as client:
            model = await client.create_model(name, {"w": (100,)}, optimizer=ps.Sum())
            worker = model.worker()
            with pytest.raises(ps.ConflictError, match="the worker has not joined yet"):
                await worker.pull()

            async def train() -> int:
                async with worker:
                    await worker.step(ones())
                    return len(await model.workers())

            outcomes = await asyncio.gather(train(), train(), return_exceptions=True)

            assert outcomes[0] == 1
            with pytest.raises(ps.ConflictError, match="opened only once"):
                raise cast(Any, outcomes[1])
            assert not any(w["alive"] for w in await model.workers())
            with pytest.raises(ps.ConflictError, match="the worker has left"):
                await worker.pull()

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
                    await asyncio.gather(*(w.push({"w": g}) for g in given))
                    total += sum(given)
                for _ in range(10):
                    await w.push({"w": np.zeros(4096)})
            np.testing.assert_allclose((await model.pull())["w"], total, atol=1e-3)

    asyncio.run(main())


def test_shared_arrays_are_read_only_and_reused(client: ps.Client, name: str) -> None:
    """`pull(copy=False)` returns the same read-only arrays for as long as they satisfy `min_version`."""
    model = client.create_model(name, {"w": (100,)}, optimizer=ps.Sum(), partitions=8)
    model.push(ones())

    first = model.pull(copy=False, min_version=1)
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
