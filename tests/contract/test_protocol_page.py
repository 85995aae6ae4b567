"""docs/protocol.md is enough to write a client: this one has sockets, JSON and msgpack, and nothing of paramserver."""

import http.client
import json
import struct
import threading
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import msgpack
import pytest

from .processes import Nodes, unique

pytestmark = pytest.mark.process

KIND = "application/vnd.paramserver.frame"


def asked(base: str, method: str, path: str, body: bytes | None = None, kind: str = KIND) -> tuple[int, bytes]:
    """Send a request over HTTP/1.1, and return status and body of the answer; wait while a node cannot serve."""
    for _ in range(100):
        with closing(http.client.HTTPConnection(urlsplit(base).netloc, timeout=20.0)) as connection:
            connection.request(method, path, body, {} if body is None else {"content-type": kind})
            answer = connection.getresponse()
            status, content = answer.status, answer.read()
        if status != 503:
            break
        threading.Event().wait(0.1)
    return status, content


def frame(header: dict[str, Any], values: Sequence[float] = ()) -> bytes:
    """Return a frame, whose body is these numbers as float32."""
    packed: bytes = msgpack.packb(header)
    head = b"PS\x01\x00" + len(packed).to_bytes(4, "little") + packed
    return head + bytes(-len(head) % 64) + struct.pack(f"<{len(values)}f", *values)


def read(answer: bytes) -> tuple[dict[str, Any], list[float]]:
    """Return header and body of a frame."""
    assert answer[:4] == b"PS\x01\x00"
    end = 8 + int.from_bytes(answer[4:8], "little")
    header: dict[str, Any] = msgpack.unpackb(answer[8:end])
    return header, [x for (x,) in struct.iter_unpack("<f", answer[end + -end % 64 :])]


class Model:
    """A model as `GET /models/{m}` tells of it."""

    def __init__(self, node: str, name: str) -> None:
        status, body = asked(node, "GET", f"/models/{name}")
        assert status == 200
        self.told = json.loads(body)
        self.bounds = list(pairwise(self.told["bounds"]))
        self.owners: dict[str, list[int]] = {}
        for partition in self.told["partitions"]:
            self.owners.setdefault(partition["shard"], []).append(partition["index"])

    def address(self, shard: str) -> str:
        """Return the base URL of a shard."""
        return next(str(a) for a in self.told["shards"][shard]["addresses"] if a.startswith("http:"))

    def header(self, **more: Any) -> dict[str, Any]:
        """Return the header of a frame, which says what is known of the model."""
        return {
            "model": self.told["name"],
            **{k: self.told[k] for k in ("generation", "map_epoch", "timeline")},
            **more,
        }

    def push(self, shard: str, vector: Sequence[float], **more: Any) -> tuple[int, bytes]:
        """Push to a shard its partitions' part of a flat vector."""
        return self.push_to(self.address(shard), self.owners[shard], vector, self.header(**more))

    def push_to(
        self, address: str, partitions: list[int], vector: Sequence[float], header: dict[str, Any]
    ) -> tuple[int, bytes]:
        """Push these partitions of a flat vector to some address."""
        parts, values = [], list[float]()
        for index in partitions:
            parts.append([index, None, None])
            values += vector[slice(*self.bounds[index])]
        return asked(address, "POST", "/push", frame({**header, "parts": parts}, values))

    def pull(self) -> list[float]:
        """Pull the flat vector."""
        vector = [0.0] * self.bounds[-1][1]
        for shard, partitions in self.owners.items():
            request = frame(self.header(parts=[[i, None] for i in partitions]))
            status, answer = asked(self.address(shard), "POST", "/pull", request)
            assert status == 200
            header, values = read(answer)
            assert [part[0] for part in header["parts"]] == partitions
            for index in partitions:
                start, stop = self.bounds[index]
                vector[start:stop], values = values[: stop - start], values[stop - start :]
        return vector


def test_a_client_written_from_the_page_pushes_and_pulls(rest_cluster: Nodes) -> None:
    """Such a client puts each element in its place, repeats a push, finds the owner again, and needs no map at all."""
    name = unique("page")
    # Names that a sorted map would put into another order than the spec has.
    spec = {
        "name": name,
        "params": {"b": {"shape": [2, 3]}, "10": {"shape": [7]}, "9": {"shape": [4]}},
        "optimizer": {"name": "sum"},
        "partitions": 4,
    }
    made = asked(rest_cluster.url, "POST", "/models", json.dumps(spec).encode(), "application/json")
    assert made[0] == 201, made
    model, first = Model(rest_cluster.url, name), [float(x) for x in range(17)]
    assert len(model.owners) == 2, "both shards have partitions"

    for duplicate in (False, True):
        for shard in model.owners:
            status, answer = model.push(shard, first, worker="page", epoch=1, seq=0)
            header, _ = read(answer)
            assert (status, header["state"]) == (200, "applied")
            assert header["duplicate"] >= duplicate  # the first one, too, if its answer was lost in a standstill
    assert model.pull() == first
    status, answer = asked(
        rest_cluster.url, "POST", "/pull", json.dumps({"model": name}).encode(), kind="application/json"
    )
    assert json.loads(answer)["params"] == {
        "b": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
        "10": [6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0],
        "9": [13.0, 14.0, 15.0, 16.0],
    }

    one, other = model.owners
    ident = {"worker": "page", "epoch": 1, "seq": 1}
    status, answer = model.push_to(model.address(one), model.owners[other], first, model.header(**ident))
    assert (status, json.loads(answer)["code"]) == (421, "wrong_owner")
    assert json.loads(answer)["map_epoch"] >= model.told["map_epoch"]
    header = {k: v for k, v in model.header(**ident).items() if k != "map_epoch"}
    for node, duplicate in ((model.address(one), False), (rest_cluster.url, True)):
        status, answer = model.push_to(node, list(range(4)), first, header)
        assert status == 200
        assert read(answer)[0]["duplicate"] >= duplicate
    assert model.pull() == [2.0 * x for x in first]
