"""What psctl remembers of a training that it follows."""

from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from paramserver.errors import problem
from paramserver_cli import train
from paramserver_cli.launch import Failed
from paramserver_cli.training import SAMPLES_MAX, Training


def test_a_training_of_days_takes_no_more_memory_than_one_of_an_hour() -> None:
    """A bounded number of samples is kept, evenly spaced from the first to the newest."""
    model = {"name": "m", "clock": 0, "pushes_per_s": 0.0, "lag": None, "series": [], "workers": []}
    versions = count()
    client: Any = SimpleNamespace(status=lambda timeout: {"models": [model | {"version": next(versions)}]})
    training = Training(client, "m", "sync")
    most = 0
    for newest in range(9 * SAMPLES_MAX):
        training.poll()
        assert training.last is not None
        assert training.last.version == newest
        most = max(most, len(training.samples))

    kept = [s.version for s in training.samples]
    assert most == SAMPLES_MAX
    assert kept[0] == 0
    gaps = [b - a for a, b in pairwise(kept[:-1])]
    assert max(gaps) <= 2 * min(gaps)


def test_a_training_is_followed_through_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """While no scheduler answers, `psctl train` does not end, and with it its workers, who may train on."""
    monkeypatch.setattr(train, "POLL_S", 0.0)
    away = [problem("unreachable", "cannot reach http://127.0.0.1:1")] * 3

    def get_run(run: str, **_: Any) -> dict[str, Any]:
        if away:
            raise away.pop()
        return {"id": run, "state": "finished", "reason": "every worker has finished"}

    client: Any = SimpleNamespace(url="http://127.0.0.1:1", get_run=get_run, status=lambda timeout: {"models": []})
    state: Any = SimpleNamespace(supervisor=lambda: None)
    assert train._follow(client, "run-1", Training(client, "m", "m"), state)["state"] == "finished"
    assert away == []


@pytest.mark.parametrize("state", ["failed", "stopped"])
def test_a_training_that_somebody_stopped_is_not_done(state: str) -> None:
    """If its run failed, or was stopped by the page or another psctl, `psctl train` exits with 1 and says why."""
    training = Training(SimpleNamespace(), "m", "m")  # type: ignore[arg-type]  # it has polled nothing
    with pytest.raises(Failed, match=f"run-1 {state}: it was asked to"):
        train._report({"id": "run-1", "state": state, "reason": "it was asked to"}, training)
