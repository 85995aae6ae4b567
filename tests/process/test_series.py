"""`psctl run series` starts run after run, even if the leading scheduler or psctl itself is killed."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import eventually

import paramserver as ps
from paramserver import limits
from paramserver.errors import ConflictError
from paramserver_cli.series import Series, numbers

from .cluster import PSCTL, Cluster, cluster
from .prepared import prepared

pytestmark = [pytest.mark.process, pytest.mark.slow]

SHORT = ["--modes", "async,sync", "--minutes", "0.02", "--keep", "2", "--workers", "2", "--evaluate-every", "0"]


@contextmanager
def series(url: str, *args: str) -> Iterator["subprocess.Popen[str]"]:
    """Run `psctl run series` with short runs, and kill it at the end of the block if it still runs."""
    argv = [*PSCTL, "run", "series", *SHORT, *args, "--url", url]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def of(client: ps.Client, name: str, keep: int = 1, **spec: Any) -> Series:
    """Return a series of models NAME-1, NAME-2, … whose runs no worker takes."""
    spec = {"params": {"w": {"shape": [2]}}, **spec}
    return Series(client, name, "a.b:c", spec, ("async",), minutes=1.0, keep=keep, workers=1, evaluate_every=0)


def models(client: ps.Client, name: str) -> list[str]:
    """Names of the models of a series."""
    return [m for m in client.models() if m.startswith(f"{name}-")]


def trained(client: ps.Client, model: str) -> None:
    """Create a model whose only run has had a worker, and has ended."""
    made = client.create_model(model, {"w": (2,)}, checkpoint={"every_clocks": 1})
    run = client.create_run(model, "a.b:c")["id"]
    with made.worker(f"{run}/w0") as worker:
        worker.step({"w": [1.0, 1.0]})
    client.set_run(run, state="stopped")


def ended(client: ps.Client) -> int:
    """Number of runs in state `finished`."""
    return sum(r["state"] == "finished" for r in client.runs())


def test_only_names_with_a_number_belong_to_a_series() -> None:
    """Only models called NAME-N, with N written without leading zeros, belong to a series."""
    assert numbers(
        "digits", ["digits-10", "digits-9", "digits-x", "my-digits-3", "digits-010", "digits", "digits-1-2"]
    ) == [9, 10]


def test_a_series_goes_on_over_deaths_and_keeps_the_newest_models(tmp_path: Path) -> None:
    """A series alternates modes, prunes old models, reuses no number, and survives kills of the leader and of psctl."""
    with cluster(tmp_path / "state", args=("--workers", "2", "--schedulers", "2")) as running:
        url = ",".join(running.info.get("schedulers") or [running.url])
        client = ps.connect(url, timeout=60.0)
        client.create_model("digits-x", {"w": (2,)})  # a user's model, not of the series
        with series(url) as process:
            eventually(lambda: ended(client) >= 2, within_s=60.0, what="two runs")
            running.kill("scheduler")
            before = ended(client)
            eventually(lambda: ended(client) > before, within_s=60.0, what="a run after the leader's death")
            process.kill()
        live = next((r["id"] for r in client.runs() if r["state"] in ("waiting", "running")), None)
        with series(url) as process:
            before = ended(client)
            eventually(lambda: ended(client) > before, within_s=60.0, what="a run after the series' death")
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=20)
        assert process.returncode == 0, out
        if live is not None:
            assert client.get_run(live)["state"] == "finished"
        trained = [r["model"] for r in client.runs()]
        assert len(trained) == len(set(trained)) == max(numbers("digits", trained)) >= 4
        left = client.models()
        assert "digits-x" in left
        assert 1 <= len(numbers("digits", left)) <= 3  # --keep, plus one if it ended before deleting
        for n in numbers("digits", left):
            spec = client.model(f"digits-{n}").info()["spec"]
            assert spec["consistency"]["mode"] == ("async", "sync")[(n - 1) % 2]


def test_a_run_whose_model_is_deleted_gives_way_to_the_next(client: ps.Client) -> None:
    """Deleting the model of a series' current run stops that run, and the series starts the next one.

    While the run waits for workers, the series says so.
    """
    with series(client.url, "--name", "next", "--minutes", "5") as process:  # there are no workers, so the run waits
        assert process.stdout is not None
        assert "trains model next-1" in process.stdout.readline()
        assert "paramserver-worker" in process.stdout.readline()
        client.model("next-1").delete()

        eventually(lambda: "next-2" in client.models(), what="the next model")

    states = {r["model"]: r["state"] for r in client.runs()}
    assert states["next-1"] == "stopped"
    client.model("next-2").delete()  # and its run, which a worker of another test would take


def test_a_model_goes_with_its_checkpoints_but_for_those_with_a_name(
    shared_cluster: Cluster, client: ps.Client
) -> None:
    """With an old model a series deletes the checkpoints that were written by rule, not those that a user has named.

    Nothing else would: they filled the disk.
    """
    folder = shared_cluster.state_dir / "checkpoints" / "saved-1"
    trained(client, "saved-1")
    eventually(lambda: client.model("saved-1").checkpoints(), what="a checkpoint by rule")
    client.request("POST", "/models/saved-1/checkpoints", {"name": "mine"})
    trained(client, "saved-2")
    assert len(list(folder.iterdir())) >= 2

    assert of(client, "saved").prune() == ["saved-1"]

    assert models(client, "saved") == ["saved-2"]
    assert [f.name for f in folder.iterdir()] == ["mine"]


def test_a_series_makes_room_before_it_creates_a_model(client: ps.Client) -> None:
    """A model that does not fit beside those that a series keeps is created once the oldest of them is deleted.

    The newest stays until its successor exists.
    """
    for model in ("room-1", "room-2", "room-3"):
        trained(client, model)
    large = {"w": {"shape": [1 << 20, 1 << 16]}}
    for keep, left in ((3, ["room-2", "room-3"]), (1, ["room-3"])):
        with pytest.raises(ConflictError, match="free"):
            of(client, "room", keep, params=large).start()
        assert models(client, "room") == left

    of(client, "room").start()

    assert models(client, "room") == ["room-3", "room-4"]


def test_a_model_whose_run_is_forgotten_is_still_one_of_the_series(client: ps.Client) -> None:
    """The cluster keeps 200 runs; models that older ones have trained are deleted all the same, and not trained again.

    A user's model of such a name, which no run has trained, stays.
    """
    for model in ("old-1", "old-3"):
        trained(client, model)
    client.create_model("old-2", {"w": (2,)})
    client.create_model("other", {"w": (2,)})
    for _ in range(limits.RUNS_KEPT_MAX):
        client.set_run(client.create_run("other", "a.b:c")["id"], state="stopped")
    assert not [r for r in client.runs() if r["model"] in ("old-1", "old-3")]
    series = of(client, "old")

    assert series.start()["model"] == "old-4"
    assert series.prune() == ["old-3"]

    assert models(client, "old") == ["old-2", "old-4"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--modes", "async,fast"], "fast"), (["mine.job:train"], "--spec"), (["--name", "a b"], "a b")],
)
def test_what_cannot_begin_is_refused(arguments: list[str], text: str) -> None:
    """An unknown mode, a function without a spec or an invalid name is refused before the cluster is contacted."""
    env = os.environ | {"PARAMSERVER_URL": "http://127.0.0.1:9"}

    done = prepared().run(["run", "series", *arguments], env, 60.0)

    assert done.returncode in (2, 4)
    assert text in done.stderr
