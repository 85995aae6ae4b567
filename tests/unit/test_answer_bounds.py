"""What a pull by name may ask for at once, in each form of its answer."""

import pytest

from paramserver.core.layout import Layout
from paramserver.core.selection import select
from paramserver.core.spec import ModelSpec
from paramserver.errors import RequestError
from paramserver.limits import BODY_BYTES_MAX, JSON_ELEMENTS_MAX
from paramserver_shard.endpoints import check_json, check_msgpack
from paramserver_shard.names import PullRequest

QUARTER = BODY_BYTES_MAX // 4
SPEC = {
    "name": "m",
    "params": {"w": {"shape": [QUARTER]}, "b": {"shape": [1]}, "j": {"shape": [JSON_ELEMENTS_MAX]}},
    "partitions": 64,
}


def asked(*names: str, dtype: str | None = None) -> PullRequest:
    """A pull of these parameters."""
    layout = Layout(ModelSpec.parse(SPEC))
    return PullRequest(select(layout, names), 0, 0, 0.0, dtype)  # type: ignore[arg-type]


def test_msgpack_holds_as_much_as_a_body() -> None:
    """In bytes of the dtype that was asked for, or that each parameter has."""
    check_msgpack(asked("w"))
    check_msgpack(asked("w", "b", dtype="float16"))
    for refused in (asked("w", "b"), asked("w", dtype="float64")):
        with pytest.raises(RequestError) as raised:
            check_msgpack(refused)
        assert raised.value.code == "too_large"


def test_json_holds_so_many_numbers() -> None:
    """However few bytes a number has."""
    check_json(asked("j"))
    with pytest.raises(RequestError) as raised:
        check_json(asked("j", "b"))
    assert raised.value.code == "too_large"
