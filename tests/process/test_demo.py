"""The demo: it trains, it survives kills, and it leaves nothing behind however it ends."""

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file

from paramserver.examples import digits

from .cluster import PSCTL, eventually

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(420)]
MARK = "PARAMSERVER_TEST_MARK"


class Demo:
    """A running `psctl demo`, whose processes are known by a variable in their environment."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.mark = uuid.uuid4().hex
        self.out = folder / "out"
        self.log = folder / "printed"
        with self.log.open("wb") as printed:
            self.process = subprocess.Popen(
                [*PSCTL, "demo", "--seconds", str(seconds), "--out", str(self.out)],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env=os.environ | {MARK: self.mark},
                cwd=folder,
            )

    def printed(self) -> str:
        """All that it has printed."""
        return self.log.read_text()

    def processes(self) -> list[psutil.Process]:
        """It and all that it started, directly or not."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def printed_line(self, start: str) -> bool:
        """Whether a line that begins so was printed."""
        return any(line.startswith(start) for line in self.printed().splitlines())

    def trains(self, mode: str) -> bool:
        """Whether the newest line is of that mode and has an accuracy."""
        newest = self.printed().splitlines()[-1]
        return newest.startswith(f"{mode} ") and "accuracy" in newest

    def replaced(self, module: str, victim: int) -> bool:
        """Whether another process runs in the place of a killed one."""
        return victim not in (now := self.serving(module)) and bool(now)

    def serving(self, module: str) -> list[int]:
        """The processes that run `python -m module`."""
        return [p.pid for p in self.processes() if module in p.cmdline()]


@contextmanager
def demo(folder: Path, seconds: float) -> Iterator[Demo]:
    """A demo that is killed at the end if it has not ended by itself."""
    running = Demo(folder, seconds)
    try:
        yield running
    except BaseException:
        print(running.printed())
        raise
    finally:
        running.process.kill()
        running.process.wait()


def test_it_trains_in_both_modes_though_processes_are_killed(tmp_path: Path) -> None:
    """Scheduler, a worker and a shard are killed in each mode; both reach 96 %, and the files hold what they say."""
    with demo(tmp_path, seconds=8) as running:
        for mode in ("sync", "async"):
            for module in ("paramserver_worker", "paramserver_shard", "paramserver_scheduler"):
                eventually(partial(running.trains, mode), within_s=90, what=f"accuracy in {mode} mode")
                victim = eventually(partial(running.serving, module))[0]
                os.kill(victim, signal.SIGKILL)
                eventually(partial(running.replaced, module, victim), what=f"a new {module}")
            eventually(partial(running.printed_line, f"{mode}: "), within_s=150, what=f"the end of {mode}")
        running.process.wait(60)

        found = re.findall(r"^(a?sync) accuracy (.*) %$", running.printed(), re.M)
    assert running.process.returncode == 0, running.printed()
    for mode in ("sync", "async"):
        assert float(dict(found)[mode]) >= 96.0
        assert digits.accuracy(load_file(running.out / f"digits-{mode}" / "model.safetensors")) >= 0.96
    assert (running.out / "curves.png").read_bytes().startswith(b"\x89PNG")
    eventually(lambda: not running.processes(), what="the end of every process")


@pytest.mark.parametrize(
    ("sign", "number"),
    [
        ("starting", signal.SIGINT),
        ("starting", signal.SIGKILL),
        ("status page", signal.SIGTERM),
        ("status page", signal.SIGKILL),
        ("accuracy", signal.SIGINT),
        ("accuracy", signal.SIGKILL),
    ],
)
def test_nothing_is_left_however_it_is_ended(tmp_path: Path, sign: str, number: signal.Signals) -> None:
    """Interrupted, terminated or killed at any moment, the demo leaves no process, and says so by its exit code."""
    with demo(tmp_path, seconds=30) as running:
        eventually(lambda: sign in running.printed(), within_s=120)
        assert len(running.processes()) >= 1

        running.process.send_signal(number)
        code = running.process.wait(60)

        # As a shell says it: Python may also end itself by the very signal.
        said = code if code >= 0 else 128 - code
        assert said == 128 + number, running.printed()
        eventually(lambda: not running.processes(), what="the end of every process")
        assert "Traceback" not in running.printed()


def test_missing_packages_are_named(tmp_path: Path) -> None:
    """Without the packages of the extra `demo`, one line says what to install."""
    code = "import sys; sys.modules['sklearn'] = None; from paramserver_cli.main import app; app(['demo'])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)

    assert done.returncode == 1
    assert "pip install 'paramserver[demo]'" in done.stderr
    assert "Traceback" not in done.stderr
