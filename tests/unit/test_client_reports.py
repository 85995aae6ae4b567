"""What a worker tells the scheduler with its heartbeats: its state and metrics, answered by hand."""

import numpy as np
import pytest

from paramserver.errors import ConflictError, NotFoundError

from .sharding import drive
from .test_client_session import BEAT, Node, deadline, no, ok, opened


def test_state_is_sent_when_it_has_changed() -> None:
    """`w.state` goes with the next heartbeat, once."""
    node = Node()
    session = opened(node)
    session.reports.state["seen"] = np.int64(7)

    for _ in range(2):
        drive(session.beat(deadline()), node)

    beats = node.bodies(BEAT)
    assert beats[0]["state"] == {"seen": 7}
    assert "state" not in beats[1]


def test_a_refused_state_does_not_cost_the_lease(caplog: pytest.LogCaptureFixture) -> None:
    """The heartbeat goes out without it, with the metrics; the log says why, once, and it is not sent again."""
    node = Node()
    session = opened(node)
    session.reports.state["seen"] = [0] * 3
    session.reports.note(0, {"loss": 0.5})
    node.script[BEAT] = [no("invalid_field", where="state")]

    for _ in range(2):
        drive(session.beat(deadline()), node)

    said = [{k: v for k, v in b.items() if k in ("state", "metrics")} for b in node.bodies(BEAT)]
    assert said == [{"state": {"seen": [0, 0, 0]}, "metrics": {"loss": 0.5}}, {"metrics": {"loss": 0.5}}, {}]
    assert ["state_not_kept" in r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [True]
    assert "refused" in caplog.text


def test_a_state_that_would_come_back_changed_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    """JSON numbers beyond 64 bits become floats on their way, which a random generator cannot go on from."""
    node = Node()
    session = opened(node)
    session.reports.state["random"] = np.random.default_rng(0).bit_generator.state

    for _ in range(2):
        drive(session.beat(deadline()), node)

    assert not any("state" in b for b in node.bodies(BEAT))
    assert caplog.text.count("beyond 64 bits") == 1


def test_a_refusal_that_names_no_part_leaves_one_out_after_the_other() -> None:
    """A body that cannot be read at all is sent again without the state, then without the metrics."""
    node = Node()
    session = opened(node)
    session.reports.state["seen"] = 7
    session.reports.note(0, {"loss": 0.5})
    node.script[BEAT] = [no("malformed"), no("malformed")]

    drive(session.beat(deadline()), node)

    assert ["state" in b for b in node.bodies(BEAT)] == [True, False, False]
    assert ["metrics" in b for b in node.bodies(BEAT)] == [True, True, False]


def test_a_heartbeat_of_a_model_that_is_gone_is_not_repeated() -> None:
    """What is wrong is not what it says: that is kept for the next one."""
    node = Node()
    session = opened(node)
    session.reports.state["seen"] = 7
    node.script[BEAT] = [no("unknown_model")]

    with pytest.raises(NotFoundError):
        drive(session.beat(deadline()), node)
    drive(session.beat(deadline()), node)

    assert [b["state"] for b in node.bodies(BEAT)] == [{"seen": 7}] * 2


def test_metrics_that_nobody_has_heard_go_with_the_next_heartbeat() -> None:
    """While a scheduler is away, what a worker reports is kept."""
    node = Node("async")
    session = opened(node)
    for clock in range(3):
        session.reports.note(clock, {"loss": float(clock)})
    node.script["/models/m/metrics"] = [ok({"accepted": 1}), no("conflict")]

    with pytest.raises(ConflictError):
        drive(session.beat(deadline()), node)
    drive(session.beat(deadline()), node)

    heard = [b["metrics"]["loss"] for b in node.bodies("/models/m/metrics")]
    assert heard == [0.0, 1.0, 1.0]
    assert node.bodies(BEAT)[-1]["metrics"] == {"loss": 2.0}


class Tensor:
    """As one of torch that has several elements."""

    def item(self) -> float:
        """Raises what torch does."""
        raise RuntimeError("a Tensor with 3 elements cannot be converted to Scalar")


def test_a_state_with_a_tensor_is_left_out_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """Not in silence, as one is that is being changed at this moment."""
    node = Node("async")
    session = opened(node)
    session.reports.state["best"] = Tensor()

    drive(session.beat(deadline()), node)

    assert "state_not_kept" in caplog.text
    assert "3 elements" in caplog.text
