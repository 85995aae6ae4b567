"""What the processes of `psctl up` are told, and what is told of one that said nothing."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import certifi
import pytest

from paramserver_cli import children, launch, ports, supervisor
from paramserver_cli.children import ChildSpec, Guard
from paramserver_cli.launch import Failed
from paramserver_cli.processes import Processes
from paramserver_cli.state_directory import Phase, Plan, StateDir, SupervisorState
from paramserver_node import tokens

from . import virtual_time


@pytest.mark.parametrize(("host", "advertised"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", socket.gethostname())])
@pytest.mark.parametrize("schedulers", [1, 2])
def test_no_two_nodes_advertise_one_url(
    host: str, advertised: str, schedulers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PARAMSERVER_ADVERTISE is the URL of a single scheduler; each shard, or one of several schedulers, has its own."""
    monkeypatch.setenv("PARAMSERVER_ADVERTISE", "http://cluster.example:8700")
    state, block = StateDir(tmp_path), ports.reserve(2, schedulers=schedulers)
    with block.lock:
        state.make()
        found = Processes(state, Plan(host=host, insecure=True, schedulers=schedulers), block)
        specs = [*found.shard_specs(), *(found.scheduler_specs() if schedulers > 1 else ())]
        told = [spec.argv[spec.argv.index("--advertise") + 1] for spec in specs]
        alone = found.scheduler_specs()[0].argv

    own = [block.shard(0), block.shard(1), *(block.schedulers if schedulers > 1 else ())]
    assert told == [f"http://{advertised}:{port}" for port in own]
    assert ("--advertise" in alone) == (schedulers > 1)


def test_a_supervisor_that_ended_without_a_word_is_told_with_a_likely_cause(tmp_path: Path) -> None:
    """On a full disk the supervisor can write neither its state nor a log; `up` names the log and asks for the disk."""
    state = StateDir(tmp_path)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended, pytest.raises(Failed, match=r"log: is the disk full\?"):
        launch.wait_ready(launch.Launched(state, ended, None))


def test_a_shard_that_is_scaled_away_and_back_while_it_is_down_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that the plan loses and regains while its restart is held back is started once, not twice.

    Of two under one name and port, one could never run, and the supervisor failed when the other ended.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: Any) -> subprocess.Popen[bytes]:
        started.append(children.start(*args))
        return started[-1]

    monkeypatch.setattr(supervisor, "start", start)
    monkeypatch.setattr(Processes, "redis_specs", lambda _: [])
    monkeypatch.setattr(Processes, "scheduler_specs", lambda _: [])
    idle = [ChildSpec(f"shard-{i}", "shard", ["sleep", "60"]) for i in range(2)]
    monkeypatch.setattr(Processes, "shard_specs", lambda processes: idle[: processes.plan.shards])
    state, block, guard = StateDir(tmp_path), ports.reserve(2), Guard()
    state.make()
    lock = state.lock()
    assert lock is not None
    cluster = supervisor.Supervisor(Processes(state, Plan(shards=2), block), guard, lock.fileno())

    async def until(happened: Callable[[], bool]) -> None:
        while not happened():
            await asyncio.sleep(0.01)

    async def resize(shards: int) -> None:
        state.write(Plan(shards=shards))
        cluster.plan_changed.set()
        await until(lambda: cluster.processes.plan.shards == shards)

    async def scale_while_down() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(cluster.run())
            await until(lambda: cluster.phase == "ready" and len(cluster.alive) == 2)
            cluster.alive["shard-1"].kill()
            await until(lambda: "shard-1" not in cluster.alive)
            await resize(1)
            await resize(2)
            assert "shard-1" not in cluster.alive, "the restart is still held back"
            await asyncio.sleep(10 * supervisor.BACKOFF_MAX_S)
            assert [child.poll() is None for child in started] == [True, False, True]
            cluster.stop.set()

    with closing(guard), closing(block.lock), closing(lock):
        virtual_time.run(scale_while_down())
    assert cluster.restarts == {"shard-1": 1}


@pytest.mark.parametrize(
    ("phase", "error", "says"),
    [
        ("ready", "", "may not be stored"),
        ("stopping", "", "may not be stored"),
        ("stopped", "", ""),
        ("stopped", "shard-0 ended with 1", "shard-0 ended with 1"),
    ],
)
def test_only_a_supervisor_that_ended_by_itself_has_stored_everything(
    tmp_path: Path, phase: Phase, error: str, says: str
) -> None:
    """`psctl down` says that something may be lost if the supervisor was killed, also while it stopped the shards."""
    state = StateDir(tmp_path)
    state.write(SupervisorState(7, phase, error=error))
    said = launch.not_stored(state)
    assert (says in said) if says else not said


@pytest.mark.parametrize(
    ("settings", "secret", "url", "told"),
    [
        ('[client]\ntoken = "mine"\nca = "CA"', "", "https://there:1", ("mine", "CA")),
        (
            '[client]\ntoken = "mine"\nca = "CA"\n[worker]\ntoken = "own"\nca = "CA"',
            "",
            "https://there:1",
            (None, None),
        ),
        ('token = "mine"\nca = "CA"', "", "https://there:1", (None, None)),  # theirs, too
        ('[client]\ntoken = "mine"\nca = "CA"', tokens.new_key(), "http://there:1", ("mine", None)),
        ("", tokens.new_key(), "http://there:1", ("ps1.worker", None)),
        ('[client]\ntoken = "theirs"\nca = "CA"', tokens.new_key(), None, ("ps1.worker", None)),
        ('token = "theirs"', tokens.new_key(), None, ("ps1.worker", None)),
        ('[client]\ntoken = "theirs"\nca = "CA"', "", None, (None, None)),
    ],
    ids=["client's", "their own", "everybody's", "without TLS", "by a secret", "ours", "ours alone", "ours, open"],
)
def test_workers_get_what_lets_psctl_itself_in(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: str,
    secret: str,
    url: str | None,
    told: tuple[str | None, str | None],
) -> None:
    """The workers that psctl starts get the token and the `ca` of `[client]`, unless they have some of their own.

    They were refused without end. Workers of psctl's own cluster get nothing that is meant for another one.
    """
    for name in ("PARAMSERVER_TOKEN", "PARAMSERVER_CA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    file = certifi.where()
    (tmp_path / "paramserver.toml").write_text(settings.replace("CA", file))
    state, block = StateDir(tmp_path / "state"), ports.reserve(3)
    state.make()
    if secret:
        state.secret_file.write_text(secret)
    with block.lock:
        (spec,) = Processes(state, Plan(workers=1, scheduler=url), block).worker_specs()
    token, ca = spec.env.get("PARAMSERVER_TOKEN"), spec.env.get("PARAMSERVER_CA")
    assert (token and token[:10], ca and ca.replace(file, "CA")) == told
