"""A scripted node for tests of a worker's session, without I/O."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from paramserver.client.cluster import Cluster
from paramserver.client.session import Session
from paramserver.core.spec import ModelSpec
from paramserver.errors import problem
from paramserver.net.calls import Deadline, Outcome, Request, Response
from paramserver.wire.frame import MEDIA_TYPE, PullFrame, PullReply, PushFrame, PushReply, decode_header, encode_header

from .sharding import drive

BEAT = "/models/m/workers/m%2Fw0"
GRAD = {"w": np.ones(4, np.float32)}


def ok(doc: Any, status: int = 200) -> Response:
    """Return an answer with this document."""
    return Response(status, {"content-type": "application/json"}, json.dumps(doc).encode())


def no(code: str, **members: Any) -> Response:
    """Return a refusal with this code."""
    doc = problem(code, "refused", **members).document()
    return Response(doc["status"], {}, json.dumps(doc).encode())


class Node:
    """A scheduler and shard in one; the outcomes scripted for a path come before its own answers."""

    def __init__(self, mode: str = "sync") -> None:
        self.spec = ModelSpec.parse(
            {"name": "m", "params": {"w": {"shape": [4]}}, "consistency": {"mode": mode}, "partitions": 1}
        )
        self.mode, self.settings_tag = mode, 1
        self.epoch, self.timeline, self.clock, self.version, self.generation = 0, 0, 0, 0, 1
        self.script: dict[str, list[Outcome]] = {}
        self.sent: list[tuple[str, str, Any]] = []
        self.pushes: list[PushFrame] = []
        self.pulls: list[PullFrame] = []

    def __call__(self, request: Request) -> Outcome:
        path, body = request.path, bytes(request.body or b"")
        framed = body[:2] == b"PS"
        self.sent.append((request.method, path, None if framed or not body else json.loads(body)))
        if self.script.get(path):
            return self.script[path].pop(0)
        if path == "/livez":
            return Response(200, {})
        if path == "/models/m":
            return ok(self.document())
        if path == "/models/m/workers":
            self.epoch += 1
            return ok(self.joined(), 201)
        if path.startswith("/models/m/workers/"):
            if self.sent[-1][2] is not None and self.sent[-1][2]["generation"] != self.generation:
                return no("model_replaced", generation=self.generation)
            told = {"state": "active", "clock": self.clock, "min_clock": 0, "timeline": self.timeline}
            return ok({**told, "evaluate": False, "settings_tag": self.settings_tag})
        if path == "/models/m/clock":
            return ok(
                {
                    "released": True,
                    "clock": self.sent[-1][2]["clock"],
                    "version": self.sent[-1][2]["clock"],
                    "state": "active",
                }
            )
        if path == "/models/m/metrics":
            return ok({"accepted": 1})
        assert framed, path
        if path == "/push":
            self.pushes.append(decode_header(body, PushFrame)[0])
            state = "staged" if self.mode == "sync" else "applied"
            reply = PushReply(state, False, 0, 0, 1, self.timeline, [(0, 0, 1, 0)])
            return Response(200, {"content-type": MEDIA_TYPE}, encode_header(reply))
        self.pulls.append(decode_header(body, PullFrame)[0])
        values = PullReply("m", self.generation, self.timeline, self.version, 1, "float32", [(0, self.version, 1)])
        assert request.sink is not None
        request.sink.begin()
        request.sink.feed(memoryview(encode_header(values) + np.zeros(4, "<f4").tobytes()))
        request.sink.end()
        return Response(200, {})

    def document(self) -> dict[str, Any]:
        """The model's document."""
        spec = {**self.spec.document(), "consistency": {"mode": self.mode}}
        return {
            "name": "m", "generation": self.generation, "timeline": self.timeline, "clock": self.clock,
            "map_epoch": self.generation, "settings_tag": self.settings_tag, "spec": spec,
            "partitions": [{"index": 0, "shard": "a"}], "shards": {"a": {"addresses": ["http://a:1"]}},
        }  # fmt: skip

    def joined(self) -> dict[str, Any]:
        """The answer to a join."""
        return {
            "worker": "m/w0", "epoch": self.epoch, "rank": 3, "lease_s": 5.0, "clock": self.clock,
            "timeline": self.timeline, "generation": self.generation, "state": None,
        }  # fmt: skip

    def bodies(self, path: str) -> list[Any]:
        """Return the documents that were sent to this path."""
        return [b for _, p, b in self.sent if p == path]


def deadline() -> Deadline:
    """Return a deadline that no test reaches."""
    return Deadline.after(30.0)


def opened(node: Callable[[Request], Outcome]) -> Session:
    """Return the session of a worker that has joined at the node."""
    session = Session(Cluster(("http://given:1",)), "m", None, None, 30.0)
    drive(session.join(deadline()), node)
    return session


def joined(mode: str = "sync") -> tuple[Node, Session]:
    """Return a node and the session of a worker that has joined there."""
    node = Node(mode)
    return node, opened(node)
