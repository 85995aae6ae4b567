"""What the scheduler asks of a worker counts from its join on, not from its first heartbeat on.  Without I/O."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import paramserver as ps
from paramserver.net.calls import Call, Pause

from .session_node import BEAT, Node, deadline, no, ok, opened
from .sharding import drive


class Asking(Node):
    """A node that asks something of a worker that joins; its heartbeats follow one another at once."""

    def __init__(self, asked: str) -> None:
        super().__init__("async")
        self.asked = asked

    def joined(self) -> dict[str, Any]:
        """The answer to a join."""
        return {**super().joined(), "lease_s": 0.005, "asked": self.asked}


def begins_on_a_thread(node: Node) -> list[Any]:
    """Return the heartbeats that a blocking worker has sent as its block begins."""

    def run(call: Call[Any], within: object = None) -> Any:
        return drive(call, node)

    client: Any = ps.Client("http://given:1")
    client.transport = SimpleNamespace(run=run)
    with client.model("m").worker():
        return node.bodies(BEAT)


def begins_on_a_loop(node: Node) -> list[Any]:
    """The same of a worker on asyncio."""

    async def run(call: Call[Any]) -> Any:
        try:
            effect = next(call)
            while True:
                await asyncio.sleep(0.0)
                effect = call.send([] if isinstance(effect, Pause) else [node(r) for r in effect])
        except StopIteration as stop:
            return stop.value

    async def train() -> list[Any]:
        client: Any = ps.AsyncClient("http://given:1")
        client.run = run
        async with asyncio.timeout(20.0), client.model("m").worker():
            return node.bodies(BEAT)

    return asyncio.run(train())


@pytest.mark.parametrize("begins", [begins_on_a_thread, begins_on_a_loop])
def test_the_block_of_a_worker_that_joins_a_paused_run_begins_once_that_goes_on(
    begins: Callable[[Node], list[Any]],
) -> None:
    """A worker that joins a paused run sends heartbeats, and trains from when one of them says that the run goes on.

    Those of a run whose machine was started again trained it for a second, while it was paused.
    """
    node = Asking("paused")
    node.script[BEAT] = [ok({"state": "paused"})] * 2

    assert len(begins(node)) >= 3


def test_a_join_tells_what_is_asked() -> None:
    """A worker of a run that has ended is to finish from its join on, and one that joins again hears of a pause."""
    node = Asking("stop")
    assert opened(node).status == "stop"

    node.asked = "active"
    session = opened(node)
    assert session.status == "active"
    node.asked, node.script[BEAT] = "paused", [no("unknown_worker")]
    drive(session.beat(deadline()), node)
    assert session.status == "paused"
