"""OpenAPI of pushes and pulls by name: schemas and examples of bodies and answers.

Shards serve these routes and schedulers forward them, so both describe them with this module.
"""

from collections.abc import Mapping, Set
from typing import Any, Final

from paramserver import limits
from paramserver.core.fields import INTEGER_MAX
from paramserver.types import ITEMSIZE
from paramserver.wire.frame import MEDIA_TYPE
from paramserver_node.api_document import answer_headers
from paramserver_node.negotiate import JSON, MSGPACK

Schema = dict[str, Any]

_COUNT: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": INTEGER_MAX}
_TEXT: Final[Schema] = {"type": "string"}
_TENSORS: Final[Schema] = {
    "type": "object",
    "description": "by parameter name: a number or nested lists in JSON, `{dtype, shape, data}` in msgpack",
    "additionalProperties": {"anyOf": [{"type": "number"}, {"type": "array", "items": {}}]},
}
_STATE: Final[Schema] = {"type": "string", "enum": ["applied", "staged", "buffered"]}

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
    "grads": _TENSORS,
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
_PUSHED_FIELDS: Final[dict[str, Schema]] = {
    "model": _TEXT,
    "version": {**_COUNT, "description": "the lowest of the partitions; if staged or buffered, the one before"},
    "state": _STATE,
    "duplicate": {"type": "boolean", "description": "it was accepted before, and did nothing this time"},
    "durable_version": _COUNT,
    "incarnation": _COUNT,
    "timeline": _COUNT,
    "late": {"type": "boolean", "description": "true if its clock is committed already; else absent"},
}
_PULLED_FIELDS: Final[dict[str, Schema]] = {
    "model": _TEXT,
    "version": _COUNT,
    "incarnation": _COUNT,
    "timeline": _COUNT,
    "params": _TENSORS,
}


def _object(fields: Mapping[str, Schema], required: Set[str]) -> Schema:
    ordered = [name for name in fields if name in required]
    return {"type": "object", "properties": dict(fields), "required": ordered, "additionalProperties": False}


def _answer(fields: Mapping[str, Schema]) -> Schema:
    return _object(fields, fields.keys() - {"late"})


PUSH: Final = _object(_PUSH_FIELDS, {"model", "grads"})
PULL: Final = _object(_PULL_FIELDS, {"model"})
PUSHPULL: Final = _object(_PULL_FIELDS | _PUSH_FIELDS, {"model", "grads"})
PUSHED: Final = _answer(_PUSHED_FIELDS)
PULLED: Final = _answer(_PULLED_FIELDS)
PUSHPULLED: Final = _answer(_PUSHED_FIELDS | _PULLED_FIELDS | {"push": PUSHED})

PUSH_EXAMPLE: Final = {
    "model": "demo",
    "grads": {"b": [0.5, -0.5]},
    "worker": "w0",
    "epoch": 1,
    "seq": 7,
    "clock": 6,
    "base_version": 6,
    "weight": 1.0,
}
PULL_EXAMPLE: Final = {"model": "demo", "names": ["b"], "min_version": 7, "wait_s": 5, "dtype": "float32"}
PUSHPULL_EXAMPLE: Final = {**PUSH_EXAMPLE, "names": ["b"]}
PUSHED_EXAMPLE: Final = {
    "model": "demo",
    "version": 7,
    "state": "applied",
    "duplicate": False,
    "durable_version": 5,
    "incarnation": 4294967297,
    "timeline": 0,
}
PULLED_EXAMPLE: Final = {
    "model": "demo",
    "version": 7,
    "incarnation": 4294967297,
    "timeline": 0,
    "params": {"b": [0.1, 0.2]},
}
PUSHPULLED_EXAMPLE: Final = {**PUSHED_EXAMPLE, **PULLED_EXAMPLE, "push": PUSHED_EXAMPLE}


def content(schema: Schema, example: Any, *others: str) -> dict[str, Any]:
    """Return the content of a body or an answer: JSON, the same in msgpack, or one of these other media types."""
    described = {
        JSON: {"schema": schema, "example": example},
        MSGPACK: {"schema": {"type": "string", "format": "binary"}},
    }
    return {**described, **{kind: {} for kind in others}}


def answer(status: int, text: str, schema: Schema, example: Any, *others: str) -> dict[int | str, dict[str, Any]]:
    """Return a successful answer of a route, by its status."""
    return {status: {"description": text, "content": content(schema, example, *others)}}


def body(schema: Schema, example: Any, *others: str, required: bool = True) -> dict[str, Any]:
    """Return the request body of a route."""
    return {"requestBody": {"required": required, "content": content(schema, example, *others)}}


PUSH_BODY: Final = body(PUSH, PUSH_EXAMPLE, MEDIA_TYPE)
PULL_BODY: Final = body(PULL, PULL_EXAMPLE, MEDIA_TYPE)
PUSHPULL_BODY: Final = body(PUSHPULL, PUSHPULL_EXAMPLE, MEDIA_TYPE)
PUSH_ANSWERS: Final = answer(200, "Applied", PUSHED, PUSHED_EXAMPLE, MEDIA_TYPE) | answer(
    202,
    "Accepted: staged (sync) or buffered; `version` is the one before",
    PUSHED,
    {**PUSHED_EXAMPLE, "state": "staged"},
    MEDIA_TYPE,
)
PULL_ANSWERS: Final = answer(200, "The values", PULLED, PULLED_EXAMPLE, MEDIA_TYPE)
PUSHPULL_ANSWERS: Final = answer(200, "The values, and what the push did", PUSHPULLED, PUSHPULLED_EXAMPLE, MEDIA_TYPE)


ASSIGN_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    **answer(200, "Assigned", PUSHED, PUSHED_EXAMPLE),
    412: {"description": "The value does not satisfy If-Match or If-None-Match"},
}
_OF_VERSION: Final = answer_headers("ETag", "X-Paramserver-Version", "X-Paramserver-Incarnation")
NPY_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "The parameter", "headers": _OF_VERSION, "content": {"application/x-npy": {}}},
    304: {"description": "Unchanged since the ETag in If-None-Match", "headers": _OF_VERSION},
    412: {"description": "The value does not satisfy If-Match"},
}
ASSIGN_BODY: Final = body({}, [[0.0, 1.0], [2.0, 3.0]], "application/x-npy", "application/octet-stream")
