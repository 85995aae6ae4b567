"""Pages of a list: every item is encoded once."""

import json

import msgpack
import pytest
from starlette.requests import Request

from paramserver_node import negotiate
from paramserver_scheduler.requests import page

ITEMS = [{"name": f"m{i}", "loss": float("nan"), "text": "é"} for i in range(5)]
SENT = [{**item, "loss": None} for item in ITEMS[1:3]]


def asked(accept: str) -> Request:
    headers = [(b"accept", accept.encode())]
    return Request(
        {"type": "http", "method": "GET", "path": "/", "query_string": b"after=1&limit=2", "headers": headers}
    )


def test_the_items_of_a_page_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page in JSON, of up to 4 MiB, is put together from its encoded items: encoding it holds the event loop."""
    encoded = 0

    def counted(body: object) -> bytes:
        nonlocal encoded
        text = json_text(body)
        encoded += len(text)
        return text

    json_text = negotiate.json_text
    monkeypatch.setattr(negotiate, "json_text", counted)

    answer = page(asked("application/json"), ITEMS)

    assert json.loads(bytes(answer.body)) == {"items": SENT, "next": "3"}
    assert answer.media_type == "application/json"
    assert 0 < encoded <= len(answer.body)


def test_a_page_in_msgpack_has_the_same_items() -> None:
    """A client that asks for msgpack gets the same page in it."""
    answer = page(asked("application/msgpack"), ITEMS)

    found = msgpack.unpackb(bytes(answer.body))
    assert [item["name"] for item in found["items"]] == ["m1", "m2"]
    assert found["next"] == "3"
