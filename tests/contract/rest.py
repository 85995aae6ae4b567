"""A plain HTTP client of one node in one encoding: what a client in any language could do."""

import json
from collections.abc import Mapping
from typing import Any

import httpx
import msgpack
import numpy as np

from .processes import Nodes, unique


def tensor(value: Any, dtype: str = "float32") -> dict[str, Any]:
    """Encode a msgpack tensor; bfloat16 is the upper half of each float32."""
    array = np.asarray(value, "<f4")
    raw = (array.view("<u4") >> 16).astype("<u2") if dtype == "bfloat16" else array.astype(np.dtype(dtype))
    return {"dtype": dtype, "shape": list(array.shape), "data": raw.tobytes()}


def plain(value: Mapping[str, Any]) -> Any:
    """Decode a msgpack tensor to nested lists, or to a number if its shape is []."""
    if value["dtype"] == "bfloat16":
        array = (np.frombuffer(value["data"], "<u2").astype("<u4") << 16).view("<f4")
    else:
        array = np.frombuffer(value["data"], np.dtype(value["dtype"]))
    return array.reshape(value["shape"]).tolist()


class Face:
    """Requests to one node, all in JSON or all in msgpack."""

    def __init__(self, cluster: Nodes, url: str, kind: str) -> None:
        self.http = cluster.http
        self.url = url
        self.kind = f"application/{kind}"

    def call(self, method: str, path: str, body: Any = None, status: int = 200, **headers: str) -> Any:
        """Return the decoded answer, which must have that status; see `raw`."""
        answer = self.raw(method, path, body, **headers)
        assert answer.status_code == status, f"{method} {path}: {answer.status_code} {answer.content[:500]!r}"
        if not answer.content:
            return None
        if answer.headers["content-type"] == "application/msgpack":
            return msgpack.unpackb(answer.content)
        return json.loads(answer.content)

    def raw(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        """Send one request; a keyword such as `idempotency_key` becomes the header Idempotency-Key."""
        sent = {k.replace("_", "-"): v for k, v in headers.items()} | {"accept": self.kind}
        if body is None:
            return self.http.request(method, self.url + path, headers=sent)
        content = json.dumps(body).encode() if self.kind == "application/json" else msgpack.packb(body)
        return self.http.request(method, self.url + path, content=content, headers=sent | {"content-type": self.kind})

    def refused(self, method: str, path: str, body: Any, status: int, code: str, **headers: str) -> dict[str, Any]:
        """Return the problem document of a request that must fail with this status and code."""
        document: dict[str, Any] = self.call(method, path, body, status, **headers)
        assert document["code"] == code, document
        assert document["request_id"]
        assert document["status"] == status
        return document

    def value(self, value: Any) -> Any:
        """Encode a value for this face: as it is in JSON, as a tensor in msgpack."""
        return value if self.kind == "application/json" else tensor(value)

    def make(self, **spec: Any) -> str:
        """Create a model of a 2x3 matrix `w` and a number `b`, on both shards; return its name."""
        name = unique("m")
        params = {"w": {"shape": [2, 3]}, "b": {"shape": []}}
        base = {"name": name, "params": params, "partitions": 2, "optimizer": {"name": "sum"}}
        self.call("POST", "/models", base | spec, 201)
        return name

    def push(self, model: str, grads: Mapping[str, Any], status: int = 200, **fields: Any) -> Any:
        """Push by name."""
        body = {"model": model, "grads": {n: self.value(v) for n, v in grads.items()}}
        return self.call("POST", "/push", body | fields, status)

    def pull(self, model: str, **fields: Any) -> dict[str, Any]:
        """Pull values by name, decoded to numbers and nested lists."""
        params = self.call("POST", "/pull", {"model": model, **fields})["params"]
        return {n: plain(v) if isinstance(v, dict) else v for n, v in params.items()}

    def join(self, model: str, name: str) -> str:
        """Join a worker, which must get epoch 1, and return its id."""
        joined = self.call("POST", f"/models/{model}/workers", {"name": name, "lease_s": 60}, 201)
        assert joined["epoch"] == 1
        return str(joined["worker"])

    def clock(self, model: str, worker: str, clock: int, status: int = 200, **fields: Any) -> Any:
        """Report finished iterations."""
        body = {"worker": worker, "epoch": 1, "clock": clock, "wait_s": 10, **fields}
        return self.call("POST", f"/models/{model}/clock", body, status)
