"""What psctl status prints of a cluster's status."""

import io
from typing import Any

import pytest
from rich.console import Console

from paramserver_cli.status import table

CLUSTER = {"state": "ok", "redis": "ok", "uptime_s": 1.0, "problems": []}
NODE = {"role": "shard", "heartbeat_age_s": 1.0, "bytes": 0, "addresses": ["http://127.0.0.1:1"], "partitions": 0}
MODEL = {"mode": "sync", "state": "ready", "version": 3, "clock": 3, "pushes_per_s": 0.0, "lag": None}


def printed(*, nodes: list[dict[str, Any]] | None = None, models: list[dict[str, Any]] | None = None) -> str:
    """The table of a cluster with these nodes and models, without line breaks of a narrow terminal."""
    found = {"cluster": CLUSTER, "nodes": nodes or [], "models": models or [], "runs": []}
    out = Console(width=300, file=io.StringIO())
    out.print(table(found))
    return str(out.file.getvalue())  # type: ignore[attr-defined]  # the StringIO above


def model(*waiting_for: str) -> dict[str, Any]:
    """A synchronous model whose workers wait for these."""
    return {**MODEL, "name": "m", "workers": [], "series": [], "moving": [], "waiting_for": list(waiting_for)}


@pytest.mark.parametrize("waited", [["2 more workers to join"], ["job/slow", "other"]])
def test_who_is_waited_for_stands_in_the_status(waited: list[str]) -> None:
    """That is the first question where a synchronous training stands still; where nobody is, nothing is said."""
    assert f"! m waits for {', '.join(waited)}" in printed(models=[model(*waited)])
    assert "waits" not in printed(models=[model()])


def test_of_many_who_are_waited_for_only_some_are_named() -> None:
    """A thousand workers do not fill the terminal."""
    text = printed(models=[model(*(f"w{i}" for i in range(1000)))])
    assert "w7 and 992 more" in text
    assert "w8" not in text


@pytest.mark.parametrize(("state", "alive", "shown"), [("left", False, "left"), ("idle", False, "dead")])
def test_who_left_in_good_order_is_not_called_dead(state: str, alive: bool, shown: str) -> None:
    """A shard that was stopped needs nobody's care; one whose heartbeats stopped does."""
    (line,) = [
        x
        for x in printed(nodes=[{**NODE, "name": "n", "state": state, "alive": alive}]).splitlines()
        if "n " in x and "1.0 s" in x
    ]
    assert line.split()[1] == shown
