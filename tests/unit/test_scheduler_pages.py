"""Pages of a list: every item is encoded once."""

import json
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from starlette.requests import Request

from paramserver_node import negotiate
from paramserver_scheduler.requests import page
from paramserver_scheduler.routes.status import series

ITEMS = [{"name": f"m{i}", "loss": float("nan"), "text": "é"} for i in range(5)]
SENT = [{**item, "loss": None} for item in ITEMS[1:3]]


def asked(accept: str, query: str = "after=1&limit=2", app: Any = None) -> Request:
    headers = [(b"accept", accept.encode())]
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": query.encode(), "headers": headers}
    return Request(scope | {"app": app})


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what is encoded at once; nothing can be parsed."""
    sizes: list[int] = []

    def counted(encode: Callable[[object], bytes], body: object) -> bytes:
        sizes.append(len(encode(body)))
        return encode(body)

    for name in ("json_text", "pack"):
        monkeypatch.setattr(negotiate, name, partial(counted, getattr(negotiate, name)))
    monkeypatch.setattr(json, "loads", None)
    return sizes


def test_the_items_of_a_page_are_encoded_once(encoded: list[int]) -> None:
    """A page in JSON, of up to 4 MiB, is put together from its encoded items: encoding it holds the event loop."""
    answer = page(asked("application/json"), ITEMS)
    assert 0 < sum(encoded) <= len(answer.body)
    assert bytes(answer.body) == b'{"next":"3","items":%s}' % negotiate.json_text(SENT)
    assert answer.media_type == "application/json"


def test_a_page_in_msgpack_has_the_same_items(encoded: list[int]) -> None:
    """A client that asks for msgpack gets the same page in it, put together from its items, too."""
    answer = page(asked("application/msgpack"), ITEMS)
    assert 0 < sum(encoded) <= len(answer.body)
    found = msgpack.unpackb(bytes(answer.body))
    assert [item["name"] for item in found["items"]] == ["m1", "m2"]
    assert found["next"] == "3"


@pytest.mark.parametrize("accept", ["application/json", "application/msgpack"])
async def test_series_are_encoded_one_at_a_time(accept: str, encoded: list[int]) -> None:
    """A thousand series of thousands of values, in either media type, are never encoded or parsed at once."""
    values = [float(i) for i in range(1000)]
    rings = SimpleNamespace(read=lambda *_: [((("shard", str(i)),), values) for i in range(10)])
    service = SimpleNamespace(now=0.0, history=SimpleNamespace(wall_offset_s=1e9, rings=rings))
    app = SimpleNamespace(state=SimpleNamespace(service=service))

    answer = await series(asked(accept, "metric=cluster.shards", app))

    assert max(encoded) < len(answer.body) / 9
    kind: Any = json.JSONDecoder().decode if accept == "application/json" else msgpack.unpackb
    found = kind(bytes(answer.body) if kind is msgpack.unpackb else bytes(answer.body).decode())
    assert [item["labels"] for item in found["items"]] == [{"shard": str(i)} for i in range(10)]
    assert all(item["values"] == values for item in found["items"])
    assert found["start_s"] < 1e9
