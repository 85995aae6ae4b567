"""Frames to the shards of a real rest_cluster: which are taken, which are refused whole, and what big bodies do."""

import io
import mmap
import socket
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from paramserver.net.direct import SCHEME, path_of
from paramserver.wire.frame import MEDIA_TYPE, PullFrame, PullReply, PushFrame, PushPart, decode_header, encode_header

from .processes import Nodes
from .routes import MSGPACK, Model, problem, unchanged

pytestmark = pytest.mark.process


def test_a_frame_without_a_map_epoch_is_split_and_one_with_it_is_not(model: Model) -> None:
    """A frame without a map epoch is forwarded to all owners; with one, a wrong owner answers 421."""
    frame, body = model.everywhere(1.0)
    assert model.frame("/push", frame, body, shard=1).status_code == 200
    assert model.values("w") == [[1.0] * 4] * 6
    addressed, body = model.everywhere(1.0, map_epoch=1)
    refused = problem(model.frame("/push", addressed, body), 421, "wrong_owner")
    assert refused["map_epoch"] >= 1
    own = PullFrame([(i, None) for i in model.owned(0)], model=model.name, map_epoch=1)
    reply, _ = decode_header(model.frame("/pull", own).content, PullReply)
    assert [p[0] for p in reply.parts] == model.owned(0)
    assert reply.version == 1, "the refused frame changed nothing on the shard that got it"
    everything = model.frame("/pull", PullFrame([(i, None) for i in range(4)], model=model.name), shard=1)
    _, offset = decode_header(everything.content, PullReply)
    assert np.frombuffer(everything.content[offset:], np.float32).tolist() == [1.0] * 25


def test_a_frame_for_a_partition_that_there_is_not_is_refused(model: Model) -> None:
    """A frame for a partition that does not exist is 422 in push and pull, and its other parts change nothing."""
    parts = [PushPart(0, None, None), PushPart(4, None, None)]
    body = bytes(4 * 2 * model.layout.partition_size(0))
    refused = problem(model.frame("/push", PushFrame(model.name, parts), body), 422, "invalid_range")
    assert "no partition 4" in refused["detail"]
    asked = PullFrame([(0, None), (4, None)], model=model.name)
    problem(model.frame("/pull", asked), 422, "invalid_range")
    assert unchanged(model)


def test_answers_name_their_request_where_somebody_may_ask(model: Model) -> None:
    """JSON answers and refusals have a request id; a successful frame has one only if its sender gave it."""
    frame, body = model.everywhere(1.0)
    url, content = model.url(0) + "/push", encode_header(frame) + body
    headers = {"content-type": MEDIA_TYPE}

    good = model.http.post(url, content=content, headers=headers)
    named = model.http.post(url, content=content, headers=headers | {"x-request-id": "mine-1"})
    refused = model.http.post(url, content=content[:-4], headers=headers)

    assert (good.status_code, "x-request-id" in good.headers) == (200, False)
    assert (named.status_code, named.headers["x-request-id"]) == (200, "mine-1")
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, refused.json()["request_id"])
    assert "x-request-id" in model.ask("/pull", {}).headers


@pytest.mark.parametrize("change", [-4, 4, 400])
def test_a_body_of_another_length_than_announced_is_refused(model: Model, change: int) -> None:
    """A frame's body that is longer or shorter than its parts is 400 and changes nothing."""
    frame, body = model.everywhere(1.0)
    changed = body[:change] if change < 0 else body + bytes(change)
    problem(model.frame("/push", frame, changed), 400, "malformed")
    assert unchanged(model)


def test_a_transfer_cut_in_the_middle_applies_nothing(rest_cluster: Nodes) -> None:
    """A connection that closes before the body is complete changes no partition."""
    model = Model(rest_cluster, params={"w": {"shape": [200_000]}})
    frame, body = model.everywhere(1.0)
    content = encode_header(frame) + body
    head = f"POST /push HTTP/1.1\r\nhost: x\r\ncontent-type: {MEDIA_TYPE}\r\ncontent-length: {len(content)}\r\n\r\n"
    for cut in (10, 300, len(content) // 2, len(content) - 1):
        with socket.create_connection(("127.0.0.1", rest_cluster.shard_ports["shard-0"])) as s:
            s.sendall(head.encode() + content[:cut])
    answer = model.ask("/pull", {"ranges": {"w": [[0, 3], [199_990, 199_993]]}}).json()
    assert (answer["version"], answer["params"]["w"]) == (0, [0.0] * 6)
    assert model.frame("/push", frame, body).status_code == 200


def test_big_values_travel_in_pieces(rest_cluster: Nodes) -> None:
    """Two million numbers pushed in one msgpack body are pulled by msgpack, frame and file, bit for bit."""
    model = Model(rest_cluster, params={"w": {"shape": [2_000_000]}})
    want = np.random.default_rng(7).standard_normal(2_000_000).astype(np.float32)
    tensor = {"dtype": "float32", "shape": [2_000_000], "data": want.tobytes()}
    packed = msgpack.packb({"model": model.name, "grads": {"w": tensor}})
    assert model.http.post(model.url(0) + "/push", content=packed, headers=MSGPACK).status_code == 200
    body = msgpack.packb({"model": model.name})
    pulled = msgpack.unpackb(model.http.post(model.url(1) + "/pull", content=body, headers=MSGPACK).content)
    assert pulled["params"]["w"]["data"] == want.tobytes()
    frame = model.frame("/pull", PullFrame([(i, None) for i in range(4)], model=model.name))
    assert frame.content[decode_header(frame.content, PullReply)[1] :] == want.tobytes()
    file = model.http.get(f"{model.url(1)}/pull/{model.name}/w")
    assert np.array_equal(np.load(io.BytesIO(file.content)), want)


def test_a_slot_that_is_given_back_holds_nothing_of_what_was_taken(rest_cluster: Nodes) -> None:
    """A gradient that one shard has buffered does not change when its slot is written again.

    The other shard refuses its part of the push, so the client uses the slot for its next push.
    """
    shape, mode = {"w": {"shape": [25]}}, {"mode": "buffered", "count": 2, "interval_ms": 60_000}
    model = Model(rest_cluster, params=shape, consistency=mode)
    theirs = model.owned(1)
    known = PushFrame(model.name, [PushPart(p, None, None) for p in theirs], worker="c", epoch=1, seq=1)
    size = sum(model.layout.partition_size(p) for p in theirs)
    assert model.frame("/push", known, bytes(4 * size), shard=1).status_code == 202

    slot = model.http.post(f"{model.url(0)}/slots", json={"bytes": 4 * model.layout.size}).json()["slot"]
    addresses = rest_cluster.get("/map")["shards"]["shard-0"]["addresses"]
    folder = Path(path_of(next(a for a in addresses if a.startswith(SCHEME)))).parent
    with (folder / slot).open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 4 * model.layout.size), np.float32)
    for seq, value in ((1, 1.0), (2, 3.0)):
        memory[:] = value
        frame, _ = model.everywhere(value, worker="c", epoch=1, seq=seq, slot=slot)
        answer = model.frame("/push", frame)
        assert answer.status_code in (202, 422), answer.text
    values = model.ask("/pull", {"min_version": 1, "wait_s": 5}).json()["params"]["w"]
    assert {values[model.layout.bounds[p]] for p in model.owned(0)} == {2.0}


@pytest.mark.parametrize(
    "consistency",
    [{"mode": "async"}, {"mode": "ssp"}, {"mode": "sync"}, {"mode": "buffered", "count": 9, "interval_ms": 60_000}],
    ids=lambda c: c["mode"],
)
def test_float64_beyond_float32_is_refused_in_every_mode(rest_cluster: Nodes, consistency: dict[str, Any]) -> None:
    """A float64 gradient beyond float32 is refused, by name and by frame, also where it would be held (202) first."""
    model = Model(rest_cluster, consistency=consistency)
    worker = rest_cluster.post(f"/models/{model.name}/workers", {"name": "a", "lease_s": 60}, status=201)["worker"]
    ident: dict[str, Any] = {"worker": worker, "epoch": 1, "seq": 1, "clock": 0}
    wide = {"dtype": "float64", "shape": [], "data": np.float64(1e300).tobytes()}
    body: Any = msgpack.packb({"model": model.name, "grads": {"b": wide}, **ident})
    answer = model.http.post(model.url(0) + "/push", content=body, headers=MSGPACK | {"accept": "application/json"})
    assert "float32" in problem(answer, 422, "non_finite")["detail"]
    frame = PushFrame(model.name, [PushPart(0, None, None)], dtype="float64", **ident)
    size = model.layout.partition_size(0)
    for shard in (0, 1):
        problem(model.frame("/push", frame, np.full(size, 1e300).tobytes(), shard), 422, "non_finite")
        held = model.frame("/push", frame, np.ones(size).tobytes(), shard).status_code == 202
        assert held == (consistency["mode"] in ("sync", "buffered"))
