"""What the state of a large partition holds up when it is assigned, as in a restore."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from paramserver import kernels
from paramserver.core.layout import Layout
from paramserver.core.shard.effects import PartVersion, PushDone
from paramserver.core.spec import ModelSpec
from paramserver.types import AnyArray, ModelKey
from paramserver.wire.state import SetFrame, SetPart
from paramserver_shard import internal
from paramserver_shard.directory import KnownModel

KEY = ModelKey("m", 1)
LAYOUT = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [4]}}, "partitions": 1}))
KNOWN = KnownModel(KEY, LAYOUT, 0, "ready", (("s", 1),), None, None)


async def test_a_state_that_is_assigned_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop goes on while the values that a restore sets are checked and copied."""
    checking, went_on = threading.Event(), threading.Event()
    set_to: list[list[float]] = []

    def all_finite(values: AnyArray, dtype: str | None = None) -> bool:
        checking.set()
        assert went_on.wait(10), "the event loop waits for the check"
        return kernels.all_finite(values, dtype)

    async def read(*_: Any) -> Any:
        body = SimpleNamespace(parts=[np.arange(4, dtype=np.float32).view(np.uint8)])
        return KNOWN, SetFrame("m", 1, (SetPart(0, 4),)), body

    async def push(event: Any) -> PushDone:
        set_to.append(event.parts[0].data.tolist())
        return PushDone(KEY, 0, "applied", False, (PartVersion(0, 1, 1, 0),))

    monkeypatch.setattr(internal, "kernels", SimpleNamespace(all_finite=all_finite))
    loop = asyncio.get_running_loop()
    runtime = SimpleNamespace(push=push, submit=lambda work: loop.run_in_executor(None, work))
    serving, reader = SimpleNamespace(check=lambda: None), SimpleNamespace(read=read)
    app = FastAPI()
    app.include_router(
        internal.router(cast(Any, serving), cast(Any, None), cast(Any, runtime), cast(Any, reader), Mock())
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shard") as client:
        asked = asyncio.ensure_future(client.post("/internal/set/m"))
        while not checking.is_set():
            await asyncio.sleep(0)
        went_on.set()
        assert (await asked).status_code == 200
    assert set_to == [[0.0, 1.0, 2.0, 3.0]]
