"""OpenAPI of the three plain ASGI endpoints, which FastAPI does not document, with working examples."""

from typing import Any, Final

from fastapi import FastAPI

from paramserver.wire.frame import MEDIA_TYPE

_PUSHED: Final = {
    "model": "demo",
    "version": 7,
    "state": "applied",
    "duplicate": False,
    "durable_version": 5,
    "incarnation": 4294967297,
    "timeline": 0,
}
_PULLED: Final = {"model": "demo", "version": 7, "incarnation": 4294967297, "timeline": 0, "params": {"b": [0.1, 0.2]}}
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


def _json(example: Any) -> dict[str, Any]:
    return {
        "application/json": {"schema": {"type": "object"}, "example": example},
        "application/msgpack": {"schema": {"type": "string", "format": "binary"}},
    }


def _answer(text: str, example: Any) -> dict[str, Any]:
    return {"description": text, "content": _json(example)}


PUSH_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: _answer("Applied", _PUSHED),
    202: _answer("Accepted: staged (sync) or buffered; `version` is the one before", {**_PUSHED, "state": "staged"}),
}
ASSIGN_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    **PUSH_ANSWERS,
    412: {"description": "The value does not satisfy If-Match or If-None-Match"},
}
NPY_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "The parameter", "content": {"application/x-npy": {}}},
    304: {"description": "Unchanged since the ETag in If-None-Match"},
    412: {"description": "The value does not satisfy If-Match"},
}
ASSIGN_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {**_json([[0.0, 1.0], [2.0, 3.0]]), "application/x-npy": {}},
    }
}


def _operation(name: str, summary: str, description: str, body: Any, answers: dict[int | str, Any]) -> dict[str, Any]:
    return {
        "post": {
            "tags": ["values"],
            "operationId": name,
            "summary": summary,
            "description": description,
            "requestBody": {"required": True, "content": {**_json(body), MEDIA_TYPE: {}}},
            "responses": {
                **{str(status): answer for status, answer in answers.items()},
                "4XX": {"description": "Problem details (RFC 9457) with a stable `code`; nothing was changed"},
            },
        }
    }


def describe(app: FastAPI) -> None:
    """Add the plain endpoints to the app's OpenAPI document."""
    paths = {
        "/push": _operation(
            "push",
            "Push gradients by name",
            "Each tensor is nested lists in JSON, `{dtype, shape, data}` in msgpack. `worker`, `epoch` and `seq` come "
            "together or not at all and make the push safe to repeat; so does the header `Idempotency-Key`. `ranges` "
            "sends flat element ranges of parameters. JSON has 262,144 numbers at most; frames are for more.",
            _PUSH,
            PUSH_ANSWERS,
        ),
        "/pull": _operation(
            "pull",
            "Pull parameters by name",
            "`names` may be patterns such as `layers.*.weight`; left out, everything comes. With `min_version` the "
            "answer waits up to `wait_s` seconds, then 412; with `min_clock` too, for that many commits in mode sync.",
            _PULL,
            {200: _answer("The values", _PULLED)},
        ),
        "/pushpull": _operation(
            "pushpull",
            "Push gradients, then pull",
            "A push and a pull in one round trip; `push` in the answer is what the push alone would have got.",
            {**_PUSH, "names": ["b"]},
            {200: _answer("The values", {**_PULLED, "push": _PUSHED})},
        ),
    }
    generate = app.openapi

    def with_values() -> dict[str, Any]:
        document = generate()
        document.setdefault("paths", {}).update(paths)
        return document

    app.openapi = with_values  # type: ignore[method-assign]
