"""Bugs in the scheduler's core: one met during validation fails that request alone, a later one ends the process."""

from collections.abc import Callable
from typing import Any

import pytest

from paramserver.core.scheduler import io, run_desk, worker_desk
from paramserver.core.scheduler.gate import Gate
from paramserver.core.scheduler.models import Model
from paramserver.core.scheduler.tasks import Dataset, DatasetSpec
from paramserver.core.spec import ModelSpec
from paramserver.errors import InternalError

from .scheduling import SPEC, Driver


class Bug(Exception):
    """An unexpected exception."""


def fails(*args: Any, **kwargs: Any) -> Any:
    """Replacement for a function of the core that has a bug."""
    raise Bug


def register(n: int) -> io.Event:
    return io.RegisterDataset(n, "m", "train", 100, 10)


LOOKS: list[tuple[Any, str, Callable[[int], io.Event]]] = [
    (ModelSpec, "parse", lambda n: io.CreateModel(n, SPEC | {"name": "other"}, "x")),
    (ModelSpec, "patched", lambda n: io.PatchModel(n, "m", {"optimizer": {"lr": 0.5}})),
    (run_desk, "check_run", lambda n: io.CreateRun(n, "m", "digits:train")),
    (DatasetSpec, "check", register),
    (worker_desk, "check_metrics", lambda n: io.ReportMetrics(n, "m", {"loss": 1.0})),
]


@pytest.mark.parametrize(("where", "name", "make"), LOOKS, ids=[name for _, name, _ in LOOKS])
def test_a_request_that_meets_a_bug_as_it_is_looked_at_is_refused_alone(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, make: Callable[[int], io.Event]
) -> None:
    """A bug met in validation gets InternalError with it as cause; nothing is stored, and a repetition can succeed."""
    d = Driver.with_model()
    before = dict(d.hash)
    with monkeypatch.context() as broken:
        broken.setattr(where, name, fails)
        with pytest.raises(InternalError) as met:
            d.ask(make)

    assert isinstance(met.value.__cause__, Bug)
    assert d.hash == before
    again = d.send(make)
    d.beats()
    assert d.result(again) is not None


LATER: list[tuple[Any, str, io.Event]] = [
    (Gate, "change", io.PatchModel(1000, "m", {"consistency": {"mode": "buffered"}})),
    (Dataset, "release", io.LeaveWorker(1000, "m", "m/a")),
    (Model, "forget", io.RequestGone(1000)),
]


@pytest.mark.parametrize(("where", "name", "event"), LATER, ids=[name for _, name, _ in LATER])
def test_a_bug_that_may_have_left_something_half_decided_is_not_kept_quiet(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, event: io.Event
) -> None:
    """A bug met after validation is raised by `handle`, so that the process ends, even if nothing was to be stored yet.

    See `Runtime.send`.
    """
    d = Driver.with_model()
    d.join("a")
    d.ask(register)
    monkeypatch.setattr(where, name, fails)
    with pytest.raises(Bug):
        d.core.handle(event, d.now)
