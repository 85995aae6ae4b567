"""Which requests of leaders a shard obeys: those of the newest leader term that it knows."""

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import httpx
import numpy as np
from fastapi import FastAPI

from paramserver.core.layout import Layout
from paramserver.core.shard.effects import PushDone
from paramserver.core.spec import ModelSpec
from paramserver.types import ModelKey
from paramserver.wire.state import SetFrame, SetPart
from paramserver_node import problems
from paramserver_shard import internal
from paramserver_shard.directory import KnownModel
from paramserver_shard.membership import Membership

KEY = ModelKey("m", 1)
LAYOUT = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [4]}}, "partitions": 1}))
KNOWN = KnownModel(KEY, LAYOUT, 0, "ready", (("s", 1),), None, None)


async def test_values_from_a_leader_that_was_replaced_while_they_came_are_refused() -> None:
    """They get `no_leader` and set nothing; those of the newest leader do, and those of clients, which name no term.

    A newer term than the shard has heard of counts from then on, and ends its feed, so that it turns to that leader.
    """
    others: list[Any] = [Mock() for _ in range(6)]
    membership = Membership("s", [], Mock(url="http://leader"), *others)
    membership._terms.check({"told_by": "http://leader", "term": 4})
    heard: list[int] = []

    async def read(*_: Any) -> Any:
        membership._terms.adopt(heard.pop())  # before the end of the body
        return KNOWN, frame, SimpleNamespace(parts=[np.zeros(16, np.uint8)])

    async def submit(work: Any) -> Any:
        return work()

    runtime = SimpleNamespace(push=AsyncMock(return_value=PushDone(KEY, 0, "applied", False, ())), submit=submit)
    app = FastAPI()
    problems.install(app)
    reader: Any = SimpleNamespace(read=read)
    app.include_router(internal.router(Mock(), Mock(), cast(Any, runtime), reader, membership.obey))
    answers = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shard") as client:
        for sent, known in ((4, 4), (4, 5), (None, 5), (5, 5), (6, 5), (5, 5)):
            heard.append(known)
            frame = SetFrame("m", 1, (SetPart(0, 4),), term=sent)
            answer = await client.post("/internal/set/m")
            code = answer.json()["code"] if answer.status_code >= 400 else ""
            answers.append((answer.status_code, code, runtime.push.await_count, membership._resync.is_set()))
    refused = (503, "no_leader")
    assert answers == [
        (200, "", 1, False),
        (*refused, 1, False),
        (200, "", 2, False),
        (200, "", 3, False),
        (200, "", 4, True),
        (*refused, 4, True),
    ]
