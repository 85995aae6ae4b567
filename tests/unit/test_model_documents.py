"""`GET /models/{m}`, which every worker asks for again and again."""

import json
from typing import Any

import msgpack
import pytest
from starlette.types import ASGIApp, Message

from paramserver.core.scheduler import io
from paramserver.core.scheduler.models import Model
from paramserver.core.spec import ModelSpec
from paramserver_scheduler.routes import models

from .leading import leading
from .scheduling import SPEC


async def get(served: ASGIApp, model: str, kind: str = "json") -> Any:
    """Return the document of a model."""
    answer = list[Message]()

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        answer.append(message)

    scope = {"type": "http", "http_version": "1.1", "method": "GET", "path": f"/models/{model}"}
    headers = [(b"accept", f"application/{kind}".encode())]
    await served({**scope, "query_string": b"", "headers": headers}, receive, send)
    body = answer[1]["body"]
    return json.loads(body) if kind == "json" else msgpack.unpackb(body)


@pytest.mark.parametrize("kind", ["json", "msgpack"])
async def test_a_models_document_has_its_present_spec(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spec is encoded once, until it changes or other models have been asked for since."""
    monkeypatch.setattr(models, "TEXTS_KEPT_MAX", 2)
    made: list[str] = []
    document = ModelSpec.document

    def counted(spec: ModelSpec) -> Any:
        made.append(spec.name)
        return document(spec)

    runtime, _, served = leading()
    runtime.send(io.JoinShard(0, "s0", ["http://s0:1"]))
    for name in "abc":
        runtime.send(io.CreateModel(0, SPEC | {"name": name}, "x"))
    monkeypatch.setattr(ModelSpec, "document", counted)
    for _ in range(2):
        assert await get(served, "a", kind) == runtime.core.read.model("a")
    assert made == ["a", "a", "a"]  # the other two are what it is compared with

    runtime.send(io.PatchModel(0, "a", {"optimizer": {"lr": 0.5}}))
    for name in "abca":
        found = await get(served, name, kind)
        assert (found["name"], found["spec"]) == (name, runtime.core.read.model(name)["spec"])
    assert found["spec"]["optimizer"]["lr"] == 0.5


async def test_for_a_burst_of_requests_the_partitions_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All clients ask when a shard dies; each is told the present owners, while versions may be of a moment ago."""
    now, made = [0.0], list[str]()
    lines = Model.partition_lines

    def counted(model: Model) -> Any:
        made.append(model.name)
        return lines(model)

    async def burst() -> list[Any]:
        found = [await get(served, "m") for _ in range(5)]
        assert all(document == found[0] for document in found)
        return [found[0]["clock"], *((p["shard"], p["version"], p["served"]) for p in found[0]["partitions"])]

    def beat(version: int) -> None:
        found = runtime.core.read.model("m")["partitions"]
        key, numbers = runtime.core.read.key("m"), (version, 0, 1, 0, 0, 0)
        rows = [["m", key.generation, p["index"], p["incarnation"], *numbers] for p in found if p["shard"] == "s0"]
        runtime.send(io.ShardHeartbeat(0, "s0", 1, {}, rows))
        made.clear()

    monkeypatch.setattr(models, "monotonic", lambda: now[0])
    monkeypatch.setattr(models, "LINE_KEPT_S", 1.0)
    runtime, _, served = leading()
    runtime.send(io.JoinShard(0, "s0", ["http://s0:1"]))
    runtime.send(io.CreateModel(0, SPEC | {"partitions": 2}, "x"))
    monkeypatch.setattr(Model, "partition_lines", counted)

    assert (await burst(), made) == ([0, ("s0", 0, False), ("s0", 0, False)], ["m"])
    beat(3)
    assert (await burst(), made) == ([0, ("s0", 3, True), ("s0", 3, True)], ["m"])
    beat(4)
    assert (await burst(), made) == ([0, ("s0", 3, True), ("s0", 3, True)], [])
    now[0] += 2.0
    assert (await burst(), made) == ([0, ("s0", 4, True), ("s0", 4, True)], ["m"])
    made.clear()
    runtime.send(io.LeaveShard(0, "s0", 1))
    assert (await burst(), made) == ([0, (None, 4, False), (None, 4, False)], ["m"])
