"""Limits of the shards' value routes: sizes, media types and weights of requests and answers."""

import msgpack
import numpy as np
import pytest

from paramserver.limits import JSON_ELEMENTS_MAX
from paramserver.wire.frame import MEDIA_TYPE, encode_header

from .processes import Nodes
from .routes import MSGPACK, Model, problem, unchanged

pytestmark = pytest.mark.process


def test_the_name_of_a_frame_is_read_as_any_media_type(model: Model) -> None:
    """The media type of a frame is accepted in any case and with parameters."""
    frame, body = model.everywhere(1.0)
    for kind in ("Application/Vnd.Paramserver.Frame", f"{MEDIA_TYPE}; v=1"):
        url, content = f"{model.url(0)}/push", encode_header(frame) + body
        assert model.http.post(url, content=content, headers={"content-type": kind}).status_code == 200
    assert model.values("b") == 2.0


@pytest.mark.parametrize(
    ("weight", "status", "code"),
    [(-1.0, 422, "invalid_field"), (float("nan"), 400, "malformed"), (float("inf"), 400, "malformed")],
)
def test_no_push_has_a_negative_weight(model: Model, weight: float, status: int, code: str) -> None:
    """A push with a weight that is negative, NaN or infinite is refused and changes nothing."""
    body = {"model": model.name, "grads": {"b": {"dtype": "float32", "shape": [], "data": bytes(4)}}, "weight": weight}
    packed = model.http.post(f"{model.url(0)}/push", content=msgpack.packb(body), headers=MSGPACK)
    frame = model.frame("/push", *model.everywhere(1.0, weight=weight))
    problem(packed, 422, "invalid_field")
    problem(frame, status, code)
    assert unchanged(model)


def test_json_is_for_few_numbers(rest_cluster: Nodes) -> None:
    """As many numbers as a JSON answer can hold can be pushed in JSON; more are refused with 413."""
    size = JSON_ELEMENTS_MAX
    params = {"w": {"shape": [size]}}
    model = Model(rest_cluster, params=params)
    assert model.push({"w": [1.0] * size}).status_code == 200
    assert model.values("w") == [1.0] * size
    for many in ([1] * (2 * size), [[1]] * (2 * size)):
        assert "msgpack" in problem(model.push({"w": many}), 413, "too_large")["hint"]
        url = f"{model.url(0)}/models/{model.name}/params/w"
        problem(model.http.put(url, json=many), 413, "too_large")
    values = {"dtype": "float32", "shape": [size], "data": np.full(size, 2.0, "<f4").tobytes()}
    packed = msgpack.packb({"model": model.name, "grads": {"w": values}})
    assert model.http.post(f"{model.url(0)}/push", content=packed, headers=MSGPACK).status_code == 200


def test_what_no_answer_can_hold_is_refused_before_anything_is_done(rest_cluster: Nodes) -> None:
    """Too many values for JSON are refused before values are fetched or a gradient is applied."""
    init = {"kind": "upload"}
    model = Model(
        rest_cluster, params={"w": {"shape": [JSON_ELEMENTS_MAX], "init": init}, "b": {"shape": [], "init": init}}
    )
    problem(model.ask("/pull", {}), 413, "too_large")
    problem(model.ask("/pull", {"names": ["b"]}), 503, "initializing")

    params = {"w": {"shape": [JSON_ELEMENTS_MAX]}, "b": {"shape": []}}
    model = Model(rest_cluster, params=params)
    assert "push" not in problem(model.ask("/pushpull", {"grads": {"b": 1.0}}), 413, "too_large")
    assert model.values("b") == 0.0
    assert model.ask("/pushpull", {"grads": {"b": 1.0}, "names": ["b"]}).json()["params"] == {"b": 1.0}


def test_a_long_name_is_told_in_part(model: Model) -> None:
    """A push of a parameter, or of ranges of one, with a name of a megabyte is refused without repeating all of it."""
    long = "n" * (1 << 20)
    problem(refused := model.push({long: 1.0}), 404, "unknown_parameter")
    assert len(refused.content) < 4096
    problem(refused := model.push({"b": 1.0}, ranges={long: [[0, 1]]}), 422, "invalid_range")
    assert len(refused.content) < 4096
    assert unchanged(model)
