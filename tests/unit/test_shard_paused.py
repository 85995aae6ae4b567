"""A shard that was paused during a request: its endpoints check that it may serve before they answer."""

import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Route

from paramserver.core.shard.effects import PushDone
from paramserver.errors import problem
from paramserver.types import ModelKey
from paramserver.wire.frame import MEDIA_TYPE, PushFrame, PushPart, encode_header
from paramserver_node import problems
from paramserver_node.in_flight import InFlight
from paramserver_shard.accounts import AccountMiddleware
from paramserver_shard.endpoints import Pull, Push, PushPull
from paramserver_shard.names import after_push
from paramserver_shard.telemetry import Telemetry
from paramserver_shard.unsent import UnsentValues

DONE = PushDone(ModelKey("m", 1), 0, "applied", False, ())
FRAME = encode_header(PushFrame("m", [PushPart(0, None, None)]))


class Shard:
    """Endpoints of a shard that is paused while it executes the request, for so long that it may not serve any more."""

    def __init__(self) -> None:
        self.stood_still = False
        self.after_push = False
        """Whether the step that follows an accepted push fails."""

    def check(self) -> None:
        """Refuse after the pause, as a shard without contact does."""
        if self.stood_still:
            raise problem("unavailable", "this shard has no contact with a scheduler or Redis")

    async def work(self, *_: Any) -> Any:
        """Execute a push, or a push with a pull."""
        self.stood_still = True
        if self.after_push:
            raise after_push(problem("storage_unavailable", "Redis does not answer"), DONE)
        return DONE

    async def frame_work(self, *_: Any) -> Any:
        """Execute a push that came as a frame."""
        return await self.work(), None

    async def pulled(self, *_: Any) -> Any:
        """Refuse a pull after the pause, as a shard that has been fenced does."""
        self.stood_still = True
        raise problem("loading", "the partition is being read")

    async def read(self, *_: Any) -> Any:
        """Return a push frame that has arrived."""
        return SimpleNamespace(frame=PushFrame("m", []))

    async def ask(self, path: str, body: bytes, kind: str) -> dict[str, Any]:
        """Send a request; return the problem document of its 503 answer."""
        names: Any = SimpleNamespace(push=self.work, pushpull=self.work, pull=self.pulled)
        frames: Any = SimpleNamespace(push=self.frame_work, lease_after=lambda *_: None, prepare_push=None)
        reader: Any = SimpleNamespace(read=self.read)
        app, asked, unsent = FastAPI(), Telemetry(time.monotonic, ()), UnsentValues(lambda *_: None, 1 << 30)
        problems.install(app)
        app.add_middleware(AccountMiddleware, in_flight=InFlight(1 << 30))
        for route, endpoint in (("/push", Push), ("/pushpull", PushPull), ("/pull", Pull)):
            here: Any = self
            app.router.routes.append(
                Route(route, endpoint(here, reader, frames, names, asked, unsent), methods=["POST"])
            )
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shard") as http:
            answer = await http.post(path, content=body, headers={"content-type": kind})
        document: dict[str, Any] = answer.json()
        assert answer.status_code == 503
        return document


@pytest.mark.parametrize(
    ("path", "body", "kind", "failing"),
    [
        ("/push", b"{}", "application/json", False),
        ("/push", b"{}", "application/json", True),
        ("/push", FRAME, MEDIA_TYPE, False),
        ("/push", FRAME, MEDIA_TYPE, True),
        ("/pushpull", b"{}", "application/json", True),
    ],
    ids=["push", "push-failing", "frame", "frame-failing", "pushpull-failing"],
)
async def test_a_push_is_in_doubt_then(path: str, body: bytes, kind: str, failing: bool) -> None:
    """After the pause a push is answered `in_doubt` without its state: the partition may have another owner by now."""
    shard = Shard()
    shard.after_push = failing
    document = await shard.ask(path, body, kind)
    assert document["code"] == "in_doubt"
    assert "push" not in document


async def test_a_pull_is_not() -> None:
    """After the pause a pull keeps its own error, not `in_doubt`, because repeating it loses nothing."""
    assert (await Shard().ask("/pull", b"{}", "application/json"))["code"] == "loading"
