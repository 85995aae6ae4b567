"""The shards' REST API in a real rest_cluster of two shards: by name and as arrays."""

import gzip
import io
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
from msgspec.structs import replace

from paramserver.limits import MIB, RANGES_PER_REQUEST_MAX
from paramserver.wire.frame import (
    MEDIA_TYPE,
    PullFrame,
    PullSpec,
    PushFrame,
    PushPart,
    PushReply,
    decode_header,
    encode_header,
)

from .processes import Nodes, unique
from .routes import MSGPACK, SHARDS, Model, problem, unchanged

pytestmark = pytest.mark.process


def test_both_shards_answer_for_the_whole_model(model: Model) -> None:
    """A push through either shard is seen in full through both."""
    assert model.owned(0)
    assert model.owned(1)
    first = model.push({"w": [[1.0] * 4] * 6, "b": 2.0}, shard=0)
    assert first.status_code == 200
    assert first.json() | {"incarnation": 0} == {
        "model": model.name, "version": 1, "state": "applied", "duplicate": False, "durable_version": 0,
        "incarnation": 0, "timeline": 0,
    }  # fmt: skip
    model.push({"w": [[0.5] * 4] * 6}, shard=1)
    for shard in (0, 1):
        assert model.values("w", shard) == [[1.5] * 4] * 6
        assert model.values("b", shard) == 2.0


def test_json_msgpack_and_frames_name_the_same_push(model: Model) -> None:
    """A push id with the same content is one push in every encoding; other content is refused."""
    ident: dict[str, Any] = {"worker": "w", "epoch": 1, "seq": 1}
    assert model.push({"w": [[3.0] * 4] * 6, "b": 3.0}, **ident).json()["duplicate"] is False

    tensors = {n: {"dtype": "float32", "shape": s, "data": np.full(s, 3, "<f4").tobytes()} for n, s in SHAPES}
    packed = msgpack.packb({"model": model.name, "grads": tensors, **ident})
    answer = model.http.post(model.url(1) + "/push", content=packed, headers=MSGPACK)
    assert answer.headers["content-type"] == "application/msgpack"
    assert msgpack.unpackb(answer.content)["duplicate"] is True

    frame, body = model.everywhere(3.0, worker="w", epoch=1, seq=1)
    reply = decode_header(model.frame("/push", frame, body).content, PushReply)[0]
    assert (reply.duplicate, reply.version) == (True, 1)

    problem(model.push({"w": [[4.0] * 4] * 6, "b": 3.0}, **ident), 422, "id_reused")
    assert model.values("b") == 3.0


SHAPES: list[tuple[str, list[int]]] = [("w", [6, 4]), ("b", [])]


def test_an_idempotency_key_makes_a_plain_push_repeatable(model: Model) -> None:
    """A push with an Idempotency-Key is applied once, whichever shards get it."""
    answers = [model.ask("/push", {"grads": {"b": 1.0}}, shard, idempotency_key="k1") for shard in (0, 1, 1)]
    assert [a.json()["duplicate"] for a in answers] == [False, True, True]
    assert model.values("b") == 1.0


@pytest.mark.parametrize("route", ["/push", "/pushpull"])
def test_an_idempotency_key_makes_a_frame_repeatable(model: Model, route: str) -> None:
    """A frame without a push id that comes twice with an Idempotency-Key is applied once, whichever shards get it."""
    frame, body = model.everywhere(1.0)
    pull = PullSpec(parts=[(0, None)]) if route == "/pushpull" else None
    content = encode_header(replace(frame, pull=pull)) + body
    headers = {"content-type": MEDIA_TYPE, "idempotency-key": "k1"}
    for shard in (0, 1, 1):
        assert model.http.post(model.url(shard) + route, content=content, headers=headers).status_code == 200
    assert model.values("b") == 1.0


def test_every_wrong_tensor_is_named_and_nothing_is_applied(model: Model) -> None:
    """A refused push lists all its errors and changes nothing on either shard."""
    answer = problem(model.push({"w": [[1.0] * 4] * 5, "b": [1.0], "c": 1.0}), 422, "invalid")
    assert {e["where"] for e in answer["errors"]} == {"w", "b", "c"}
    problem(model.push({"w": [[1.0] * 4] * 6, "nope": 1.0}), 404, "unknown_parameter")
    problem(model.push({}), 422, "empty_push")
    problem(model.push({"w": [[1.0] * 4] * 6}, sequence=3), 422, "invalid_field")
    problem(model.push({"w": [[1.0] * 4] * 6}, worker="w"), 422, "invalid_field")
    problem(model.push({"w": [[1.0] * 4] * 6}, ack="maybe"), 422, "invalid_field")
    problem(model.push({"w": [[1e39] * 4] * 6}), 422, "non_finite")
    nan = {"dtype": "float32", "shape": [6, 4], "data": np.full((6, 4), np.nan, "<f4").tobytes()}
    packed = msgpack.packb({"model": model.name, "grads": {"w": nan}})
    headers = MSGPACK | {"accept": "application/json"}
    problem(model.http.post(model.url(1) + "/push", content=packed, headers=headers), 422, "non_finite")
    assert unchanged(model)


def test_ranges_address_flat_elements(model: Model) -> None:
    """Ranges of a parameter that span partitions and shards are pushed and pulled as flat lists."""
    assert model.push({"w": [1.0, 2.0, 3.0, 4.0]}, ranges={"w": [[4, 6], [20, 22]]}).status_code == 200
    answer = model.ask("/pull", {"ranges": {"w": [[3, 7], [19, 23]]}}, shard=1).json()
    assert answer["params"] == {"w": [0.0, 1.0, 2.0, 0.0, 0.0, 3.0, 4.0, 0.0]}
    problem(model.push({"w": [1.0]}, ranges={"w": [[24, 25]]}), 422, "invalid_range")
    problem(model.push({"w": [1.0]}, ranges={"w": [[0, 2]]}), 422, "invalid_shape")


def test_a_pull_by_name_has_as_many_ranges_wherever_it_is_asked(rest_cluster: Nodes) -> None:
    """A pull with more ranges of one shard than a frame may have is refused by that shard as by the other."""
    model = Model(rest_cluster, params={"w": {"shape": [8 * RANGES_PER_REQUEST_MAX]}})
    begins = [model.layout.bounds[p] for p in model.owned(0)[:2]]
    assert len(begins) == 2
    half = RANGES_PER_REQUEST_MAX // 2

    def answers(*counts: int) -> list[httpx.Response]:
        spans = [[at + 2 * i, at + 2 * i + 1] for at, n in zip(begins, counts, strict=True) for i in range(n)]
        return [model.ask("/pull", {"ranges": {"w": spans}}, shard) for shard in (0, 1)]

    assert [len(a.json()["params"]["w"]) for a in answers(half, half)] == [2 * half] * 2
    for answer in answers(half, half + 1):
        problem(answer, 413, "too_large")


def test_names_are_patterns_and_dtypes_are_converted(rest_cluster: Nodes) -> None:
    """Patterns select parameters in the model's order, in the requested dtype or the parameter's own."""
    params = {f"layers.{i}.{n}": {"shape": [3], "dtype": "float16"} for i in range(2) for n in ("weight", "bias")}
    model = Model(rest_cluster, params=params, partitions=2)
    body = msgpack.packb({"model": model.name, "names": ["layers.*.weight"]})
    answer = msgpack.unpackb(model.http.post(model.url(0) + "/pull", content=body, headers=MSGPACK).content)
    assert list(answer["params"]) == ["layers.0.weight", "layers.1.weight"]
    assert {t["dtype"] for t in answer["params"].values()} == {"float16"}
    body = msgpack.packb({"model": model.name, "dtype": "bfloat16", "names": ["layers.0.bias"]})
    answer = msgpack.unpackb(model.http.post(model.url(0) + "/pull", content=body, headers=MSGPACK).content)
    assert answer["params"]["layers.0.bias"] == {"dtype": "bfloat16", "shape": [3], "data": bytes(6)}
    problem(model.ask("/pull", {"names": ["layers.9.*"]}), 404, "unknown_parameter")
    problem(model.ask("/pull", {"dtype": "int8"}), 422, "invalid_dtype")


def test_a_pushpull_answers_with_the_values_after_the_push(model: Model) -> None:
    """A pushpull returns the values after its push, and the result of its push even if the pull fails."""
    answer = model.ask("/pushpull", {"grads": {"b": 1.5}, "names": ["b"]}, shard=1).json()
    assert answer["params"] == {"b": 1.5}
    assert answer["push"]["state"] == "applied"
    late = problem(
        model.ask("/pushpull", {"grads": {"b": 1.0}, "names": ["b"], "min_version": 9}), 412, "version_not_reached"
    )
    assert late["push"]["version"] == 2, "the push was accepted, and the answer says so"


def test_an_error_says_whether_its_push_may_be_repeated(model: Model) -> None:
    """An error of an accepted push is `retryable` only if the push has an id or a key, with which it counts once."""
    late = {"grads": {"b": 1.0}, "names": ["b"], "min_version": 99}
    ident: dict[str, Any] = {"worker": "w", "epoch": 1, "seq": 1}
    frame = PushFrame(model.name, [PushPart(0, None, None)], pull=PullSpec([(0, None)], min_version=99))
    ones = np.ones(model.layout.partition_size(0), np.float32).tobytes()
    for shard in (0, 1):
        asked = model.ask("/pushpull", late, shard), model.frame("/pushpull", frame, ones, shard)
        repeatable = (
            model.ask("/pushpull", late | ident, shard),
            model.ask("/pushpull", late, shard, idempotency_key="k"),
            model.frame("/pushpull", replace(frame, worker="v", epoch=1, seq=1), ones, shard),
        )
        for answers, retryable in ((asked, False), (repeatable, True)):
            for document in [problem(answer, 412, "version_not_reached") for answer in answers]:
                assert "push" in document
                assert document["retryable"] is retryable


def test_a_pull_waits_for_its_version(model: Model) -> None:
    """A pull with `min_version` waits up to `wait_s` for a push, and is 412 with the current version otherwise."""
    document = problem(
        model.ask("/pull", {"names": ["b"], "min_version": 1, "wait_s": 0.1}), 412, "version_not_reached"
    )
    assert document["version"] == 0
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(model.ask, "/pull", {"names": ["b"], "min_version": 1, "wait_s": 20}, 1)
        model.push({"b": 1.0})
        assert waiting.result().json()["params"] == {"b": 1.0}


def test_a_pull_waits_for_its_clock_whatever_the_version(rest_cluster: Nodes) -> None:
    """A pull with `min_clock` waits for commits, not assignments, by name or by frame, on either shard."""
    model = Model(rest_cluster, consistency={"mode": "sync"})
    w = rest_cluster.post(f"/models/{model.name}/workers", {"name": "a", "lease_s": 60})
    for i in range(4):
        assert model.http.put(f"{model.url(0)}/models/{model.name}/params/w", json=[[float(i)] * 4] * 6).is_success

    def pulls(clock: int, wait_s: float) -> list[httpx.Response]:
        frame = PullFrame(model=model.name, parts=[(i, None) for i in range(4)], min_clock=clock, wait_s=wait_s)
        head = {"content-type": MEDIA_TYPE}
        framed = model.http.post(model.url(1) + "/pull", content=encode_header(frame), headers=head)
        return [*(model.ask("/pull", {"min_clock": clock, "wait_s": wait_s}, shard) for shard in (0, 1)), framed]

    for answer in pulls(1, 0.1):
        assert "clock 0, not yet at clock 1" in problem(answer, 412, "version_not_reached")["detail"]
    ident = {"worker": w["worker"], "epoch": w["epoch"]}
    assert model.push({"w": [[5.0] * 4] * 6}, **ident, seq=0, clock=0).status_code == 202
    rest_cluster.post(f"/models/{model.name}/clock", ident | {"clock": 1})
    for answer in pulls(1, 10.0):
        assert answer.status_code == 200, answer.text
    assert model.values() == [[8.0] * 4] * 6


def test_a_parameter_is_a_npy_file_with_an_etag(rest_cluster: Nodes) -> None:
    """A parameter is a NumPy file whose ETag is equal on both shards, gives 304, and changes with the value."""
    params = {"dense/kernel": {"shape": [5, 3], "init": {"kind": "normal"}}, "h": {"shape": [2], "dtype": "bfloat16"}}
    model = Model(rest_cluster, params=params, partitions=4)
    path = f"/pull/{model.name}/dense/kernel"
    answers = [model.http.get(model.url(i) + p) for i in (0, 1) for p in (path, path.replace("e/k", "e%2Fk"))]
    array = np.load(io.BytesIO(answers[0].content))
    assert array.shape == (5, 3)
    assert array.dtype == np.float32
    assert array.std() > 0
    assert len({a.headers["etag"] for a in answers}) == 1
    assert len({a.content for a in answers}) == 1
    head = model.http.head(model.url(1) + path)
    assert head.headers["content-length"] == str(len(answers[0].content))
    assert head.headers["etag"] == answers[0].headers["etag"]
    known = {"if-none-match": head.headers["etag"]}
    again = model.http.get(model.url(1) + path, headers=known)
    assert (again.status_code, again.content) == (304, b"")
    model.push({"dense/kernel": [[1.0] * 3] * 5})
    after = model.http.get(model.url(1) + path, headers=known)
    assert after.status_code == 200
    assert np.allclose(np.load(io.BytesIO(after.content)), array + 1)
    assert np.load(io.BytesIO(model.http.get(f"{model.url(0)}/pull/{model.name}/h").content)).dtype == np.float32
    problem(model.http.get(f"{model.url(0)}/pull/{model.name}/dense"), 404, "unknown_parameter")


def test_a_value_is_assigned_as_json_msgpack_or_npy(model: Model) -> None:
    """PUT sets a parameter on all its owners as one new version; invalid values change nothing."""
    path = f"{model.url(1)}/models/{model.name}/params/w"
    want = np.arange(24, dtype=np.float32).reshape(6, 4)
    file = io.BytesIO()
    np.save(file, want + 2)
    packed = msgpack.packb({"dtype": "float32", "shape": [6, 4], "data": (want + 1).tobytes()})
    for i, (kind, content) in enumerate(
        [
            ("application/json", json.dumps(want.tolist()).encode()),
            ("application/msgpack", packed),
            ("application/x-npy", file.getvalue()),
        ]
    ):
        answer = model.http.put(path, content=content, headers={"content-type": kind, "accept": "application/json"})
        assert answer.json()["version"] == i + 1
        assert np.array_equal(model.values("w"), want + i)
    problem(model.http.put(path, json=[[1.0]]), 422, "invalid_shape")
    broken = {"content-type": "application/x-npy"}
    problem(model.http.put(path, content=file.getvalue()[:-1], headers=broken), 400, "malformed")
    problem(model.http.put(path, content=b"\x93NUMPY\x01\x00\x02\x00{}", headers=broken), 400, "malformed")
    zipped = gzip.compress(file.getvalue())
    answer = model.http.put(path, content=zipped, headers=broken | {"content-encoding": "gzip"})
    problem(answer, 415, "unsupported_media_type")
    assert np.array_equal(model.values("w"), want + 2)


def test_media_types_and_bounds(model: Model) -> None:
    """Unsupported media types, malformed bodies and too large bodies are refused with their codes."""
    push = f"{model.url(0)}/push"
    problem(model.http.post(push, content=b"x", headers={"content-type": "text/plain"}), 415, "unsupported_media_type")
    problem(model.ask("/push", {"grads": {"b": 1.0}}, accept="text/html"), 406, "not_acceptable")
    problem(model.http.post(push, content=b"[1", headers={"content-type": "application/json"}), 400, "malformed")
    problem(model.http.post(push, content=b"PS\x01\x00", headers={"content-type": MEDIA_TYPE}), 400, "malformed")
    huge = {"content-type": "application/json"}
    assert (
        "msgpack"
        in problem(model.http.post(push, content=b" " * (8 * MIB + 1), headers=huge), 413, "too_large")["hint"]
    )
    problem(model.http.post(push, content=b"\xc0" * (64 * MIB + 1), headers=MSGPACK), 413, "too_large")
    assert unchanged(model)


def test_control_routes_are_answered_through_a_shard(model: Model) -> None:
    """Models, workers and status are reached through a shard as through the scheduler."""
    url = model.url(1)
    assert model.http.get(f"{url}/models/{model.name}").json()["name"] == model.name
    joined = model.http.post(f"{url}/models/{model.name}/workers", json={"name": "w0"})
    assert (joined.status_code, joined.json()["epoch"]) == (201, 1)
    assert {n["name"] for n in model.http.get(f"{url}/status").json()["nodes"]} >= set(SHARDS)
    problem(model.http.get(f"{url}/no/such/route"), 404, "not_found")
    problem(model.http.get(f"{url}/push"), 405, "method_not_allowed")
    unknown = model.http.post(f"{url}/pull", json={"model": unique("none")})
    problem(unknown, 404, "unknown_model")


def test_a_model_created_through_a_shard_is_usable_at_once(rest_cluster: Nodes) -> None:
    """After the 201 for a model created through a shard, every shard serves the model at once."""
    url = f"http://127.0.0.1:{rest_cluster.shard_ports['shard-1']}"
    name = unique("m")
    spec = {"name": name, "params": {"w": {"shape": [3], "init": {"kind": "constant", "value": 2.0}}}}
    assert rest_cluster.http.post(f"{url}/models", json=spec).status_code == 201
    for shard in SHARDS:
        answer = rest_cluster.http.post(
            f"http://127.0.0.1:{rest_cluster.shard_ports[shard]}/pull", json={"model": name}
        )
        assert answer.json()["params"] == {"w": [2.0] * 3}


def test_first_values_are_uploaded_with_the_token(rest_cluster: Nodes) -> None:
    """Pulls are 503 until all values are uploaded with the token; then version 0 has the uploaded values."""
    model = Model(rest_cluster, params={"w": {"shape": [5, 2], "init": {"kind": "upload"}}})
    problem(model.ask("/pull", {}), 503, "initializing")
    url = f"{model.url(0)}/models/{model.name}/params/w"
    value = [[float(i), 1.0] for i in range(5)]
    problem(model.http.put(url, json=value), 409, "upload_in_progress")
    token = {"x-upload-token": model.document["upload_token"]}
    assert model.http.put(url, json=value, headers=token).status_code == 200
    answer = model.ask("/pull", {"min_version": 0, "wait_s": 5}, shard=1).json()
    assert (answer["version"], answer["params"]["w"]) == (0, value)


def test_a_large_value_is_sent_in_ranges(rest_cluster: Nodes) -> None:
    """A range of a value is assigned like a whole one; first values are complete once each partition has its part.

    A range of first values that ends within a partition is refused, as nobody could tell when the rest has come.
    """
    model = Model(rest_cluster, params={"w": {"shape": [6, 4], "init": {"kind": "upload"}}}, partitions=2)
    url = f"{model.url(0)}/models/{model.name}/params/w"
    token = {"x-upload-token": model.document["upload_token"]}
    cut, value = model.document["bounds"][1], [float(i) for i in range(24)]

    hint = problem(model.http.put(url + "?stop=7", json=value[:7], headers=token), 422, "invalid_range")["hint"]
    assert "bounds" in hint
    assert model.http.put(f"{url}?start={cut}", json=value[cut:], headers=token).status_code == 200
    problem(model.ask("/pull", {}), 503, "initializing")
    scheduler = f"{rest_cluster.url}/models/{model.name}/params/w?start=0&stop={cut}"
    assert model.http.put(scheduler, json=value[:cut], headers=token).status_code == 200
    pulled = model.ask("/pull", {"min_version": 0, "wait_s": 5}, shard=1).json()["params"]["w"]
    assert np.ravel(pulled).tolist() == value

    assert model.http.put(url + "?start=5&stop=8", json=[0.0] * 3).json()["duplicate"] is False
    assert np.ravel(model.values("w")).tolist() == value[:5] + [0.0] * 3 + value[8:]
    problem(model.http.put(url + "?start=5&stop=8", json=[0.0] * 4), 422, "invalid_shape")
    problem(model.http.put(url + "?start=5&stop=25", json=[0.0] * 20), 422, "invalid_range")
    problem(model.http.put(url + "?start=5&stop=x", json=[0.0]), 400, "malformed")
    problem(model.http.put(url + "?start=5", json=[0.0] * 19, headers={"if-match": "*"}), 422, "not_built")


def test_an_upload_that_comes_again_changes_nothing_once_the_model_is_complete(rest_cluster: Nodes) -> None:
    """An upload repeated after others have pushed is a duplicate; without the token it is an assignment.

    A client repeats an upload when its answer was lost.
    """
    model = Model(rest_cluster, params={"w": {"shape": [4], "init": {"kind": "upload"}}}, optimizer={"name": "sum"})
    url = f"{model.url(0)}/models/{model.name}/params/w"
    token = {"x-upload-token": model.document["upload_token"]}
    assert model.http.put(url, json=[10.0] * 4, headers=token).json()["duplicate"] is False
    wanted = {"min_version": 0, "wait_s": 5}
    assert model.ask("/pull", wanted, shard=0).json()["params"] == {"w": [10.0] * 4}
    assert model.push({"w": [1.0] * 4}).status_code == 200

    again = model.http.put(url, json=[10.0] * 4, headers=token)

    assert (again.status_code, again.json()["duplicate"]) == (200, True)
    problem(model.http.put(url, json=[10.0] * 3, headers=token), 422, "invalid_shape")
    assert model.ask("/pull", wanted).json()["params"] == {"w": [11.0] * 4}
    assert model.http.put(url, json=[10.0] * 4).json()["duplicate"] is False
    assert model.ask("/pull", wanted).json()["params"] == {"w": [10.0] * 4}


def test_a_synchronous_push_is_staged_until_its_clock_commits(rest_cluster: Nodes) -> None:
    """Synchronous pushes are staged (202) until both workers report; then both shards have their mean."""
    model = Model(rest_cluster, consistency={"mode": "sync", "min_workers": 2})
    workers = [rest_cluster.post(f"/models/{model.name}/workers", {"name": n, "lease_s": 60}) for n in ("a", "b")]
    for i, w in enumerate(workers):
        ident: dict[str, Any] = {"worker": w["worker"], "epoch": w["epoch"], "seq": 0, "clock": 0}
        answer = model.push({"w": [[2.0 + 2 * i] * 4] * 6, "b": 1.0}, shard=i, **ident)
        assert (answer.status_code, answer.json()["state"], answer.json()["version"]) == (202, "staged", 0)
    assert unchanged(model)
    for w in workers:
        rest_cluster.post(f"/models/{model.name}/clock", {"worker": w["worker"], "epoch": w["epoch"], "clock": 1})
    answer = model.ask("/pull", {"min_version": 1, "wait_s": 10}).json()
    assert answer["params"] == {"w": [[3.0] * 4] * 6, "b": 1.0}
    problem(model.push({"b": 1.0}), 409, "worker_required")
    stranger: dict[str, Any] = {"worker": f"{model.name}/nobody", "epoch": 1, "seq": 0, "clock": 1}
    problem(model.push({"b": 1.0}, **stranger), 422, "reserved_worker")


def test_a_buffered_push_is_applied_with_the_mean_of_its_batch(rest_cluster: Nodes) -> None:
    """Pushes are `buffered` until the count is reached; then their mean is applied."""
    model = Model(rest_cluster, consistency={"mode": "buffered", "count": 2, "interval_ms": 60_000})
    assert model.push({"b": 1.0}).json()["state"] == "buffered"
    assert model.values("b") == 0.0
    assert model.push({"b": 3.0}, shard=1).json()["state"] == "buffered"
    assert model.ask("/pull", {"names": ["b"], "min_version": 1, "wait_s": 5}).json()["params"] == {"b": 2.0}


def test_a_result_beyond_float32_is_refused(model: Model) -> None:
    """A finite gradient whose sum overflows is 422, and both shards keep the previous version."""
    model.push({"w": [[3e38] * 4] * 6})
    problem(model.push({"w": [[3e38] * 4] * 6}), 422, "non_finite_result")
    answer = model.ask("/pull", {"names": ["w"]}).json()
    assert answer["version"] == 1
    assert np.allclose(answer["params"]["w"], 3e38)
    problem(model.ask("/pull", {"names": ["w"], "dtype": "float16"}), 422, "non_finite")


def test_a_push_whose_pull_cannot_be_told_says_that_it_was_accepted(rest_cluster: Nodes) -> None:
    """A pushpull whose values JSON or the dtype cannot represent is 422 and tells that the push was applied."""
    params = {"w": {"shape": [2]}, "h": {"shape": [], "dtype": "float16", "init": {"kind": "constant", "value": 1e5}}}
    model = Model(rest_cluster, params=params, partitions=1)
    refused = problem(model.ask("/pushpull", {"grads": {"w": [1.0, 2.0]}}), 422, "non_finite")
    assert (refused["push"]["state"], refused["push"]["version"]) == ("applied", 1)
    assert model.values("w") == [1.0, 2.0]


def test_a_shard_tells_which_cluster_it_is_of(model: Model) -> None:
    """The id in a shard's answer to `/livez` is that in the document of a model and in the map."""
    shard = model.http.get(f"{model.url(0)}/livez").json()["cluster"]
    assert shard
    for path in (f"/models/{model.name}", "/map"):
        assert model.http.get(model.url(0) + path).json()["cluster"] == shard


def test_probes_metrics_and_openapi(model: Model) -> None:
    """Probes answer, metrics count pushes, and OpenAPI's examples for the three value routes work."""
    model.push({"b": 1.0})
    for path in ("/livez", "/readyz", "/version"):
        assert model.http.get(model.url(0) + path).status_code == 200
    text = model.http.get(f"{model.url(0)}/metrics").text
    assert f'paramserver_pushes_total{{model="{model.name}",state="applied"}} 1.0' in text
    paths = model.http.get(f"{model.url(0)}/openapi.json").json()["paths"]
    for path in ("/push", "/pull", "/pushpull"):
        body = paths[path]["post"]["requestBody"]["content"]
        assert MEDIA_TYPE in body
        example = body["application/json"]["example"] | {"model": model.name, "min_version": 0}
        if "grads" in example:
            example["grads"] = {"b": 1.0}
            example.pop("min_version")
        answer = model.http.post(model.url(0) + path, json=example)
        assert answer.status_code == 200, answer.text
    assert "get" in paths["/pull/{m}/{name}"]
    assert {"get", "put"} <= set(paths["/models/{m}/params/{name}"])
