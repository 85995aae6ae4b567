"""`ParameterServerOptimizer` and the learning rate: which worker sends it, and what happens if it cannot be sent."""

import importlib.util
from typing import Any

import pytest
from tests.waiting import eventually

import paramserver as ps

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch: pip install torch==2.13.0", allow_module_level=True)

from torch import nn

from paramserver.errors import problem
from paramserver.net.calls import Response, error_of
from paramserver.torch import ParameterServerOptimizer, optimizer

pytestmark = pytest.mark.process


def module() -> nn.Module:
    """A module of one layer."""
    return nn.Linear(2, 1)


def test_a_learning_rate_that_was_refused_is_told_again(client: ps.Client, name: str) -> None:
    """A learning rate that the cluster refused is sent again by the next step, which fails like the first."""
    with ParameterServerOptimizer(module(), client.model(name), ps.SGD(0.05)) as opt:
        opt.param_groups[0]["lr"] = -1.0
        for _ in range(2):
            with pytest.raises(ps.RequestError, match="lr"):
                opt.step()


def test_the_first_of_the_live_workers_sets_the_learning_rate(client: ps.Client, name: str) -> None:
    """The worker of the lowest live rank passes the rate on; once it has left, the next one does, also what is due."""

    def rate() -> Any:
        return model.info()["spec"]["optimizer"]["lr"]

    model = client.model(name)
    with ParameterServerOptimizer(module(), model, ps.SGD(0.5), rank=3) as third:
        third.param_groups[0]["lr"] = 0.4
        third.step()
        assert rate() == 0.4

        with ParameterServerOptimizer(module(), model, ps.SGD(0.3), rank=1) as first:
            first.step()
            assert rate() == 0.3
            eventually(lambda: not third.worker.first, what="the news of another worker")
            third.param_groups[0]["lr"] = 0.2
            third.step()
            assert rate() == 0.3

        eventually(lambda: third.worker.first, what="the news that it has left")
        third.step()
        assert rate() == 0.2


def test_a_worker_that_may_not_set_the_rate_trains_on(
    client: ps.Client, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that takes over the rate with a token that does not allow it says so once, and trains at the present."""

    def forbidden(**_: Any) -> Any:
        raise problem("forbidden", "the token's role is worker")

    with ParameterServerOptimizer(module(), client.model(name), ps.SGD(0.5), rank=1) as opt:
        monkeypatch.setattr(opt.model, "set", forbidden)
        for rate in (0.4, 0.3):
            opt.param_groups[0]["lr"] = rate
            opt.step()
        assert opt.worker.clock_number == 2
    (said,) = [r.getMessage() for r in caplog.records if "model.rate_stays" in r.getMessage()]
    assert "worker" in said


def test_a_page_does_not_take_the_rate_from_a_worker(
    client: ps.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose new rate a proxy refuses for itself sends it later, as after an outage."""
    with ParameterServerOptimizer(module(), client.model(name), ps.SGD(0.5), rank=1) as opt:
        scheduler = Scheduler(opt, monkeypatch, error_of(Response(401, {}, b"<html>")))
        for scheduler.now_s, scheduler.away in ((100.0, True), (200.0, False)):
            opt.param_groups[0]["lr"] = 0.4
            opt.step()
        assert [rate for rate, _ in scheduler.asked] == [0.4, 0.4]


class Scheduler:
    """What `Model.set` asks: notes the rates and timeouts that it is given, and is `away` for a while."""

    def __init__(
        self, opt: ParameterServerOptimizer, monkeypatch: pytest.MonkeyPatch, error: ps.PsError | None = None
    ) -> None:
        self.now_s, self.away = 0.0, True
        self.error = error or problem("no_leader", "nobody leads")
        self.asked: list[tuple[float, float | None]] = []
        monkeypatch.setattr(opt.model, "set", self._set)
        monkeypatch.setattr(optimizer, "monotonic", lambda: self.now_s)

    def _set(self, *, lr: float, timeout: float | None) -> None:
        self.asked.append((lr, timeout))
        if self.away:
            raise self.error


@pytest.mark.parametrize("timeout", [None, 0.5])
def test_training_goes_on_while_a_rate_cannot_be_sent(
    client: ps.Client, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, timeout: float
) -> None:
    """Without a scheduler a step in async tries to send the rate only briefly and from time to time, and says so once.

    Once there is one, the rate of that moment is sent.
    """
    with ParameterServerOptimizer(module(), client.model(name), ps.SGD(0.5), timeout=timeout) as opt:
        scheduler = Scheduler(opt, monkeypatch)
        for i, rate in enumerate((0.4, 0.3, 0.2, 0.1)):
            scheduler.now_s = 100.0 + 4.0 * i
            opt.param_groups[0]["lr"] = rate
            opt.step()
        assert scheduler.asked == [(0.4, timeout or 1.0), (0.1, timeout or 1.0)]
        assert opt.worker.clock_number == 4

        scheduler.away = False
        scheduler.now_s += 20.0
        for _ in range(2):
            opt.step()
        assert [rate for rate, _ in scheduler.asked] == [0.4, 0.1, 0.1]

        scheduler.away = True
        for rate, at_s in ((0.2, 200.0), (0.1, 300.0)):  # the second one may have to undo the first
            scheduler.now_s, opt.param_groups[0]["lr"] = at_s, rate
            opt.step()
        assert [rate for rate, _ in scheduler.asked[3:]] == [0.2, 0.1]
    said = [r.getMessage() for r in caplog.records if "model.rate_waits" in r.getMessage()]
    assert said == [f"model.rate_waits model={name}: the new learning rate is sent once that works: nobody leads"] * 2


def test_in_sync_a_step_whose_rate_cannot_be_sent_fails(
    client: ps.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In sync, where a rate is for all workers from one clock on, a step that cannot send it fails before its push."""
    model = client.model(name)
    with ParameterServerOptimizer(module(), model, ps.SGD(0.5), consistency=ps.Sync(), timeout=9.0) as opt:
        scheduler = Scheduler(opt, monkeypatch)
        opt.param_groups[0]["lr"] = 0.4
        with pytest.raises(ps.Unavailable, match="nobody leads"):
            opt.step()
        assert (scheduler.asked, opt.worker.clock_number) == ([(0.4, 9.0)], 0)
