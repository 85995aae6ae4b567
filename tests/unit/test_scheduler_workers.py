"""What the scheduler keeps of workers, and what it asks of them."""

from typing import Any

from paramserver.core import scheduler_io as io

from .scheduling import Driver


def beat(d: Driver, worker: Any, **fields: Any) -> Any:
    """The answer to that worker's heartbeat."""
    return d.ask(lambda n: io.WorkerHeartbeat(n, "m", worker["worker"], worker["epoch"], **fields))


def test_a_model_named_like_an_ended_run_has_workers_of_its_own() -> None:
    """Only workers of the model that the run trained are asked to stop."""
    d = Driver()
    d.model()
    d.ask(lambda n: io.CreateRun(n, "m", "paramserver.examples.digits:train"))
    theirs = d.join("run-1/w0")
    d.ask(lambda n: io.PatchRun(n, "run-1", state="stopped"))
    d.model(name="run-1")
    own = d.ask(lambda n: io.JoinWorker(n, "run-1"))

    heard = d.ask(lambda n: io.WorkerHeartbeat(n, "run-1", own["worker"], own["epoch"]))

    assert own["worker"] == theirs["worker"]
    assert (heard["state"], beat(d, theirs)["state"]) == ("active", "stop")
