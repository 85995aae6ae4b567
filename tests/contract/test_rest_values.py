"""The REST contract of values, against a scheduler and a shard, in JSON and in msgpack."""

import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from tests.waiting import eventually

from .processes import Nodes, unique
from .rest import Face, tensor

pytestmark = pytest.mark.process

ONES = [[1.0] * 3] * 2


def test_a_push_is_known_by_its_id(face: Face) -> None:
    """A push id that is new, repeated, skipped, too old, fenced or reused gets the status of the contract."""
    model = face.make()
    ident: dict[str, Any] = {"worker": "w0", "epoch": 1}

    first = face.push(model, {"b": 1.0}, seq=7, **ident)
    assert (first["version"], first["state"], first["duplicate"]) == (1, "applied", False)
    assert {"model", "durable_version", "incarnation"} <= set(first)
    again = face.push(model, {"b": 1.0}, seq=7, **ident)
    assert (again["version"], again["duplicate"]) == (1, True)
    assert face.push(model, {"b": 1.0}, seq=3, **ident)["duplicate"] is False
    assert face.push(model, {"b": 1.0}, seq=100, **ident)["version"] == 3
    assert face.push(model, {"b": 1.0}, 409, seq=7, **ident)["code"] == "outside_window"
    assert face.push(model, {"b": 9.0}, 422, seq=100, **ident)["code"] == "id_reused"
    face.push(model, {"b": 1.0}, worker="w0", epoch=2, seq=1)
    assert face.push(model, {"b": 1.0}, 409, seq=101, **ident)["code"] == "fenced"
    for partial in ({"worker": "w"}, {"epoch": 1, "seq": 1}, {"worker": "w", "seq": 1}):
        assert face.push(model, {"b": 1.0}, 422, **partial)["code"] == "invalid_field"
    assert face.push(model, {"b": 1.0}, 422, worker="a/b", epoch=1, seq=1)["code"] == "reserved_worker"
    assert face.pull(model, names=["b"]) == {"b": 4.0}


def test_a_key_is_bounded_and_holds_its_content(face: Face) -> None:
    """An Idempotency-Key is applied once, refuses other content, and is limited in length."""
    body = {"model": face.make(), "grads": {"b": face.value(1.0)}}

    answers = [face.call("POST", "/push", body, idempotency_key="k") for _ in range(2)]
    assert [a["duplicate"] for a in answers] == [False, True]
    other = body | {"grads": {"b": face.value(2.0)}}
    face.refused("POST", "/push", other, 422, "id_reused", idempotency_key="k")
    face.refused("POST", "/push", body, 422, "invalid_field", idempotency_key="x" * 300)


def test_a_key_is_the_same_through_every_node(rest_cluster: Nodes) -> None:
    """A push repeated through another node under the same bytes as its key is a duplicate, or refused by both."""
    shard = Face(rest_cluster, f"http://127.0.0.1:{rest_cluster.shard_ports['shard-0']}", "json")
    scheduler = Face(rest_cluster, rest_cluster.url, "json")
    model = shard.make()
    body = {"model": model, "grads": {"b": 1.0}}

    for key in ("é".encode(), b"k\xe9"):
        headers = [(b"idempotency-key", key)]
        told = [f.http.post(f.url + "/push", json=body, headers=headers).json() for f in (scheduler, shard, scheduler)]
        applied = [answer.get("duplicate", answer.get("code")) for answer in told]
        assert applied == ([False, True, True] if key != b"k\xe9" else ["invalid_field"] * 3)
    assert shard.pull(model, names=["b"]) == {"b": 1.0}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_number_is_a_number_in_every_dtype(face: Face, dtype: str) -> None:
    """A parameter of shape [] is pushed and pulled as a number or as a tensor of shape [], in every dtype."""
    model = face.make()
    face.push(model, {"b": 1.5, "w": ONES})

    assert face.pull(model, dtype=dtype) == {"w": ONES, "b": 1.5}
    if face.kind == "application/msgpack":
        pushed = {"b": tensor(0.5, dtype), "w": tensor(ONES, dtype)}
        assert face.call("POST", "/push", {"model": model, "grads": pushed})["version"] == 2
        answer = face.call("POST", "/pull", {"model": model, "names": ["b"], "dtype": dtype})
        assert answer["params"] == {"b": tensor(2.0, dtype)}
        assert face.pull(model, names=["w"]) == {"w": [[2.0] * 3] * 2}


def test_ranges_are_flat_in_push_and_pull(face: Face) -> None:
    """Ranges address flat elements of a parameter in push and pull, and invalid ones are refused."""
    model = face.make()
    face.push(model, {"w": [1.0, 2.0]}, ranges={"w": [[1, 3]]})

    assert face.pull(model, ranges={"w": [[0, 2], [4, 6]]}) == {"w": [0.0, 1.0, 0.0, 0.0]}
    assert face.pull(model, names=["b"], ranges={"w": [[2, 3]]}) == {"w": [2.0], "b": 0.0}
    for bad in ([[1, 3], [2, 4]], [[2, 2]], [[5, 7]], []):
        face.refused("POST", "/pull", {"model": model, "ranges": {"w": bad}}, 422, "invalid_range")
    face.refused("POST", "/pull", {"model": model, "ranges": {"q": [[0, 1]]}}, 404, "unknown_parameter")
    both = {"model": model, "grads": {"w": face.value([1.0, 1.0])}, "ranges": {"w": [[0, 2]]}, "names": ["w"]}
    assert face.call("POST", "/pushpull", both)["push"]["state"] == "applied"
    assert face.pull(model, names=["w"]) == {"w": [[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]]}


@pytest.mark.parametrize(
    ("lag", "value", "code"), [("ignore", 5.0, None), ("scale", 4.2, None), ("reject", 4.0, "too_stale")]
)
def test_version_lag_is_ignored_scaled_or_rejected(face: Face, lag: str, value: float, code: str | None) -> None:
    """A gradient four versions old is applied in full, by a fifth, or not at all, as `lag` says."""
    model = face.make(consistency={"mode": "async", "lag": lag, "lag_bound": 2}, optimizer={"name": "sgd", "lr": 1.0})
    for _ in range(4):
        face.push(model, {"b": -1.0}, base_version=99)

    answer = face.push(model, {"b": -1.0}, 409 if code else 200, base_version=0)
    assert answer.get("code") == code
    assert face.pull(model, names=["b"])["b"] == pytest.approx(value, rel=1e-6)


def test_settings_of_clipping_weight_and_single_parameters(face: Face) -> None:
    """Clipping sees the whole push, `weight` scales it, and settings of single parameters apply to them alone."""
    model = face.make(optimizer={"name": "sgd", "lr": 1.0, "clip_norm": 5.0})
    face.push(model, {"w": [[-6.0, 0.0, 0.0], [0.0] * 3], "b": -8.0})
    assert face.pull(model) == {"w": [[3.0, 0.0, 0.0], [0.0] * 3], "b": 4.0}
    face.push(model, {"b": -1.0}, weight=0.5)
    assert face.pull(model, names=["b"]) == {"b": 4.5}

    decay = {"shape": [], "weight_decay": 0.5, "init": {"kind": "constant", "value": 2.0}}
    params = {"slow": {"shape": [], "lr_scale": 0.5}, "still": {"shape": [], "trainable": False}, "decayed": decay}
    model = face.make(params=params, optimizer={"name": "sgd", "lr": 1.0})
    face.push(model, {"slow": -1.0, "still": -1.0, "decayed": -1.0})
    assert face.pull(model) == {"slow": 0.5, "still": 0.0, "decayed": 2.0}
    face.call("PATCH", f"/models/{model}", {"params": {"still": {"trainable": True}}})

    def moves() -> bool:
        face.push(model, {"still": -1.0})
        return bool(face.pull(model, names=["still"])["still"] > 0.0)

    eventually(moves, what="the new setting")


NAMES = ["layers.0/w é[x]*", "a/b", "日本", "a b%20?#"]


def test_a_value_is_read_where_it_is_assigned(face: Face) -> None:
    """GET and HEAD of the path of a PUT are those of `/pull/MODEL/NAME`, so its ETag is that of the value there."""
    model = face.make()
    path, held = f"/models/{model}/params/w", f"/pull/{model}/w"
    face.call("PUT", path, face.value(ONES))

    answer, same = face.raw("GET", path), face.raw("GET", held)
    assert np.load(io.BytesIO(answer.content)).tolist() == ONES
    assert (answer.content, answer.headers["etag"]) == (same.content, same.headers["etag"])
    assert face.raw("HEAD", path).headers["etag"] == same.headers["etag"]
    assert face.raw("GET", path, if_none_match=same.headers["etag"]).status_code == 304
    assert face.raw("GET", f"/models/{model}/params/q").status_code == 404
    refused = face.raw("POST", path, {})
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD, PUT")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_reader_may_name_the_value_that_it_wants(face: Face, method: str) -> None:
    """A read whose If-Match fails (RFC 9110, 13.1.1) gets 412; only if it holds does If-None-Match decide (304)."""
    model = face.make()
    held = f"/pull/{model}/w"
    tag = face.raw("GET", held).headers["etag"]

    assert face.raw(method, held, if_match=f'"another", {tag}').status_code == 200
    assert face.raw(method, held, if_match="*", if_none_match=f"W/{tag}").status_code == 304
    for given in ({"if_match": '"another"'}, {"if_match": f"W/{tag}"}, {"if_match": '"a"', "if_none_match": tag}):
        assert face.raw(method, held, **given).status_code == 412


def test_of_two_who_change_the_same_value_one_is_refused(face: Face) -> None:
    """A PUT whose If-Match or If-None-Match fails (RFC 9110, 13.1) gets 412 and changes nothing."""
    model = face.make()
    path, held = f"/models/{model}/params/w", f"/pull/{model}/w"
    new, newer = face.value(ONES), face.value([[2.0] * 3] * 2)
    tag = face.raw("GET", held).headers["etag"]

    face.call("PUT", path, new, if_match=f'"another", {tag}')
    for refused in ({"if_match": tag}, {"if_match": f"W/{tag}"}, {"if_none_match": "*"}):
        face.refused("PUT", path, newer, 412, "precondition_failed", **refused)
    now = face.raw("GET", held).headers["etag"]
    face.refused("PUT", path, newer, 412, "precondition_failed", if_match=f"W/{now}")
    face.refused("PUT", path, newer, 412, "precondition_failed", if_none_match=f"W/{now}")
    assert face.pull(model, names=["w"]) == {"w": ONES}
    face.call("PUT", path, newer, if_match="*", if_none_match=tag)
    assert face.pull(model, names=["w"]) == {"w": [[2.0] * 3] * 2}


def test_a_number_that_many_raise_by_its_etag_loses_nothing(face: Face) -> None:
    """Concurrent read-modify-write cycles with ETag and If-Match lose no update."""
    model = face.make()
    path, held = f"/models/{model}/params/b", f"/pull/{model}/b"

    def raise_it(times: int) -> None:
        while times:
            answer = face.raw("GET", held)
            value = float(np.load(io.BytesIO(answer.content)))
            put = face.raw("PUT", path, face.value(value + 1.0), if_match=answer.headers["etag"])
            assert put.status_code in (200, 412), put.content
            times -= put.status_code == 200

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(raise_it, [5] * 4))
    assert face.pull(model, names=["b"]) == {"b": 20.0}


def test_a_refusal_names_the_partitions_that_have_taken_their_part(face: Face) -> None:
    """If only one shard refuses a push by name, the refusal names the partitions that have applied it.

    A client that pushed everything again would count twice there.
    """
    model = face.make(consistency={"mode": "async", "lag": "reject", "lag_bound": 2})
    for _ in range(4):
        face.push(model, {"b": 1.0})

    refused = face.push(model, {"w": ONES, "b": 1.0}, 409, base_version=0)
    assert (refused["code"], refused["partitions"]) == ("too_stale", [0])
    assert "[0]" in refused["detail"]
    assert "partitions" not in face.push(model, {"b": 1.0}, 409, base_version=0)


def test_a_first_value_is_none_that_could_match(face: Face) -> None:
    """Before its upload a parameter has no value: If-Match fails and If-None-Match succeeds."""
    params = {"w": {"shape": [2], "init": {"kind": "upload"}}}
    model = unique("m")
    token = face.call("POST", "/models", {"name": model, "params": params, "partitions": 2}, 201)["upload_token"]
    path, value = f"/models/{model}/params/w", face.value([1.0, 2.0])

    face.refused("PUT", path, value, 412, "precondition_failed", x_upload_token=token, if_match="*")
    face.call("PUT", path, value, x_upload_token=token, if_none_match="*")
    eventually(lambda: face.call("GET", f"/models/{model}")["state"] == "ready")
    again = face.call("PUT", path, value, x_upload_token=token, if_none_match="*")
    assert again["duplicate"] is True
    assert face.pull(model) == {"w": [1.0, 2.0]}


def test_names_of_any_letters_are_reached_by_path(face: Face) -> None:
    """A name with slashes, spaces, patterns or other scripts works in a path, its slashes plain or escaped."""
    model = face.make(params={n: {"shape": [2]} for n in NAMES})
    for number, name in enumerate(NAMES):
        for safe in ("/", ""):
            path = quote(name, safe=safe)
            face.call("PUT", f"/models/{model}/params/{path}", face.value([number, 1.0]))
            assert face.raw("GET", f"/pull/{model}/{path}").content.startswith(b"\x93NUMPY")
        assert face.pull(model, names=[name]) == {name: [number, 1.0]}
    assert list(face.pull(model, names=["a?b"])) == ["a/b"]
    assert sorted(face.pull(model, names=["*"])) == sorted(NAMES)


def test_refused_requests_say_why_and_change_nothing(face: Face) -> None:
    """Invalid requests get the status and code of the contract, and the model stays at version 0."""
    model = face.make()
    grads = {"b": face.value(1.0)}

    face.refused("POST", "/push", {"model": "nope", "grads": grads}, 404, "unknown_model")
    face.refused("POST", "/pull", {"model": model, "names": ["q*"]}, 404, "unknown_parameter")
    assert face.raw("GET", f"/pull/{model}/q").status_code == 404
    face.refused("PUT", f"/models/{model}/params/q", face.value(1.0), 404, "unknown_parameter")
    late = face.refused("POST", "/pull", {"model": model, "min_version": 5}, 412, "version_not_reached")
    assert late["version"] == 0
    face.refused("POST", "/push", {"model": model, "grads": {}}, 422, "empty_push")
    both = {"w": face.value([1.0]), "q": face.value(1.0)}
    wrong = face.refused("POST", "/push", {"model": model, "grads": both}, 422, "invalid")
    assert {e["where"]: e["code"] for e in wrong["errors"]} == {"w": "invalid_shape", "q": "unknown_parameter"}
    face.refused("POST", "/push", {"model": model, "grads": grads, "ack": "maybe"}, 422, "invalid_field")
    url = face.url + "/push"
    for kind, content, status in (
        ("text/plain", b"x", 415),
        ("application/msgpack", b"\x91" * 100_000, 413),
        ("application/msgpack", b"\xdd\xff\xff\xff\xff", 413),
        ("application/json", b'{"model":', 400),
    ):
        assert face.http.post(url, content=content, headers={"content-type": kind}).status_code == status, content[:9]
    unread = face.http.post(url, json={"model": model, "grads": {"b": 1.0}}, headers={"accept": "image/png"})
    assert unread.status_code == 406
    put = face.raw("PUT", "/push", {})
    assert (put.status_code, put.headers["allow"]) == (405, "POST")
    assert face.call("POST", "/pull", {"model": model})["version"] == 0


@pytest.mark.parametrize("kind", ["zeros", "constant", "uniform", "normal", "xavier_normal", "kaiming_uniform"])
def test_first_values_are_drawn_as_asked(face: Face, kind: str) -> None:
    """Each kind of initial values has the mean and standard deviation that it names, over all partitions."""
    asked: dict[str, dict[str, Any]] = {
        "constant": {"value": 3},
        "uniform": {"low": 2, "high": 3, "seed": 1},
        "normal": {"mean": 1, "std": 0.1},
    }
    mean, std = {
        "zeros": (0.0, 0.0), "constant": (3.0, 0.0), "uniform": (2.5, 12**-0.5), "normal": (1.0, 0.1),
        "xavier_normal": (0.0, (2 / 96) ** 0.5), "kaiming_uniform": (0.0, (2 / 32) ** 0.5),
    }[kind]  # fmt: skip
    init = {"kind": kind, **asked.get(kind, {})}
    model = face.make(params={"w": {"shape": [64, 32], "init": init}}, partitions=3)

    drawn = np.array(face.pull(model)["w"])
    assert drawn.mean() == pytest.approx(mean, abs=0.02)
    assert drawn.std() == pytest.approx(std, rel=0.06, abs=1e-6)


def test_an_upload_belongs_to_who_holds_the_token(face: Face) -> None:
    """Nothing is served until all values are uploaded with the token; wrong shapes or no token are refused."""
    upload: dict[str, Any] = {"init": {"kind": "upload"}}
    model = unique("m")
    params = {"w": {"shape": [2]} | upload, "b": {"shape": []} | upload}
    made = face.call("POST", "/models", {"name": model, "params": params}, 201)
    token = made["upload_token"]
    path = f"/models/{model}/params"

    face.refused("PUT", f"{path}/w", face.value([1.0, 2.0]), 409, "upload_in_progress")
    waiting = face.raw("POST", "/push", {"model": model, "grads": {"b": face.value(1.0)}})
    assert (waiting.status_code, waiting.headers["retry-after"]) == (503, "1")
    face.call("PUT", f"{path}/w", face.value([1.0, 2.0]), x_upload_token=token)
    face.refused("PUT", f"{path}/b", face.value([2.0]), 422, "invalid_shape", x_upload_token=token)
    face.call("PUT", f"{path}/b", face.value(3.0), x_upload_token=token)
    assert face.pull(model, wait_s=10) == {"w": [1.0, 2.0], "b": 3.0}
    # The node that is asked last learns from the scheduler's feed, later than who served the pull, that all is there.
    done = eventually(lambda: face.call("PUT", f"{path}/b", face.value(4.0)), what="an assignment without the token")
    assert done["version"] == 1
