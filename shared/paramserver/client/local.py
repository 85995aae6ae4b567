"""A private cluster of real processes on this machine, for notebooks, tests and teaching; stopped afterwards."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from paramserver import limits
from paramserver.client.client import Client
from paramserver.core.fields import whole_number
from paramserver.errors import PsError, problem
from paramserver.net.calls import seconds


class LocalClient(Client):
    """A client that owns its cluster: it is stopped with `close()`, or once nobody uses the client any more."""

    def __init__(
        self, url: str, timeout: float, token: str | None, folder: str, lifeline: int, *, temporary: bool
    ) -> None:
        super().__init__(url, timeout=timeout, token=token)
        # Called once: by `close`, when the client is collected, or at the end of the process.
        self._stop = weakref.finalize(self, _stop, os.getpid(), folder, lifeline, temporary=temporary)

    def close(self) -> None:
        """Close all connections, and stop the cluster.  Raises Unavailable if it does not stop or store all."""
        if self._stop.alive:
            try:
                super().close()
            finally:
                self._stop()


def local(
    shards: int = 2,
    *,
    workers: int = 0,
    state_dir: str | os.PathLike[str] | None = None,
    timeout: float = limits.CLIENT_TIMEOUT_S,
) -> LocalClient:
    """Start a cluster (a scheduler, `shards` shards and a Redis, on free ports) and return a client that owns it.

    Args:
        shards: number of shard processes.
        workers: number of pool workers that wait for runs.
        state_dir: folder for the cluster's files; None: a temporary one that is removed at the end.
        timeout: timeout of the client's calls, in seconds.

    The cluster ends with a `with` block, with `client.close()`, or once neither the client nor a model of it is in use
    any more, at the latest with the process.  Only the process that started it stops it, not a forked child.

    Raises RequestError (`invalid_field`) for numbers or a timeout that cannot be, Unavailable if there is no
    temporary folder, or if the cluster does not come up, with the last lines of its output.
    """
    shards, workers, timeout = whole_number("shards", shards, 1), whole_number("workers", workers), seconds(timeout)
    temporary = state_dir is None
    try:
        folder = tempfile.mkdtemp(prefix="paramserver-") if state_dir is None else os.path.abspath(state_dir)
    except OSError as e:
        hint = "set TMPDIR to a folder that can be written to, or name one with ps.local(state_dir=...)"
        raise problem("unavailable", f"no temporary folder for the cluster's files: {e}", hint=hint) from None
    options = ["--shards", str(shards), "--workers", str(workers), "--state-dir", folder]
    is_ours = temporary  # in another folder a cluster may run that somebody else has started
    read_end, lifeline = _pipe()  # however this process ends, the other end is closed then, and the cluster stops
    try:
        printed = _psctl(["up", "--detach", "--json", "--lifeline", str(read_end), *options], read_end)
        is_ours = True
        found: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
        return LocalClient(found["scheduler"], timeout, found.get("token"), folder, lifeline, temporary=temporary)
    except BaseException:
        if is_ours:
            with suppress(PsError):
                _stop(os.getpid(), folder, lifeline, temporary=temporary)
        else:
            os.close(lifeline)
        raise
    finally:
        os.close(read_end)


def _pipe() -> tuple[int, int]:
    """Return a pipe whose ends have none of the numbers of standard streams, which may be closed in this process.

    A child gets its own streams under these, and whatever is printed would go there.
    """
    ends = os.pipe()
    if min(ends) > 2:
        return ends
    try:
        return _pipe()
    finally:
        for end in ends:
            os.close(end)


def _stop(owner: int, folder: str, lifeline: int, *, temporary: bool) -> None:
    """Stop the cluster, and remove its folder if it is `temporary`; in a forked child of the `owner` do nothing."""
    if os.getpid() != owner:
        return
    try:
        _psctl(["down", "--state-dir", folder])
    except PsError:
        if not temporary:
            raise
        # It fails again only if the cluster still runs, not for what was not stored, which would be removed now.
        _psctl(["down", "--state-dir", folder])
    finally:
        os.close(lifeline)  # only now: `psctl down` tells what could not be stored if it stops the cluster itself
        if temporary:
            shutil.rmtree(folder, ignore_errors=True)


def _psctl(arguments: Sequence[str], *files: int) -> str:
    """Run psctl, which gets these open `files`, and return what it prints.  Raises Unavailable if it fails.

    Its own time limits end it: with another one here, it could not say why a cluster does not start or stop.
    """
    command = [sys.executable, "-P", "-m", "paramserver_cli", *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        pass_fds=() if sys.platform == "win32" else files,  # there it will say that no cluster runs on Windows
        check=False,
    )
    if done.returncode != 0:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-12:])
        hint = "`psctl doctor` looks for the cause"
        raise problem("unavailable", f"`psctl {arguments[0]}` failed: {last}", hint=hint)
    return done.stdout
