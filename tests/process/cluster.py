"""A real cluster for tests: the one `psctl up` starts, on free ports, below a folder of the test's own."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
PSCTL = [sys.executable, "-P", "-m", "paramserver_cli"]


def eventually(probe: Callable[[], T], *, within_s: float = 30.0, what: str = "") -> T:
    """The first true value of `probe`; fails with its last value or error when none came in time."""
    deadline = time.monotonic() + within_s
    last: Any = None
    pause = threading.Event()
    while time.monotonic() < deadline:
        try:
            value = probe()
        except Exception as e:  # the thing probed may not be up yet; its error is shown if it never is
            last = e
        else:
            if value:
                return value
            last = value
        pause.wait(0.05)
    raise AssertionError(f"{what or probe} did not happen within {within_s} s; last: {last!r}")


class Cluster:
    """What `psctl up --json` printed, and the means to hurt it."""

    def __init__(self, info: dict[str, Any]) -> None:
        self.info = info
        self.url: str = info["scheduler"]
        self.shards: list[str] = info["shards"]
        self.state_dir = Path(info["state_dir"])

    def present(self) -> dict[str, Any]:
        """The cluster's object with the pids of now."""
        out = subprocess.run([*PSCTL, "list", "--json"], capture_output=True, text=True, check=True)
        items = json.loads(out.stdout)["items"]
        return next(i for i in items if i["state_dir"] == self.info["state_dir"])

    def kill(self, kind: str, index: int = 0) -> int:
        """SIGKILL one serving process (`scheduler`, `shards`, `redis`); the pid that died."""
        pid = int(self.present()["pids"][kind][index])
        os.kill(pid, signal.SIGKILL)
        return pid

    def replaced(self, kind: str, index: int, old: int) -> bool:
        """Whether another process serves in the place of the pid `old`."""
        pids = self.present()["pids"][kind]
        return index < len(pids) and pids[index] not in (None, old)

    def psctl(self, *args: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run psctl against this cluster."""
        env = os.environ | {"PARAMSERVER_URL": self.url}
        return subprocess.run([*PSCTL, *args], capture_output=True, text=True, env=env, timeout=timeout_s)


@contextmanager
def cluster(state_dir: Path, *, shards: int = 2, args: tuple[str, ...] = ()) -> Iterator[Cluster]:
    """A running cluster, taken down at the end; its logs are printed if the test failed."""
    up = [*PSCTL, "up", "--detach", "--json", "--shards", str(shards), "--state-dir", str(state_dir), *args]
    done = subprocess.run(up, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    running = Cluster(json.loads(done.stdout.strip().splitlines()[-1]))
    try:
        yield running
    except BaseException:
        for log in sorted((state_dir / "logs").glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        raise
    finally:
        down = subprocess.run(
            [*PSCTL, "down", "--state-dir", str(state_dir)], capture_output=True, text=True, timeout=60
        )
        assert down.returncode == 0, down.stdout + down.stderr
