"""`GET /models/{m}`, which every worker asks for again and again."""

import json
from typing import Any

import msgpack
import pytest
from starlette.types import Message

from paramserver.core.scheduler import io
from paramserver.core.spec import ModelSpec
from paramserver_scheduler.routes import models

from .leading import leading
from .scheduling import SPEC


@pytest.mark.parametrize("kind", ["json", "msgpack"])
async def test_a_models_document_has_its_present_spec(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In JSON a spec is encoded once, until it changes or other models have been asked for since."""
    monkeypatch.setattr(models, "SPECS_KEPT_MAX", 2)
    made: list[str] = []
    document = ModelSpec.document

    def counted(spec: ModelSpec) -> Any:
        made.append(spec.name)
        return document(spec)

    async def get(model: str) -> Any:
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

    runtime, _, served = leading()
    runtime.send(io.JoinShard(0, "s0", ["http://s0:1"]))
    for name in "abc":
        runtime.send(io.CreateModel(0, SPEC | {"name": name}, "x"))
    monkeypatch.setattr(ModelSpec, "document", counted)
    for _ in range(2):
        assert await get("a") == runtime.core.read.model("a")
    assert made == (["a", "a", "a"] if kind == "json" else ["a"] * 4)  # the other two are what it is compared with

    runtime.send(io.PatchModel(0, "a", {"optimizer": {"lr": 0.5}}))
    for name in "abca":
        found = await get(name)
        assert (found["name"], found["spec"]) == (name, runtime.core.read.model(name)["spec"])
    assert found["spec"]["optimizer"]["lr"] == 0.5
