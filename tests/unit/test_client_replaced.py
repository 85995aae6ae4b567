"""A worker whose name another process has taken: it gives way, once and for all."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import paramserver as ps
from paramserver.client.cluster import Cluster
from paramserver.client.iterations import Iterations
from paramserver.client.session import Session
from paramserver.errors import ConflictError, FencedError, InDoubt, NotFoundError, problem
from paramserver.net.calls import Call, Deadline, Outcome, Pause

from .session_node import BEAT, GRAD, Node, deadline, joined, no
from .sharding import Now, drive

JOIN = "/models/m/workers"


class Quick(Node):
    """A node whose leases are so short that heartbeats follow one another at once."""

    def joined(self) -> dict[str, Any]:
        """The answer to a join."""
        return {**super().joined(), "lease_s": 0.005}


def beats_on_a_thread(node: Node) -> None:
    """Join with the blocking client, and wait until its heartbeats end."""

    def run(call: Call[Any], within: object = None) -> Any:
        return drive(call, node)

    client: Any = ps.Client("http://given:1")
    client.transport = SimpleNamespace(run=run)
    with client.model("m").worker() as worker:
        worker._thread.join(20.0)
        assert not worker._thread.is_alive()


def beats_on_a_loop(node: Node) -> None:
    """Join with the asyncio client, and wait until its heartbeats end."""

    async def run(call: Call[Any]) -> Any:
        return drive(call, node)

    async def train() -> None:
        client: Any = ps.AsyncClient("http://given:1")
        client.run = run
        async with asyncio.timeout(20.0), client.model("m").worker() as worker:
            await worker._heartbeat

    asyncio.run(train())


@pytest.mark.parametrize("beats", [beats_on_a_thread, beats_on_a_loop])
def test_the_heartbeats_of_a_worker_that_was_replaced_end(beats: Callable[[Node], None]) -> None:
    """Heartbeats go on after a lost lease and an error, and end once another worker has the name.

    A worker that stays idle in another notebook would otherwise ask for the name for as long as its kernel lives.
    """
    node = Quick("async")
    node.script[BEAT] = [no("fenced"), no("internal"), no("rolled_back", timeline=0), no("fenced", epoch=3)]

    beats(node)

    assert len(node.bodies(JOIN)) == 2
    assert node.script[BEAT] == []


@pytest.mark.parametrize("what", ["heartbeat", "end", "push"])
def test_a_worker_that_was_replaced_does_not_take_its_name_back(what: str) -> None:
    """A worker that was replaced joins no more, even if its model is then deleted and created again.

    The new model knows neither of the two: whoever spoke first would have the name.
    """
    node, session = joined("async")
    node.script[BEAT] = [no("fenced", epoch=2)]
    with pytest.raises(FencedError, match="another worker"):
        drive(session.beat(deadline()), node)

    node.script[BEAT] = node.script["/push"] = [no("unknown_worker")]
    if what == "end":
        drive(session.leave(deadline()), node)
    else:
        with pytest.raises(FencedError, match="another worker"):
            drive(session.beat(deadline()) if what == "heartbeat" else session.push(GRAD, deadline()), node)

    assert (len(node.bodies(JOIN)), session.status) == (1, "stop")


def test_a_worker_that_was_replaced_does_not_take_its_name_back_for_a_push_in_doubt() -> None:
    """A synchronous worker that was replaced does not join anew for a push that only some shards may have."""
    (node, session), now = joined(), Now()
    node.script["/push"] = [problem("in_doubt", "the answer was lost")] * 100
    with pytest.raises(InDoubt):
        drive(session.push(GRAD, Deadline.after(1.0, now)), node, now)
    node.script = {BEAT: [no("fenced", epoch=2)]}
    with pytest.raises(FencedError):
        drive(session.beat(deadline()), node)

    with pytest.raises(FencedError, match="another worker"):
        drive(session.push(GRAD, deadline()), node)

    assert len(node.bodies(JOIN)) == 1


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_a_worker_that_has_left_joins_no_more(mode: str) -> None:
    """A call that another thread makes as the worker leaves ends with an error, and does not join again.

    Nobody would send heartbeats for that worker, and the others would wait for it for a whole lease.
    """
    node, session = joined(mode)
    waiting = Iterations(session).advance(deadline(), None)
    sent = next(waiting)
    assert isinstance(sent, list)
    assert sent[0].path == "/models/m/clock"
    drive(session.leave(deadline()), node)
    node.script["/models/m/clock"] = [no("fenced", epoch=1)]

    with pytest.raises(ConflictError, match="the worker has left"):
        waiting.send([node(r) for r in sent])

    assert (len(node.bodies(JOIN)), session.replaced) == (1, False)


def test_a_worker_that_leaves_while_a_call_joins_again_leaves_for_good() -> None:
    """A call that was joining again as the worker left ends the epoch that it was given."""
    node, session = joined("async")
    node.script[BEAT] = [no("fenced", epoch=1)]
    beating = session.beat(deadline())
    sent = next(beating)
    while not isinstance(sent, Pause) and sent[0].path != JOIN:
        sent = beating.send([node(r) for r in sent])
    assert isinstance(sent, list)
    answer = node(sent[0])
    node.script[BEAT] = [no("fenced", epoch=2)]
    drive(session.leave(deadline()), node)

    with pytest.raises(ConflictError, match="the worker has left"):
        drive(resumed(beating, answer), node)

    deleted = [path for method, path, _ in node.sent if method == "DELETE"]
    assert deleted == [f"{BEAT}?epoch=2&generation=1"]
    assert len(node.bodies(JOIN)) == 2


def resumed(call: Call[Any], outcome: Outcome) -> Call[Any]:
    """Go on with a call whose request has this outcome."""
    effect = call.send([outcome])
    while True:
        effect = call.send((yield effect))


def test_a_join_that_was_given_up_may_be_granted_after_the_next_one(now: Now) -> None:
    """A worker does not give way to a higher epoch soon after a join, if it has given up one before: it may be that."""
    node, session = joined("async")
    node.script = {BEAT: [no("unknown_worker")], JOIN: [problem("in_doubt", "no answer")] * 100}
    with pytest.raises(InDoubt):
        drive(session.beat(Deadline.after(2.5, now)), node, now)
    node.script = {BEAT: [no("unknown_worker"), no("fenced", epoch=3)]}
    drive(session.beat(Deadline.after(2.5, now)), node, now)
    node.epoch = 3

    drive(session.beat(Deadline.after(2.5, now)), node, now)

    assert (session.replaced, session.numbers.epoch) == (False, 4)


def test_a_join_that_was_refused_leaves_no_doubt() -> None:
    """A worker whose model was deleted gives way to one that has joined the next model under its name."""
    node, session = joined("async")
    node.script = {BEAT: [no("unknown_worker")], JOIN: [no("unknown_model")]}
    with pytest.raises(NotFoundError):
        drive(session.beat(deadline()), node)
    node.script = {BEAT: [no("model_replaced", epoch=1)]}

    with pytest.raises(FencedError, match="another worker"):
        drive(session.beat(deadline()), node)

    assert len(node.bodies(JOIN)) == 2


@pytest.mark.parametrize(("later_s", "replaced"), [(10.0, False), (60.0, True)])
def test_a_higher_epoch_is_a_late_join_of_its_own_only_for_a_while(now: Now, later_s: float, replaced: bool) -> None:
    """A worker whose join was retried gives way to a higher epoch that comes long after it, as to any other one."""
    node = Node("async")
    node.script[JOIN] = [problem("in_doubt", "no answer")]
    session = Session(Cluster(("http://given:1",)), "m", None, None, 30.0)
    drive(session.join(Deadline.after(30.0, now)), node, now)
    now.s += later_s
    node.script["/push"] = [no("fenced", epoch=2)]

    pushing = session.push(GRAD, Deadline.after(30.0, now))
    if replaced:
        with pytest.raises(FencedError, match="another worker"):
            drive(pushing, node, now)
    else:
        assert drive(pushing, node, now).state == "dropped"
    assert session.replaced is replaced
