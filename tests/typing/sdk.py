"""The types of the public API, checked with `assert_type`: read by mypy, never run."""

from collections.abc import Generator
from contextlib import aclosing, closing
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import paramserver as ps


def blocking(loss: float, gradient: npt.NDArray[np.float32]) -> None:
    """The blocking client has the types that docs/sdk.md shows."""
    client = ps.connect("http://a:8700,http://b:8700", timeout=5.0, token="t")
    schedules: list[ps.Schedule] = [ps.Constant(), ps.Cosine(t_max=100)]
    assert_type(client, ps.Client)
    assert_type(ps.Client("http://a:8700", token="t"), ps.Client)
    model = client.create_model(
        "demo",
        {"w": gradient, "b": (10,), "v": ps.Param((784, 64), init="xavier_uniform", lr_scale=0.5)},
        optimizer=ps.Adam(lr=1e-3, clip_norm=1.0, schedule=schedules[1]),
        consistency=ps.SSP(3),
        exist_ok=True,
    )
    assert_type(model, ps.Model)
    assert_type(client.model("demo"), ps.Model)
    assert_type(client.models(), list[str])
    assert_type(client.status(), dict[str, Any])
    p = model.pull(["w", "layers.*"], min_version=7, wait_s=5, dtype="float16", timeout=1.0)
    assert_type(p, ps.Params)
    assert_type(p["w"], npt.NDArray[Any])
    assert_type(p.flat, npt.NDArray[Any])
    assert_type(p.version, int)
    assert_type(dict(p), dict[str, npt.NDArray[Any]])
    assert_type(model.pull(out=p), ps.Params)
    done = model.push({"w": gradient}, base=p, weight=2.0, ranges={"w": [(0, 128)]})
    assert_type(done, ps.Pushed)
    assert_type(model.pull(rows={"w": [7, 2], "b": np.array([3])}, ranges={"v": np.array([[0, 128]])}), ps.Params)
    assert_type(model.push({"w": gradient}, rows={"w": gradient.argsort()}), ps.Pushed)
    assert_type(done.duplicate, bool)
    assert_type(done.version, int)
    assert_type(model.pushpull(gradient, base=p, out=p), ps.Params)
    assert_type(model.info(), dict[str, Any])
    assert_type(model.metrics("loss")[0].value, float)
    assert_type(model.metrics(), dict[str, list[ps.Point]])
    assert_type(model.checkpoint("ckpt/"), dict[str, Any])
    assert_type(client.restore("ckpt/", as_="demo2"), ps.Model)
    assert_type(model.restore("latest", as_="demo2", partitions=2), ps.Model)
    model.set(lr=0.05, consistency=ps.Sync(quorum=0.75, late="fold"))
    with model.worker() as w:
        assert_type(w, ps.Worker)
        assert_type(w.tasks("train"), Generator[ps.Task, None, None])
        with closing(w.tasks("train")) as tasks:
            assert_type(next(tasks), ps.Task)
        for task in w.tasks("train"):
            assert_type((task.start, task.stop, task.uri), tuple[int, int, str | None])
            assert_type(w.pull(), ps.Params)
            assert_type(w.step({"w": gradient}, loss=loss, accuracy=0.9), ps.Pushed)
            w.step({"w": gradient}, loss=gradient.mean(), accuracy=np.float64(0.9))
            w.exchange({"w": gradient}, loss=np.float32(0.5))
            w.report(accuracy=np.float32(0.9))
            w.evaluate(lambda q: {"accuracy": np.float32(0.9)})
        assert_type(w.clock(), int)
        assert_type((w.rank, w.draining), tuple[int, bool])
        assert_type(w.client.model(w.model), ps.Model)
        assert_type(w.stream(), ps.PushStream)
        assert_type(w.state, dict[str, Any])
        assert_type(w.evaluate(lambda q: {"loss": float(q["w"].sum())}), dict[str, float] | None)
    own: ps.Client = ps.local(shards=2)
    own.close()
    with ps.local(shards=2) as own:
        own.models()


async def on_a_loop(gradient: npt.NDArray[np.float32]) -> None:
    """The asyncio client has the same API with awaitable methods."""
    async with ps.AsyncClient() as client:
        assert_type(client, ps.AsyncClient)
        model = client.model("demo")
        assert_type(model, ps.AsyncModel)
        assert_type(await model.pull(), ps.Params)
        assert_type(await model.push({"w": gradient}), ps.Pushed)
        async with model.worker() as w:
            assert_type(w, ps.AsyncWorker)
            assert_type(w.client, ps.AsyncClient)
            assert_type(w.stream(), ps.AsyncPushStream)
            async with aclosing(w.tasks("train")) as tasks:
                async for task in tasks:
                    assert_type(task, ps.Task)
            assert_type(await w.step({"w": gradient}, ack="journaled"), ps.Pushed)
        assert_type(await model.metrics("loss"), list[ps.Point])
        assert_type(await model.metrics(), dict[str, list[ps.Point]])


def wrong() -> None:
    """A type checker refuses these calls: an unused ignore is an error in strict mode."""
    ps.Sync(late="sometimes")  # type: ignore[arg-type]
    ps.connect(timeout="soon")  # type: ignore[arg-type]
    ps.connect("http://a:8700", 5.0)  # type: ignore[call-arg]
    ps.Adam(learning_rate=0.1)  # type: ignore[call-arg]
    ps.Adamm(lr=0.1)  # type: ignore[attr-defined]
