"""A private cluster of real processes on this machine, for notebooks, tests and teaching; stopped afterwards."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from paramserver import limits
from paramserver.client.client import Client, connect
from paramserver.errors import problem

START_S = 90.0
"""How long the cluster may take to become ready; on a machine's first start the kernels are compiled."""


@contextmanager
def local(
    shards: int = 2,
    *,
    workers: int = 0,
    state_dir: str | os.PathLike[str] | None = None,
    timeout: float = limits.CLIENT_TIMEOUT_S,
) -> Iterator[Client]:
    """Start a cluster (a scheduler, `shards` shards and a Redis, on free ports) and yield a client of it.

    Args:
        shards: number of shard processes.
        workers: number of pool workers that wait for runs.
        state_dir: folder for the cluster's files; None: a temporary one that is removed at the end.
        timeout: timeout of the client's calls, in seconds.

    Only the process that started the cluster stops it, not a forked child that leaves the block.

    Raises Unavailable if the cluster does not come up, with the last lines of its output.
    """
    owner = os.getpid()
    folder = os.fspath(state_dir) if state_dir is not None else tempfile.mkdtemp(prefix="paramserver-")
    try:
        options = ["--shards", str(shards), "--workers", str(workers), "--state-dir", folder]
        printed = _psctl(["up", "--detach", "--json", *options], START_S)
        try:
            found: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
            client = connect(found["scheduler"], timeout=timeout, token=found.get("token"))
            try:
                yield client
            finally:
                client.close()
        finally:
            if os.getpid() == owner:  # a forked child that leaves the block must not end its parent's cluster
                _psctl(["down", "--state-dir", folder], None)
    finally:
        if state_dir is None and os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)


def _psctl(arguments: Sequence[str], timeout_s: float | None) -> str:
    """Run psctl and return what it prints; None: it ends by itself in time.  Raises Unavailable if it fails."""
    command = [sys.executable, "-P", "-m", "paramserver_cli", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        raise problem("unavailable", f"`psctl {arguments[0]}` did not finish in {timeout_s:g} s") from None
    if done.returncode != 0:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-12:])
        hint = "`psctl doctor` looks for the cause"
        raise problem("unavailable", f"`psctl {arguments[0]}` failed: {last}", hint=hint)
    return done.stdout
