"""Which member of the pool gets which place of a run."""

from .scheduling import Driver
from .training_runs import beat, done, member, run, state


def test_a_place_whose_function_raised_goes_to_another_idle_member() -> None:
    """A member at which the function raises each time, as on a broken machine, fails no run while others are idle."""
    d = Driver.with_model()
    bad, good = member(d, "bad"), member(d, "good")
    run(d)
    assert beat(d, bad)["state"] == "assigned"
    done(d, bad, error="Traceback: no GPU here")
    assert beat(d, bad)["state"] == "idle"
    assert beat(d, good)["run"]["attempt"] == 1
    done(d, good, error="Traceback")
    assert beat(d, bad)["state"] == "assigned"
    assert state(d)[0] == "running"
