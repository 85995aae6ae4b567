"""The supervisor of a cluster, and its locks, on a machine where something is missing."""

import asyncio
import errno
import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from paramserver_cli import ports
from paramserver_cli.children import ChildSpec, Guard
from paramserver_cli.processes import Processes
from paramserver_cli.state_directory import Plan, StateDir
from paramserver_cli.supervisor import Supervisor

from . import virtual_time


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    """A supervisor of nothing yet, whose cluster counts as ready."""
    state, guard, block = StateDir(tmp_path / "state"), Guard(), ports.reserve(1)
    lock = state.lock()
    assert lock is not None
    with lock, closing(guard), closing(block.lock):
        found = Supervisor(Processes(state, Plan(shards=1), block), guard, lock.fileno())
        found.phase = "ready"
        yield found


async def run_once(supervisor: Supervisor, command: list[str]) -> None:
    """Run a worker until its end is noticed."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(supervisor.run_child(ChildSpec("worker-0", "worker", command)))
        while not supervisor.restarts:
            await asyncio.sleep(0.05)
        supervisor.stop.set()


def test_a_process_that_cannot_be_started_is_tried_again(supervisor: Supervisor, tmp_path: Path) -> None:
    """A restart that fails, as while `.venv` is rebuilt, is repeated; the rest of the cluster runs on.

    The whole cluster was killed, and nothing was stored.
    """
    program = tmp_path / "program"

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run_once(supervisor, [str(program)]))
            await asyncio.sleep(1)
            program.write_text("#!/bin/sh\necho runs\n")
            program.chmod(0o700)

    virtual_time.run(run())
    assert supervisor.state.log("worker-0").read_text() == "runs\n"


def test_a_process_that_cannot_be_started_at_first_ends_the_start(supervisor: Supervisor, tmp_path: Path) -> None:
    """While the cluster starts, a program that is not there is an error."""
    supervisor.phase = "starting"
    with pytest.raises(FileNotFoundError):
        virtual_time.run(supervisor.run_child(ChildSpec("worker-0", "worker", [str(tmp_path / "program")])))


def remove_logs(supervisor: Supervisor) -> None:
    """Remove the folder of the logs."""
    shutil.rmtree(supervisor.state.logs)


def kill_guard(supervisor: Supervisor) -> None:
    """Kill the guard process, and wait for its end."""
    os.kill(supervisor.guard.pid, signal.SIGKILL)
    os.waitid(os.P_PID, supervisor.guard.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("happens", [remove_logs, kill_guard])
def test_a_process_is_started_all_the_same(supervisor: Supervisor, happens: Callable[[Supervisor], None]) -> None:
    """A process is started, and its end noticed, although the logs were deleted or the guard process was killed."""
    happens(supervisor)
    virtual_time.run(run_once(supervisor, [sys.executable, "-c", "print('ran')"]))
    assert supervisor.state.log("worker-0").read_text() == "ran\n"


def test_a_worker_that_ends_without_an_error_is_started_again(supervisor: Supervisor, tmp_path: Path) -> None:
    """A function that ends the process, as by `os._exit(0)`, leaves no place empty: deaths in a row fail the run.

    `psctl train` waited for ever for a worker that would never come.
    """
    script = f"echo x >> {tmp_path}/starts; [ $(wc -l < {tmp_path}/starts) = 1 ] && exit 0; exec sleep 60"

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            child = tasks.create_task(supervisor.run_child(ChildSpec("worker-0", "worker", ["/bin/sh", "-c", script])))
            while not child.done() and not (supervisor.restarts and supervisor.alive):
                await asyncio.sleep(0.05)
            supervisor.stop.set()
            await supervisor._end(["worker-0"], 0.0)

    virtual_time.run(run())
    assert supervisor.restarts == {"worker-0": 1}


@pytest.mark.parametrize("take", [lambda folder: StateDir(folder).lock(), lambda _: ports.reserve(1)])
def test_a_file_system_without_locks_is_not_taken_for_a_running_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, take: Callable[[Path], object]
) -> None:
    """An error of `flock` other than that somebody holds the lock is raised, and names the file.

    On such a network drive, `psctl up` told of a cluster that runs already.
    """

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr("paramserver_cli.ports.tempfile.gettempdir", lambda: str(tmp_path))
    with pytest.raises(OSError, match="No locks available") as raised:
        take(tmp_path)
    assert str(raised.value.filename).startswith(str(tmp_path))


def test_a_cluster_whose_folder_is_removed_stops(supervisor: Supervisor) -> None:
    """Without its folder a cluster cannot be found nor stopped, so it stops by itself, and writes in no other's files.

    After another `psctl up` there, the old supervisor had overwritten the files of the new cluster.
    """

    async def run() -> None:
        tending = asyncio.create_task(supervisor._tend_folder())
        await asyncio.sleep(60)
        assert not supervisor.stop.is_set()
        shutil.rmtree(supervisor.state.path)
        supervisor.publish()
        assert not supervisor.state.path.exists()
        with supervisor.state.lock() or nullcontext():
            supervisor.publish()
            assert supervisor.state.supervisor() is None
            await supervisor.stop.wait()
        tending.cancel()

    supervisor.publish()
    assert supervisor.state.supervisor() is not None
    virtual_time.run(run())


def test_no_file_of_a_training_of_weeks_looks_unused(supervisor: Supervisor) -> None:
    """The files that workers are started with, logs and what Redis stores are not lost by age in a temporary folder.

    After ten days a worker that died was not started again: its module had been deleted.  Times of writing stay.
    """
    supervisor.state.make()
    stored = supervisor.state.path / "redis" / "appendonlydir" / "appendonly.aof.manifest"
    stored.parent.mkdir(parents=True)
    paths = supervisor.state.path / "job_0a1b.py", supervisor.state.path / "lock", supervisor.state.log("worker-0")
    files = [*paths, stored]
    for file in files:
        file.touch()
        os.utime(file, (1e9, 1e9))
    (supervisor.state.path / "gone.json").symlink_to("nowhere")

    async def run() -> None:
        tending = asyncio.create_task(supervisor._tend_folder())
        await asyncio.sleep(60)
        tending.cancel()

    virtual_time.run(run())
    now = time.time()
    assert [now - 60 < file.stat().st_atime for file in files] == [True] * 4
    assert [file.stat().st_mtime for file in files] == [1e9] * 4
