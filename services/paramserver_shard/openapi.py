"""OpenAPI of the three plain ASGI endpoints, which FastAPI does not document, with working examples."""

from typing import Any

from fastapi import FastAPI

from paramserver_node import value_docs as docs
from paramserver_node.api_document import REFUSED, add_headers


def _operation(
    name: str, summary: str, description: str, body: dict[str, Any], answers: dict[int | str, Any]
) -> dict[str, Any]:
    return {
        "post": {
            "tags": ["values"],
            "operationId": name,
            "summary": summary,
            "description": description,
            **body,
            "responses": {
                **{str(status): answer for status, answer in answers.items()},
                "default": REFUSED,
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
            docs.PUSH_BODY,
            docs.PUSH_ANSWERS,
        ),
        "/pull": _operation(
            "pull",
            "Pull parameters by name",
            "`names` may be patterns such as `layers.*.weight`; left out, everything comes. With `min_version` the "
            "answer waits up to `wait_s` seconds, then 412; with `min_clock` too, for that many commits in mode sync.",
            docs.PULL_BODY,
            docs.PULL_ANSWERS,
        ),
        "/pushpull": _operation(
            "pushpull",
            "Push gradients, then pull",
            "A push and a pull in one round trip; `push` in the answer is what the push alone would have got.",
            docs.PUSHPULL_BODY,
            docs.PUSHPULL_ANSWERS,
        ),
    }
    for path, operations in paths.items():
        add_headers(operations["post"], "post", path)
    generate = app.openapi

    def with_values() -> dict[str, Any]:
        document = generate()
        document.setdefault("paths", {}).update(paths)
        return document

    app.openapi = with_values  # type: ignore[method-assign]
