"""When the scheduler's core has checkpoints written, which of them stay, and what a restore makes."""

from paramserver.core import scheduler_io as io
from paramserver.errors import PsError
from paramserver.types import ModelKey

from .scheduling import SPEC, Driver, code

SYNC = {"consistency": {"mode": "sync"}}


def finish(d: Driver) -> io.WriteCheckpoint:
    """Completes the checkpoint that is being written."""
    effect = next(w for w in d.work if isinstance(w, io.WriteCheckpoint))
    d.work.remove(effect)
    d.do(io.CheckpointWritten(effect.model, effect.name, 10, [0, 0, 0, 0], "/x"))
    return effect


def test_checkpoints_in_sync_are_of_one_clock() -> None:
    """In a training: of the next cut; standing still: of the present clock, and commits wait meanwhile."""
    d = Driver()
    d.model(**SYNC)
    a = d.join("a")
    d.clock(a, 1)
    d.beats()
    d.clock(a, 2)
    asked = d.send(lambda n: io.RequestCheckpoint(n, "m", "mine"))
    d.clock(a, 3)
    assert not d.work
    d.clock(a, 4)
    d.beats()
    assert finish(d).cut == 3
    assert d.result(asked)["clock"] == 3
    d.send(lambda n: io.RequestCheckpoint(n, "m"))
    d.wait(1.5)
    parked = d.clock(a, 5)
    assert parked in d.open
    effect = finish(d)
    assert (effect.cut, effect.document["clock"]) == (None, 4)
    assert d.result(parked)["released"]


def test_the_last_and_the_best_checkpoints_stay() -> None:
    """keep 2 and the best by metric; one named by a user is never removed."""
    d = Driver()
    d.model(checkpoint={"every_clocks": 10, "keep": 2})
    a = d.join("a")
    d.send(lambda n: io.RequestCheckpoint(n, "m", "mine"))
    finish(d)
    for i, accuracy in enumerate((0.5, 0.9, 0.6, 0.7, 0.8)):
        d.ask(lambda n, v=accuracy: io.ReportMetrics(n, "m", {"accuracy": v}))  # type: ignore[misc]
        d.clock(a, 10 * (i + 1))
        finish(d)
    names = [c["name"] for c in d.core.read.checkpoints("m")]
    assert [n.split("-")[-1] for n in names] == ["mine", "20", "40", "50"]
    assert len([w for w in d.work if isinstance(w, io.RemoveCheckpoint)]) == 2


def test_a_restore_under_a_new_name_is_ready_when_it_is_finished() -> None:
    """Until then the model initializes; a failed one leaves nothing."""
    d = Driver()
    d.shard("s0")
    for error in (None, PsError("corrupt_state", "torn")):
        number = d.send(lambda n: io.CreateModel(n, SPEC | SYNC, "x", restore=True))
        d.beats()
        made = d.result(number)
        assert made["state"] == "initializing"
        key = ModelKey("m", made["generation"])
        done = d.send(lambda n, e=error, k=key: io.RestoreFinished(n, k, e))  # type: ignore[misc]
        if error is None:
            assert d.result(done)["state"] == "ready"
            assert d.commits()[-1]["cut"]
            d.ask(lambda n: io.DeleteModel(n, "m"))
        else:
            assert code(d, done) == "corrupt_state"
            assert not d.core.read.models()
