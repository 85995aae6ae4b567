"""A worker's pushes that are undone, or dropped, before their clock is committed, without I/O."""

from typing import Any

import pytest

from paramserver.client.iterations import Iterations
from paramserver.client.session import Session
from paramserver.errors import Unavailable
from paramserver.net.calls import Deadline, Outcome, Request

from .session_node import BEAT, GRAD, deadline, joined, no, opened
from .sharding import Now, drive
from .test_client_iterations import CLOCK, Shard


class Waiting(Shard):
    """A node whose shard does not see the commit in time; what is to be told, it tells by `way` after the push."""

    def __init__(self, code: str, way: str, clock: int = 0, mode: str = "sync") -> None:
        """`clock` and `mode`: those of the model from then on."""
        super().__init__()
        self.released, self._code, self._way, self._clock, self._mode = False, code, way, clock, mode
        self.session: Session = opened(self)
        self.iterations = Iterations(self.session)
        drive(self.session.pull(deadline()), self)
        self._untold = True

    def __call__(self, request: Request) -> Outcome:
        outcome = super().__call__(request)
        if request.path in ("/push", "/pushpull") and self._untold:
            self._untold, self.mode = False, self._mode
            self.clock, self.timeline = self._clock, self.timeline + (self._code == "rolled_back")
            path = CLOCK if self._way == "clock" else BEAT
            told = {"timeline": self.timeline, "clock": self.clock, "epoch": self.session.numbers.epoch}
            self.script[path] = [no(self._code, **told)]
            if self._way == "heartbeat":
                drive(self.session.beat(deadline()), self)
        return outcome


@pytest.mark.parametrize("way", ["clock", "heartbeat"])
@pytest.mark.parametrize("code", ["rolled_back", "fenced"])
def test_a_step_whose_gradient_was_undone_while_it_waited_is_dropped(code: str, way: str) -> None:
    """A step says `dropped` if the model went back, or the lease was lost, while it waited for the commit.

    The same iteration can then be done again, and counts.
    """
    node = Waiting(code, way)

    assert drive(node.iterations.step(GRAD, {}, deadline(), None), node).state == "dropped"
    assert node.session.clock == 0

    drive(node.session.pull(deadline()), node)
    assert drive(node.iterations.step(GRAD, {}, deadline(), None), node).state == "staged"
    assert node.session.clock == 1


@pytest.mark.parametrize("code", ["rolled_back", "fenced"])
def test_a_step_that_the_others_may_have_gone_on_with_is_not_dropped(code: str) -> None:
    """If the model is beyond the step's clock, that commit may have had the gradient, which must not count twice."""
    node = Waiting(code, "clock", clock=1)

    assert drive(node.iterations.step(GRAD, {}, deadline(), None), node).state == "staged"
    assert node.session.clock == 1


@pytest.mark.parametrize("way", ["clock", "heartbeat"])
def test_a_step_of_a_model_that_left_sync_meanwhile_is_not_dropped(way: str) -> None:
    """When a model leaves sync, what is staged counts, also that of a worker that has lost its lease."""
    node = Waiting("fenced", way, mode="async")

    assert drive(node.iterations.step(GRAD, {}, deadline(), None), node).state == "staged"


@pytest.mark.parametrize("way", ["clock", "heartbeat"])
@pytest.mark.parametrize("code", ["rolled_back", "fenced"])
def test_an_exchange_whose_gradient_was_undone_does_not_say_that_it_counts(code: str, way: str) -> None:
    """If the pull after an undone gradient fails, no hint says that another step would count the gradient twice."""
    node, now = Waiting(code, way), Now()
    node.script["/pull"] = [no("unavailable")] * 1000

    with pytest.raises(Unavailable) as raised:
        drive(node.iterations.exchange(GRAD, {}, Deadline.after(30.0, now), None), node, now)

    assert "twice" not in (raised.value.hint or "")
    node.script["/pull"] = []
    values: Any = drive(node.session.pull(deadline()), node)
    drive(node.iterations.exchange(GRAD, {}, deadline(), None, out=values), node)
    assert node.session.clock == 1


@pytest.mark.parametrize("what", ["rolled_back", "fenced"])
def test_no_gradient_of_obsolete_values_follows_one_that_was_dropped(what: str) -> None:
    """All gradients of an iteration whose values have become obsolete are dropped, until the worker pulls again.

    The second one would else be staged alone, as if it were the whole iteration.
    """
    node, session = joined()
    its = Iterations(session)
    drive(session.pull(deadline()), node)
    drive(session.push(GRAD, deadline()), node)
    node.timeline = 2 * (what == "rolled_back")
    node.script["/push"] = [no(what, timeline=node.timeline, clock=0, epoch=1)]

    assert [drive(session.push(GRAD, deadline()), node).state for _ in range(3)] == ["dropped"] * 3
    assert drive(its.advance(deadline(), None), node) == 0
    assert (len(node.pushes), node.bodies("/models/m/clock")) == (1, [])

    drive(session.pull(deadline()), node)
    assert drive(session.push(GRAD, deadline()), node).state == "staged"
    assert drive(its.advance(deadline(), None), node) == 1
