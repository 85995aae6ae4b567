"""Limits on the size of a pull by name, for JSON and for msgpack."""

from tests.refusals import refused_with

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
    """Return a pull request for these parameters."""
    layout = Layout(ModelSpec.parse(SPEC))
    return PullRequest(select(layout, names), 0, 0, 0.0, dtype)  # type: ignore[arg-type]


def test_msgpack_holds_as_much_as_a_body() -> None:
    """A msgpack pull is refused if its values, in the requested dtype or their own, exceed the limit for a body."""
    check_msgpack(asked("w"))
    check_msgpack(asked("w", "b", dtype="float16"))
    for refused in (asked("w", "b"), asked("w", dtype="float64")):
        with refused_with("too_large", RequestError):
            check_msgpack(refused)


def test_json_holds_so_many_numbers() -> None:
    """A JSON pull of more than JSON_ELEMENTS_MAX numbers is refused."""
    check_json(asked("j"))
    with refused_with("too_large", RequestError):
        check_json(asked("j", "b"))
