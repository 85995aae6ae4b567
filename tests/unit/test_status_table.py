"""The table that `psctl status` prints."""

import io
from typing import Any

import pytest
from rich.console import Console

from paramserver_cli.status import table

CLUSTER = {"state": "ok", "redis": "ok", "uptime_s": 1.0, "problems": []}
NODE = {"role": "shard", "heartbeat_age_s": 1.0, "bytes": 0, "addresses": ["http://127.0.0.1:1"], "partitions": 0}
MODEL = {"mode": "sync", "state": "ready", "version": 3, "clock": 3, "pushes_per_s": 0.0, "lag": None}


def printed(
    *, nodes: list[dict[str, Any]] | None = None, models: list[dict[str, Any]] | None = None, width: int = 300
) -> str:
    """Return the table of a cluster with these nodes and models, by default too wide for line breaks."""
    found = {"cluster": CLUSTER, "nodes": nodes or [], "models": models or [], "runs": []}
    out = Console(width=width, file=io.StringIO())
    out.print(table(found))
    return str(out.file.getvalue())  # type: ignore[attr-defined]  # the StringIO above


def model(*waiting_for: str) -> dict[str, Any]:
    """Return a synchronous model that waits for these."""
    empty: dict[str, Any] = {"workers": [], "latest": {}, "not_finite": {}, "moving": []}
    return {**MODEL, **empty, "name": "m", "waiting_for": list(waiting_for)}


@pytest.mark.parametrize("waited", [["2 more workers to join"], ["job/slow", "other"]])
def test_who_is_waited_for_stands_in_the_status(waited: list[str]) -> None:
    """The status names what a synchronous model waits for, and says nothing if it waits for nothing."""
    assert f"! m waits for {', '.join(waited)}" in printed(models=[model(*waited)])
    assert "waits" not in printed(models=[model()])


def test_of_many_who_are_waited_for_only_some_are_named() -> None:
    """Of a thousand workers that are waited for only eight are named, with the number of the others."""
    text = printed(models=[model(*(f"w{i}" for i in range(1000)))])
    assert "w7 and 992 more" in text
    assert "w8" not in text


def test_of_many_problems_only_some_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a problem of each of a thousand models eight are printed, with the number of the others, above the tables."""
    monkeypatch.setitem(CLUSTER, "problems", [f"Model m{i}: being loaded" for i in range(1000)])
    lines = [line.rstrip() for line in printed().splitlines() if line.startswith("!")]
    assert lines == [*(f"! Model m{i}: being loaded" for i in range(8)), "! and 992 more"]


def test_workers_that_left_or_died_are_not_counted() -> None:
    """The number of a model's workers is that of the live ones, however the others ended."""
    states = {"active": True, "resting": True, "left": False, "dead": False}
    workers = [{"state": state, "alive": alive} for state, alive in states.items()]
    line = printed(models=[{**model(), "workers": workers}]).splitlines()[-1]
    assert line.split()[-1] == "2"


def test_a_metric_that_is_no_number_is_told() -> None:
    """A metric whose newest value is NaN or infinite is shown as that, whether or not it ever had a number."""
    latest = {"accuracy": (1.0, 0.5), "loss": (1.0, 0.25)}
    bad = {"loss": (1.0, "m/a"), "norm": (1.0, "m/a")}
    line = printed(models=[{**model(), "latest": latest, "not_finite": bad}]).splitlines()[-1]
    assert line.rstrip().endswith("accuracy 0.5  loss NaN or inf  norm NaN or inf")


@pytest.mark.parametrize(("state", "alive", "shown"), [("left", False, "left"), ("idle", False, "dead")])
def test_who_left_in_good_order_is_not_called_dead(state: str, alive: bool, shown: str) -> None:
    """A shard that was stopped is shown as left, one whose heartbeats stopped as dead."""
    (line,) = [
        x
        for x in printed(nodes=[{**NODE, "name": "n", "state": state, "alive": alive}]).splitlines()
        if "n " in x and "1.0 s" in x
    ]
    assert line.split()[1] == shown


def test_names_are_whole_in_a_narrow_terminal() -> None:
    """In 40 columns the names of nodes and models are whole; what does not fit is cut elsewhere."""
    nodes = [{**NODE, "name": f"shard-{i}", "state": "active", "alive": True} for i in (10, 11)]
    text = printed(nodes=nodes, models=[model() | {"name": "digits-torch-12"}], width=40)
    assert all(name in text for name in ("shard-10", "shard-11", "digits-torch-12"))


def test_names_are_in_the_order_of_their_numbers() -> None:
    """Shard 10 comes after shard 2, and model 10 after model 2; the leading scheduler stays the first one."""
    of_schedulers = [{"role": "scheduler", "name": "z", "state": "active"}, {"role": "scheduler", "name": "a"}]
    of_shards = [{"name": f"shard-{i}"} for i in (1, 10, 2)]
    nodes = [NODE | {"state": "active", "alive": True} | n for n in [*of_schedulers, *of_shards]]
    text = printed(nodes=nodes, models=[model() | {"name": f"m-{i}"} for i in (1, 10, 2)])
    first = [line.split()[0] for line in text.splitlines() if line.strip()]
    names = ["z", "a", "shard-1", "shard-2", "shard-10", "m-1", "m-2", "m-10"]
    assert [name for name in first if name in names] == names
