"""Encoded pushes at a shard: applied, staged, forwarded, repeated, and refused if they contradict their header."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgpack
import msgspec
import numpy as np
import pytest
from msgspec.structs import asdict
from tests.decoding import decode_partition
from tests.waiting import eventually

import paramserver as ps
from paramserver.codecs.codec import Codec
from paramserver.codecs.parts import encode_partition
from paramserver.codecs.stage import pack
from paramserver.core.layout import Layout
from paramserver.core.ranges import of_pairs
from paramserver.core.spec import ModelSpec
from paramserver.types import AnyArray, PushId
from paramserver.wire.frame import MEDIA_TYPE, Header, PushFrame, PushPart, PushReply, decode_header, encode_header

from .processes import START_S, Nodes, nodes, unique

pytestmark = pytest.mark.process
PARTITIONS = 4


def ident(push_id: PushId | None) -> dict[str, Any]:
    """The frame fields of a push id."""
    return {} if push_id is None else asdict(push_id)


class Model:
    """A model that adds up what is pushed, over four partitions and both shards."""

    def __init__(self, cluster: Nodes, **spec: Any) -> None:
        self.name = unique("codec")
        body = {
            "name": self.name, "params": {"w": {"shape": [1500]}, "b": {"shape": [7]}}, "partitions": PARTITIONS,
            "optimizer": {"name": "sum"}, **spec,
        }  # fmt: skip
        self.http = cluster.http
        self.url = cluster.url
        self.document = self.http.post(f"{cluster.url}/models", json=body).raise_for_status().json()
        self.layout = Layout(ModelSpec.parse(self.document["spec"]))
        self.shard_url = f"http://127.0.0.1:{cluster.shard_ports['shard-0']}"
        self.flat = np.random.default_rng(1).standard_normal(self.layout.size, dtype=np.float32)

    def encoded(self, text: str) -> tuple[list[AnyArray], AnyArray]:
        """Return each partition encoded but not packed, and the concatenation of what they decode to."""
        codec, parts, decoded = Codec.parse(text), [], []
        for a, b in zip(self.layout.bounds[:-1], self.layout.bounds[1:], strict=True):
            parts.append(encode_partition(codec, self.flat[a:b], None, None)[0])
            decoded.append(decode_partition(codec.coding, parts[-1], b - a))
        return parts, np.concatenate(decoded)

    def push(
        self, text: str, parts: Sequence[AnyArray], push_id: PushId | None = None, clock: int | None = None
    ) -> httpx.Response:
        """Send one frame of all partitions to the first shard, which forwards what the second one owns."""
        codec = Codec.parse(text)
        bodies = parts if codec.stage is None else [pack(codec.stage, p) for p in parts]
        frame = PushFrame(
            self.name, [PushPart(i, None, None) for i in range(len(parts))],
            encoding=codec.text, sizes=[(b.size, p.size) for b, p in zip(bodies, parts, strict=True)], clock=clock,
            **ident(push_id),
        )  # fmt: skip
        return self.send(frame, b"".join(b.tobytes() for b in bodies))

    def send(self, header: Header | dict[str, Any], body: bytes) -> httpx.Response:
        """POST a frame."""
        content = encode_header(header) + body
        return self.http.post(f"{self.shard_url}/push", content=content, headers={"content-type": MEDIA_TYPE})

    def values(self) -> AnyArray:
        """Pull all values as one flat array."""
        headers = {"content-type": "application/msgpack", "accept": "application/msgpack"}
        answer = self.http.post(f"{self.url}/pull", content=msgpack.packb({"model": self.name}), headers=headers)
        params = msgpack.unpackb(answer.raise_for_status().content)["params"]
        return np.concatenate([np.frombuffer(params[n]["data"], np.float32) for n in ("w", "b")])


@pytest.fixture
def model(rest_cluster: Nodes) -> Model:
    """A new model for each test."""
    return Model(rest_cluster)


@pytest.fixture
def without_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """A scheduler and a shard as in a pod of Kubernetes."""
    monkeypatch.setenv("PARAMSERVER_SHARED_MEMORY", "")
    with nodes(tmp_path, shards=1) as cluster:
        yield cluster


def refused(answer: httpx.Response, status: int, code: str) -> str:
    """The detail of a problem document that must have that status and code."""
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    return str(answer.json()["detail"])


@pytest.mark.parametrize("text", ["int8", "topk:0.1", "int8+zstd", "int8+lz4", "topk:0.1+zstd", "topk:0.1+lz4"])
def test_encoded_partitions_are_applied_on_both_shards(model: Model, text: str) -> None:
    """Values pulled after an encoded push are exactly those that its bytes decode to, on both shards."""
    parts, decoded = model.encoded(text)

    answer = model.push(text, parts)

    assert answer.status_code == 200, answer.text
    assert np.array_equal(model.values(), decoded)


@pytest.mark.parametrize("stage", ["zstd", "lz4"])
def test_elements_may_be_packed_too(model: Model, stage: str) -> None:
    """A push of packed fp32 elements is the same push as one of plain elements: a repeat is a duplicate."""
    whole = [p.view(np.uint8) for p in np.split(model.flat, model.layout.bounds[1:-1])]

    first = model.push(f"fp32+{stage}", whole, push_id=PushId("w", 1, 1))
    frame = PushFrame(model.name, [PushPart(i, None, None) for i in range(PARTITIONS)], worker="w", epoch=1, seq=1)
    again = model.send(frame, model.flat.tobytes())

    assert first.status_code == 200, first.text
    assert decode_header(again.content, PushReply)[0].duplicate
    assert np.array_equal(model.values(), model.flat)


def test_parts_of_a_usual_size_add_up_in_every_coding(without_shared_memory: Nodes) -> None:
    """Parts of more than 64 KiB as sent, of partitions of one size, leave the sum of what was pushed.

    A shard without shared memory computes neighbors one after the other, and reuses the memory of what it has applied.
    """
    gradient = np.random.default_rng(1).integers(-100, 101, 500_000).astype(np.float32)  # exact in all but int8
    with ps.connect(without_shared_memory.url) as client:
        model = client.create_model(unique("codec"), {"w": gradient.shape}, optimizer=ps.Sum(), partitions=4)
        for n, codec in enumerate(["fp32+zstd", "fp32+lz4", "fp16+zstd", "fp16+lz4", "bf16+zstd", "bf16+lz4"], 1):
            model.push({"w": gradient}, codec=codec)
            assert np.array_equal(model.pull()["w"], n * gradient), codec
        for codec in ("int8", "int8+zstd", "int8+lz4"):
            with model.worker(codec=codec) as worker:
                worker.push({"w": gradient})
        assert np.allclose(model.pull()["w"], 9 * gradient, atol=3.0)


def test_a_repeat_is_known_by_its_encoded_bytes(model: Model) -> None:
    """A repeated id with the same encoded bytes is a duplicate, packed or not; with others it is refused."""
    parts, decoded = model.encoded("int8")
    other, _ = model.encoded("topk:0.5")
    push_id = PushId("w", 1, 1)

    assert model.push("int8", parts, push_id=push_id).status_code == 200
    again = model.push("int8+zstd", parts, push_id=push_id)

    assert decode_header(again.content, PushReply)[0].duplicate
    refused(model.push("topk:0.5", other, push_id=push_id), 422, "id_reused")
    assert np.array_equal(model.values(), decoded)


def test_a_commit_takes_encoded_and_plain_contributions(rest_cluster: Nodes) -> None:
    """A commit applies the exact mean of an int8, a top-k and a plain ranged push."""
    model = Model(rest_cluster, consistency={"mode": "sync"})
    workers = f"{model.url}/models/{model.name}/workers"
    joined = [model.http.post(workers, json={"lease_s": 600}).json() for _ in range(3)]
    ids = [PushId(j["worker"], j["epoch"], 1) for j in joined]
    (int8, a), (topk, b) = model.encoded("int8"), model.encoded("topk:0.1")
    c = np.zeros(model.layout.size, np.float32)
    c[10:50] = 3.0

    assert model.push("int8", int8, push_id=ids[0], clock=0).status_code == 202
    assert model.push("topk:0.1+zstd", topk, push_id=ids[1], clock=0).status_code == 202
    ranged = PushFrame(model.name, [PushPart(0, None, of_pairs([(10, 50)]))], clock=0, **ident(ids[2]))
    assert model.send(ranged, c[10:50].tobytes()).status_code == 202
    for j in joined:
        body = {"worker": j["worker"], "epoch": j["epoch"], "clock": 1, "wait_s": 0}
        model.http.post(f"{model.url}/models/{model.name}/clock", json=body).raise_for_status()
    pull = {"model": model.name, "min_version": 1, "wait_s": 20}
    model.http.post(f"{model.url}/pull", json=pull).raise_for_status()

    got, want = model.values(), (a + b + c) / np.float32(3.0)
    assert np.array_equal(got, want), [(i, got[i], want[i]) for i in np.flatnonzero(got != want)[:8]]


def test_what_is_not_what_it_says_changes_nothing(model: Model) -> None:
    """An unknown codec is 415; wrong sizes, ranges, indices, stages or scales are 422 or 400; nothing is applied."""
    parts, _ = model.encoded("int8")
    sizes = [(p.size, p.size) for p in parts]
    frame = PushFrame(model.name, [PushPart(i, None, None) for i in range(PARTITIONS)], encoding="int8", sizes=sizes)
    whole = msgspec.to_builtins(frame)
    body = b"".join(p.tobytes() for p in parts)

    refused(model.send({**whole, "codec": "int4"}, body), 415, "unknown_codec")
    refused(model.send({**whole, "codec": "topk:0.1"}, body), 415, "unknown_codec")
    refused(model.send({**whole, "sizes": sizes[:-1]}, body), 422, "invalid_encoding")
    refused(model.send({**whole, "sizes": [[1, 1]] * PARTITIONS}, body), 422, "invalid_encoding")
    refused(model.send({**whole, "sizes": None}, body), 400, "malformed")
    ranged = [[i, None, [[0, 5]]] for i in range(PARTITIONS)]
    refused(model.send({**whole, "parts": ranged}, body), 422, "invalid_encoding")
    refused(model.send(whole, body[:-1]), 400, "malformed")
    refused(model.send({**whole, "codec": "int8+lz4"}, body), 422, "invalid_encoding")
    refused(model.push("int8+zstd", [p[:-1] for p in parts]), 422, "invalid_encoding")
    bad = parts[1].copy()
    bad[:4] = np.array([np.inf], np.float32).view(np.uint8)
    refused(model.push("int8", [parts[0], bad, *parts[2:]]), 422, "non_finite")
    topk, _ = model.encoded("topk:0.1")
    bad = topk[2].copy()
    bad[:4] = np.array([1 << 20], "<u4").view(np.uint8)
    refused(model.push("topk", [*topk[:2], bad, topk[3]]), 422, "invalid_encoding")

    assert not model.values().any()


def test_a_bomb_is_refused_before_it_unpacks(model: Model) -> None:
    """A small body that announces more than its partition, or unpacks to more, is 422."""
    parts, _ = model.encoded("topk:0.5")
    bomb = pack("zstd", np.zeros(1 << 28, np.uint8))
    assert bomb.size < 1 << 15

    body = b"".join([bomb.tobytes(), *(p.tobytes() for p in parts[1:])])
    said = [[bomb.size, 1 << 28], *([p.size, p.size] for p in parts[1:])]
    header = msgspec.to_builtins(
        PushFrame(model.name, [PushPart(i, None, None) for i in range(PARTITIONS)], encoding="topk+zstd")
    )
    refused(model.send({**header, "sizes": said}, body), 422, "invalid_encoding")
    small = pack("zstd", np.zeros(1 << 20, np.uint8))
    header["parts"], size = header["parts"][:1], parts[0].size
    assert small.size < size
    refused(model.send({**header, "sizes": [[small.size, size]]}, small.tobytes()), 422, "invalid_encoding")

    assert not model.values().any()


def test_journaled_pushes_survive_encoded(lone: Nodes) -> None:
    """After their shard is killed, applied and staged pushes are restored from their encoded bytes."""
    applied = Model(lone, ack="journaled")
    staged = Model(lone, ack="journaled", consistency={"mode": "sync"})
    (int8, a), (topk, b) = applied.encoded("int8"), applied.encoded("topk:0.1")
    assert applied.push("int8", int8, push_id=PushId("w", 1, 1)).status_code == 200
    assert applied.push("topk:0.1+zstd", topk, push_id=PushId("w", 1, 2)).status_code == 200
    url = f"{lone.url}/models/{staged.name}"
    joined = lone.http.post(f"{url}/workers", json={"lease_s": 600}).json()
    who = {"worker": joined["worker"], "epoch": joined["epoch"]}
    assert (
        staged.push("int8+lz4", int8, push_id=PushId(joined["worker"], joined["epoch"], 1), clock=0).status_code == 202
    )

    lone.kill("shard-0")
    lone.start_shard("shard-0")

    eventually(lambda: np.array_equal(applied.values(), a + b), within_s=START_S, what="the applied pushes")
    eventually(lambda: staged.values().size, within_s=START_S, what="the staged model")
    lone.http.post(f"{url}/clock", json={**who, "clock": 1, "wait_s": 20}).raise_for_status()
    eventually(lambda: np.array_equal(staged.values(), a), within_s=30, what="the commit")

    def repeated() -> httpx.Response | None:
        answer = applied.push("int8", int8, push_id=PushId("w", 1, 1))
        return answer if answer.status_code == 200 else None  # 503 until the shard has joined

    again = eventually(repeated, within_s=30, what="the answer to a repeated push")
    assert again is not None
    assert decode_header(again.content, PushReply)[0].duplicate
