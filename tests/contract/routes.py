"""A model made for one test, requests to its shards, and what their answers must be."""

from typing import Any

import httpx
import numpy as np

from paramserver.core.layout import Layout
from paramserver.core.spec import ModelSpec
from paramserver.wire.frame import MEDIA_TYPE, PullFrame, PushFrame, PushPart, encode_header

from .processes import Nodes, unique

SHARDS = ("shard-0", "shard-1")
MSGPACK = {"content-type": "application/msgpack"}


class Model:
    """A model made for one test, and requests to its shards."""

    def __init__(self, cluster: Nodes, **spec: Any) -> None:
        self.cluster = cluster
        self.name = unique("m")
        self.spec = {"name": self.name, "params": {"w": {"shape": [6, 4]}, "b": {"shape": []}}, "partitions": 4}
        self.spec |= {"optimizer": {"name": "sum"}} | spec
        self.document = cluster.post("/models", self.spec, status=201)
        self.layout = Layout(ModelSpec.parse(self.document["spec"]))
        self.http = cluster.http

    def url(self, index: int) -> str:
        """Base URL of a shard."""
        return f"http://127.0.0.1:{self.cluster.shard_ports[SHARDS[index]]}"

    def ask(self, path: str, body: Any, shard: int = 0, **headers: str) -> httpx.Response:
        """POST a JSON body to a shard; the model's name is added."""
        names = {k.replace("_", "-"): v for k, v in headers.items()}
        return self.http.post(self.url(shard) + path, json={"model": self.name, **body}, headers=names)

    def push(self, grads: Any, shard: int = 0, **fields: Any) -> httpx.Response:
        """Push by name."""
        return self.ask("/push", {"grads": grads, **fields}, shard)

    def values(self, name: str = "w", shard: int = 0) -> Any:
        """Pull one parameter by name."""
        answer = self.ask("/pull", {"names": [name]}, shard)
        assert answer.status_code == 200, answer.text
        return answer.json()["params"][name]

    def owned(self, shard: int) -> list[int]:
        """Partitions that a shard owns."""
        return [p["index"] for p in self.document["partitions"] if p["shard"] == SHARDS[shard]]

    def frame(self, path: str, frame: PushFrame | PullFrame, body: bytes = b"", shard: int = 0) -> httpx.Response:
        """POST a frame to a shard."""
        content = encode_header(frame) + body
        return self.http.post(self.url(shard) + path, content=content, headers={"content-type": MEDIA_TYPE})

    def everywhere(self, value: float, **fields: Any) -> tuple[PushFrame, bytes]:
        """A frame for every partition, without a map epoch, and its body."""
        frame = PushFrame(self.name, [PushPart(i, None, None) for i in range(4)], **fields)
        return frame, np.full(self.layout.size, value, np.float32).tobytes()


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Return the problem document of an answer that must have that status and code."""
    assert answer.status_code == status, answer.text
    document: dict[str, Any] = answer.json()
    assert document["code"] == code, document
    return document


def unchanged(model: Model) -> bool:
    """Whether nothing was applied to any partition."""
    answer = model.ask("/pull", {}).json()
    return bool(answer["version"] == 0 and not np.any(answer["params"]["w"]) and answer["params"]["b"] == 0.0)
