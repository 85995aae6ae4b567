"""What a worker reports with its heartbeats, its state and metrics, against a scripted scheduler."""

import numpy as np
import pytest

from paramserver.errors import ConflictError, NotFoundError

from .session_node import BEAT, deadline, joined, no, ok
from .sharding import drive


def test_state_is_sent_when_it_has_changed() -> None:
    """A worker's `state` is sent with the first heartbeat after a change, and not again."""
    node, session = joined()
    session.reports.state["seen"] = np.int64(7)

    for _ in range(2):
        drive(session.beat(deadline()), node)

    beats = node.bodies(BEAT)
    assert beats[0]["state"] == {"seen": 7}
    assert "state" not in beats[1]


def test_a_state_is_sent_until_it_is_stored() -> None:
    """A state that the scheduler says it may not have stored goes with the next heartbeat, too."""
    node, session = joined()
    session.reports.state["seen"] = 7
    node.script[BEAT] = [ok({"state": "active", "state_kept": kept}) for kept in (False, True)]

    for _ in range(3):
        drive(session.beat(deadline()), node)

    assert ["state" in b for b in node.bodies(BEAT)] == [True, True, False]


def test_a_refused_state_does_not_cost_the_lease(caplog: pytest.LogCaptureFixture) -> None:
    """A heartbeat whose state is refused is sent again without it; one warning is logged.

    The metrics are kept, and the state is not sent again.
    """
    node, session = joined()
    session.reports.state["seen"] = [0] * 3
    session.reports.note(0, 0, {"loss": 0.5})
    node.script[BEAT] = [no("invalid_field", where="state")]

    for _ in range(2):
        drive(session.beat(deadline()), node)

    said = [{k: v for k, v in b.items() if k in ("state", "metrics")} for b in node.bodies(BEAT)]
    assert said == [
        {"state": {"seen": [0, 0, 0]}, "metrics": [[0, {"loss": 0.5}]]},
        {"metrics": [[0, {"loss": 0.5}]]},
        {},
    ]
    assert ["state_not_kept" in r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [True]
    assert "refused" in caplog.text


def test_a_state_that_would_come_back_changed_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    """A state with integers beyond 64 bits is not sent, and one warning is logged.

    JSON parsers turn them into floats, from which a random generator cannot be restored.
    """
    node, session = joined()
    session.reports.state["random"] = np.random.default_rng(0).bit_generator.state

    for _ in range(2):
        drive(session.beat(deadline()), node)

    assert not any("state" in b for b in node.bodies(BEAT))
    assert caplog.text.count("beyond 64 bits") == 1


def test_a_refusal_that_names_no_part_leaves_one_out_after_the_other() -> None:
    """A heartbeat refused as malformed is sent again without the state, then also without the metrics."""
    node, session = joined()
    session.reports.state["seen"] = 7
    session.reports.note(0, 0, {"loss": 0.5})
    node.script[BEAT] = [no("malformed"), no("malformed")]

    drive(session.beat(deadline()), node)

    assert ["state" in b for b in node.bodies(BEAT)] == [True, False, False]
    assert ["metrics" in b for b in node.bodies(BEAT)] == [True, True, False]


def test_a_heartbeat_of_a_model_that_is_gone_is_not_repeated() -> None:
    """A heartbeat refused with unknown_model is not retried without its state, which the next heartbeat sends again."""
    node, session = joined()
    session.reports.state["seen"] = 7
    node.script[BEAT] = [no("unknown_model")]

    with pytest.raises(NotFoundError):
        drive(session.beat(deadline()), node)
    drive(session.beat(deadline()), node)

    assert [b["state"] for b in node.bodies(BEAT)] == [{"seen": 7}] * 2


def test_metrics_that_nobody_has_heard_go_with_the_next_heartbeat() -> None:
    """Metrics that a heartbeat could not deliver are sent with the next one."""
    node, session = joined("async")
    for clock in range(3):
        session.reports.note(0, clock, {"loss": float(clock)})
    node.script[BEAT] = [no("conflict")]

    with pytest.raises(ConflictError):
        drive(session.beat(deadline()), node)
    drive(session.beat(deadline()), node)

    assert [b["metrics"] for b in node.bodies(BEAT)] == [[[clock, {"loss": float(clock)}] for clock in range(3)]] * 2
    assert node.bodies("/models/m/metrics") == []


def test_a_report_sends_what_is_queued_first() -> None:
    """Metrics that are reported at once come after those that wait for a heartbeat, which goes without them."""
    node, session = joined("async")
    for clock in range(3):
        session.reports.note(0, clock, {"loss": float(clock)})
    node.script["/models/m/metrics"] = [ok({"accepted": 1}), no("conflict")]

    with pytest.raises(ConflictError):
        drive(session.report({"loss": 3.0}, deadline()), node)
    drive(session.report({"loss": 3.0}, deadline()), node)
    drive(session.beat(deadline()), node)

    assert [b["metrics"]["loss"] for b in node.bodies("/models/m/metrics")] == [0.0, 1.0, 1.0, 2.0, 3.0]
    assert "metrics" not in node.bodies(BEAT)[-1]


@pytest.mark.parametrize("heard", ["by the heartbeat", "by a push meanwhile", "by joining again"])
def test_metrics_of_before_a_rollback_are_not_reported_after_it(heard: str) -> None:
    """What was measured of values that are gone would else be the newest, by which checkpoints and runs are judged."""
    node, session = joined()
    for clock in range(3):
        session.reports.note(0, clock, {"accuracy": 0.9})
    node.script[BEAT] = [no("rolled_back", timeline=1, clock=0)]
    if heard == "by a push meanwhile":
        beating = session.beat(deadline())
        next(beating)  # it has taken the metrics
        drive(session.beat(deadline()), node)
        beating.close()
    elif heard == "by joining again":
        node.script[BEAT] = [no("fenced")]
        node.timeline = 1
        drive(session.beat(deadline()), node)
    else:
        drive(session.beat(deadline()), node)
    session.reports.note(0, 3, {"accuracy": 0.8})  # of a step that had begun before
    session.reports.note(1, 0, {"accuracy": 0.1})
    node.sent.clear()
    drive(session.beat(deadline()), node)

    assert node.bodies("/models/m/metrics") == []
    assert [body["metrics"] for body in node.bodies(BEAT)] == [[[0, {"accuracy": 0.1}]]]


class Tensor:
    """Like a torch tensor with several elements."""

    def item(self) -> float:
        """Raise what torch raises."""
        raise RuntimeError("a Tensor with 3 elements cannot be converted to Scalar")


def test_a_state_with_a_tensor_is_left_out_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """A warning says why a state with a tensor of several elements is left out.

    A state that another thread is just changing is left out without a warning.
    """
    node, session = joined("async")
    session.reports.state["best"] = Tensor()

    drive(session.beat(deadline()), node)

    (beat,) = node.bodies(BEAT)
    assert "state" not in beat
    assert "state_not_kept" in caplog.text
    assert "3 elements" in caplog.text


def test_a_loss_that_is_no_number_is_sent_as_null() -> None:
    """NaN and infinity are sent as null, in a report and with the heartbeat."""
    node, session = joined()
    session.reports.note(0, 0, {"loss": float("nan"), "accuracy": 0.5})

    drive(session.beat(deadline()), node)
    drive(session.report({"loss": float("inf"), "accuracy": None}, deadline()), node)

    assert node.bodies(BEAT)[0]["metrics"] == [[0, {"loss": None, "accuracy": 0.5}]]
    assert [b["metrics"] for b in node.bodies("/models/m/metrics")] == [{"loss": None}]
