"""Starting a supervisor, waiting until its cluster is ready, and stopping it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import psutil

from paramserver.errors import problem
from paramserver_cli.state_directory import MODULE, Plan, StateDir
from paramserver_node.settings import ShardSettings

READY_TIMEOUT_S = 200.0
STOP_TIMEOUT_S = 50.0
"""A supervisor still running after this and the shards' `stop_s` is killed; `supervisor` has the time of each kind."""
POLL_S = 0.05


class Failed(Exception):
    """Raised when something on this machine did not work; the text says what to do."""


@dataclass
class Launched:
    """A supervisor that this process started."""

    state: StateDir
    process: subprocess.Popen[bytes]
    lifeline: int | None
    """Write end of the pipe whose closing stops the cluster; None for a detached cluster."""


def launch(state: StateDir, plan: Plan, *, detach: bool, lifeline: int | None = None) -> Launched:
    """Start a supervisor for `plan`; with `detach` it outlives this process, else it ends with it.

    With `detach` and a `lifeline`, the read end of a pipe, it ends when nobody has the other end any more.

    Raises Failed on Windows, ConflictError (`conflict`) if a cluster already runs in this state directory, RequestError
    (`invalid_field`) if the shards' settings here are invalid.
    """
    if sys.platform == "win32":
        raise Failed("a cluster does not run on Windows itself: use Docker or WSL2; clients and psctl work from here")
    if (lock := state.lock()) is None:
        cluster = state.cluster()
        at = cluster.scheduler if cluster else "starting"
        raise problem(
            "conflict",
            f"a cluster is already running under {state.path} ({at})",
            hint="psctl down stops it; --state-dir names another folder",
        )
    with lock:  # from here on the supervisor's, which inherits it: of two commands at once the second is refused
        if plan.scheduler is None:
            plan = replace(plan, stop_s=ShardSettings.load({"host": plan.host}).stop_s)
        for old in state.logs.glob("*.log"):
            old.replace(old.with_suffix(".log.1"))
        state.remove_run_files()
        state.write(plan)
        argv = [sys.executable, "-P", "-m", MODULE, str(state.path), str(lock.fileno())]
        read_end, write_end = (lifeline, None) if detach else os.pipe()
        with state.log("supervisor").open("ab") as out:
            process = subprocess.Popen(
                argv if read_end is None else [*argv, str(read_end)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at the terminal reaches only this process, which stops the cluster
                pass_fds=(lock.fileno(),) if read_end is None else (lock.fileno(), read_end),
            )
    if read_end is not None:
        os.close(read_end)
    return Launched(state, process, write_end)


def wait_ready(launched: Launched) -> None:
    """Wait until the cluster is ready.

    Raises Failed if it does not start, with the supervisor's error or the end of its log, or with the log folder after
    READY_TIMEOUT_S.
    """
    deadline = time.monotonic() + READY_TIMEOUT_S
    state = launched.state
    while True:
        ended = launched.process.poll() is not None
        now = state.supervisor()
        if now is not None and now.pid == launched.process.pid:
            if now.phase == "ready":
                return
            if now.phase == "failed":
                launched.process.wait()
                raise Failed(f"the cluster did not start: {now.error}")
        if ended:
            nothing = f"there is nothing in {state.log('supervisor')}: is the disk full?"
            raise Failed(f"the cluster did not start:\n{state.tail('supervisor') or nothing}")
        if time.monotonic() > deadline:
            raise Failed(f"the cluster was not ready in {READY_TIMEOUT_S:g} s; its logs are in {state.logs}")
        time.sleep(POLL_S)  # the supervisor is another process; it writes its phase into the state directory


def stop(state: StateDir) -> bool:
    """Stop the cluster of a state directory and wait until its supervisor has ended; return False if none runs.

    The supervisor gets SIGTERM, and SIGKILL after STOP_TIMEOUT_S and the `stop_s` of the plan.  Raises Failed if it
    survives that as long.
    """
    if not state.is_running():
        return False
    timeout_s = STOP_TIMEOUT_S + (state.plan() or Plan()).stop_s
    deadline = time.monotonic() + timeout_s
    while state.is_running():
        # Read again in each round: a supervisor that has just started writes its pid a moment later.
        supervisor = state.supervisor()
        late = time.monotonic() > deadline
        if supervisor is not None:
            _signal(supervisor.pid, signal.SIGKILL if late else signal.SIGTERM)
        if late and time.monotonic() > deadline + timeout_s:
            raise Failed(f"the supervisor of {state.path} cannot be stopped")
        time.sleep(POLL_S)  # the supervisor is not a child of this process, so it cannot be waited for
    return True


def not_stored(state: StateDir) -> str:
    """Return which shards of a cluster that was stopped could not store everything, or that nobody knows; else ""."""
    last = state.supervisor()
    if last is None:
        return ""
    if last.phase in ("ready", "stopping"):  # it could not write what came after, or was killed
        return f"what only the shards had may not be stored; what became of them is in {state.log('supervisor')}"
    return last.error


def plan_changed(state: StateDir) -> None:
    """Tell a ready supervisor to read its plan again (SIGUSR1)."""
    supervisor = state.supervisor()
    if supervisor is not None and supervisor.phase == "ready":
        _signal(supervisor.pid, signal.SIGUSR1)


def _signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to `pid` if that process is a supervisor; the number may have been reused."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if MODULE in process.cmdline():
            process.send_signal(number)


def end(launched: Launched) -> None:
    """Stop the cluster that `launch` started, and wait until it is down."""
    if launched.lifeline is not None:
        os.close(launched.lifeline)
        launched.lifeline = None
    if launched.process.poll() is None:  # else the folder may be another's by now
        stop(launched.state)
    launched.process.wait()


@contextmanager
def cluster(state: StateDir, plan: Plan) -> Iterator[Launched]:
    """Run a cluster for the duration of the block.

    However the block ends, no process remains; a second Ctrl-C during the shutdown kills those that still run.
    """
    launched = launch(state, plan, detach=False)
    try:
        wait_ready(launched)
        yield launched
    finally:
        try:
            end(launched)
        except KeyboardInterrupt:
            launched.process.kill()  # its guard process then kills the children
            launched.process.wait()
