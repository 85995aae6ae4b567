"""A real cluster for tests, started by `psctl up` on free ports with its state in a folder of the test."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from .prepared import prepared

PSCTL = [sys.executable, "-P", "-m", "paramserver_cli"]
MARK = "PARAMSERVER_TEST_MARK"
"""The variable that `marked` looks for."""


class Cluster:
    """A running cluster: the object that `psctl up --json` printed, and methods to inspect and kill its processes."""

    def __init__(self, info: dict[str, Any]) -> None:
        self.info = info
        self.url: str = info["scheduler"]
        self.shards: list[str] = info["shards"]
        self.state_dir = Path(info["state_dir"])

    def present(self) -> dict[str, Any]:
        """The cluster's object from `psctl list --json`, with the current pids."""
        items = json.loads(self.psctl("list", "--json").stdout)["items"]
        return next(i for i in items if i["state_dir"] == self.info["state_dir"])

    def kill(self, kind: str, index: int = 0) -> int:
        """SIGKILL one serving process (kinds: `scheduler`, `shards`, `redis`) and return its pid."""
        pid = int(self.present()["pids"][kind][index])
        os.kill(pid, signal.SIGKILL)
        return pid

    def replaced(self, kind: str, index: int, old: int) -> bool:
        """Whether a new process has taken the place of pid `old`."""
        pids = self.present()["pids"][kind]
        return index < len(pids) and pids[index] not in (None, old)

    def psctl(self, *args: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run psctl against this cluster."""
        return prepared().run(args, os.environ | {"PARAMSERVER_URL": self.url}, timeout_s)


@contextmanager
def cluster(state_dir: Path, *, shards: int = 2, args: tuple[str, ...] = ()) -> Iterator[Cluster]:
    """Start a cluster, and stop it at the end of the block; print its logs if the block failed."""
    up = ["up", "--detach", "--json", "--shards", str(shards), "--state-dir", str(state_dir), *args]
    # By itself it gives up after 180 s, and stops.
    done = prepared().run(up, os.environ, 220.0)
    assert done.returncode == 0, done.stdout + done.stderr
    running = Cluster(json.loads(done.stdout.strip().splitlines()[-1]))
    try:
        yield running
    except BaseException:
        for log in sorted((state_dir / "logs").glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        raise
    finally:
        down = prepared().run(["down", "--state-dir", str(state_dir)], os.environ, 60.0)
        assert down.returncode == 0, down.stdout + down.stderr


def marked(mark: str) -> list[psutil.Process]:
    """The processes whose environment has that mark, without zombies."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def get(url: str, headers: dict[str, str] | None = None) -> httpx.Response:
    """GET from a node, with more patience than the 5 s of httpx, which a crowded machine may need."""
    return httpx.get(url, headers=headers, timeout=30.0)


def ones(n: int = 100) -> dict[str, Any]:
    """Return a gradient or values of ones."""
    return {"w": np.ones(n, np.float32)}
