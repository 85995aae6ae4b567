"""OpenAPI of pushes and pulls by name, which shards serve and schedulers forward: bodies and answers."""

from typing import Any, Final, Literal

from pydantic import Field

from paramserver import limits
from paramserver.core.fields import INTEGER_MAX
from paramserver.types import ITEMSIZE
from paramserver.wire.frame import MEDIA_TYPE
from paramserver_scheduler.answers import Answer
from paramserver_scheduler.requests import request_body, response_doc

Schema = dict[str, Any]

_COUNT: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": INTEGER_MAX}
_TEXT: Final[Schema] = {"type": "string"}
_TENSOR: Final[Schema] = {"anyOf": [{"type": "number"}, {"type": "array", "items": {}}]}
_TENSORS_HELP: Final = "by parameter name: a number or nested lists in JSON, `{dtype, shape, data}` in msgpack"
_RANGES: Final[Schema] = {
    "type": "object",
    "description": "by parameter name: sorted, disjoint `[start, stop)` of its flat elements",
    "additionalProperties": {
        "type": "array",
        "items": {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 2},
    },
}

_PUSH_FIELDS: Final[dict[str, Schema]] = {
    "model": _TEXT,
    "grads": {"type": "object", "description": _TENSORS_HELP, "additionalProperties": _TENSOR},
    "ranges": {**_RANGES, "description": "of what `grads` has, by parameter name: see `POST /pull`"},
    "worker": {
        **_TEXT,
        "minLength": 1,
        "maxLength": limits.WORKER_NAME_BYTES_MAX,
        "description": "with `epoch` and `seq`: the push id, under which it can be repeated",
    },
    "epoch": _COUNT,
    "seq": _COUNT,
    "clock": {**_COUNT, "description": "sync and ssp: the iteration that the push belongs to"},
    "timeline": {**_COUNT, "description": "sync: that of the clock; for an older one the answer is 409 `rolled_back`"},
    "base_version": {**_COUNT, "description": "the version that the gradient was computed from"},
    "weight": {"type": "number", "minimum": 0, "description": "multiplies the gradient; default 1"},
    "ack": {"type": "string", "enum": ["applied", "journaled", "fsynced"]},
}
_PULL_FIELDS: Final[dict[str, Schema]] = {
    "model": _TEXT,
    "names": {"type": "array", "items": _TEXT, "minItems": 1, "description": "names or patterns; default: all"},
    "ranges": _RANGES,
    "min_version": _COUNT,
    "min_clock": {**_COUNT, "description": "sync: commits that each partition must have taken"},
    "wait_s": {"type": "number", "minimum": 0, "maximum": limits.WAIT_S_MAX},
    "dtype": {"type": "string", "enum": list(ITEMSIZE), "description": "of the values; default: each parameter's own"},
}


def _body(fields: dict[str, Schema], required: list[str], example: dict[str, Any]) -> dict[str, Any]:
    """The body of a request, which may be a frame instead."""
    schema = {"type": "object", "properties": fields, "required": required, "additionalProperties": False}
    return request_body(schema, example, others=[MEDIA_TYPE])


_PUSH: Final = {
    "model": "demo",
    "grads": {"b": [0.5, -0.5]},
    "worker": "w0",
    "epoch": 1,
    "seq": 7,
    "clock": 6,
    "base_version": 6,
    "weight": 1.0,
}
_PULL: Final = {"model": "demo", "names": ["b"], "min_version": 7, "wait_s": 5, "dtype": "float32"}
PUSH_BODY: Final = _body(_PUSH_FIELDS, ["model", "grads"], _PUSH)
PULL_BODY: Final = _body(_PULL_FIELDS, ["model"], _PULL)
PUSHPULL_BODY: Final = _body(_PULL_FIELDS | _PUSH_FIELDS, ["model", "grads"], {**_PUSH, "names": ["b"]})
ASSIGN_BODY: Final = request_body(
    {}, [[0.0, 1.0], [2.0, 3.0]], others=["application/x-npy", "application/octet-stream"]
)


class Pushed(Answer):
    """What a push did."""

    model: str = Field(examples=["demo"])
    version: int = Field(
        examples=[7], description="the lowest of the partitions; if staged or buffered, the one before"
    )
    state: Literal["applied", "staged", "buffered"] = Field(examples=["applied"])
    duplicate: bool = Field(examples=[False], description="it was accepted before, and did nothing this time")
    durable_version: int = Field(examples=[5])
    incarnation: int = Field(examples=[4294967297])
    timeline: int = Field(examples=[0])
    late: bool = Field(default=False, description="true if its clock is committed already; else absent")


class PendingPush(Pushed):
    """A push that is accepted and not applied yet."""

    state: Literal["staged", "buffered"] = Field(examples=["staged"])


class Pulled(Answer):
    """The values of parameters."""

    model: str = Field(examples=["demo"])
    version: int = Field(examples=[7])
    incarnation: int = Field(examples=[4294967297])
    timeline: int = Field(examples=[0])
    params: dict[str, float | list[Any]] = Field(examples=[{"b": [0.1, 0.2]}], description=_TENSORS_HELP)


class PushPulled(Pushed, Pulled):
    """The values of parameters after a push."""

    push: Pushed


PUSH_ANSWERS: Final = response_doc(200, "Applied", Pushed, others=[MEDIA_TYPE]) | response_doc(
    202, "Accepted: staged (sync) or buffered; `version` is the one before", PendingPush, others=[MEDIA_TYPE]
)
PULL_ANSWERS: Final = response_doc(200, "The values", Pulled, others=[MEDIA_TYPE])
PUSHPULL_ANSWERS: Final = response_doc(200, "The values, and what the push did", PushPulled, others=[MEDIA_TYPE])
ASSIGN_ANSWERS: Final = response_doc(200, "Assigned", Pushed) | response_doc(
    412, "The value does not satisfy If-Match or If-None-Match"
)
_OF_VERSION: Final = ["ETag", "X-Paramserver-Version", "X-Paramserver-Incarnation"]
NPY_ANSWERS: Final = {
    **response_doc(200, "The parameter", headers=_OF_VERSION, others=["application/x-npy"]),
    **response_doc(304, "Unchanged since the ETag in If-None-Match", headers=_OF_VERSION),
    **response_doc(412, "The value does not satisfy If-Match"),
}
