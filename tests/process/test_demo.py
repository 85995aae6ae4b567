"""`psctl demo`: it trains, survives killed processes, and leaves no process behind however it ends."""

import os
import re
import shutil
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
from tests.waiting import eventually

from paramserver.examples import digits

from .cluster import MARK, PSCTL, marked

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(420)]


class Demo:
    """A running `psctl demo`; its processes are recognized by a variable in their environment."""

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
        """The output so far."""
        return self.log.read_text()

    def processes(self) -> list[psutil.Process]:
        """The demo process and its descendants, without zombies."""
        return marked(self.mark)

    def printed_line(self, start: str) -> bool:
        """Whether a line that starts with `start` was printed."""
        return any(line.startswith(start) for line in self.printed().splitlines())

    def trains(self, mode: str) -> bool:
        """Whether the last line printed is of that mode and shows an accuracy."""
        newest = self.printed().splitlines()[-1]
        return newest.startswith(f"{mode} ") and "accuracy" in newest

    def replaced(self, module: str, before: list[int]) -> bool:
        """Whether the module runs in a process that is none of those before."""
        return not set(self.serving(module)) <= set(before)

    def serving(self, module: str) -> list[int]:
        """Pids of the processes that run `python -m module`."""
        return [p.pid for p in self.processes() if module in p.cmdline()]


@contextmanager
def demo(folder: Path, seconds: float) -> Iterator[Demo]:
    """Run the demo, and kill it at the end of the block if it still runs."""
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
    """With a worker and a shard, then the scheduler, killed in each mode, both reach 96 % and the files are written."""
    with demo(tmp_path, seconds=8) as running:
        for mode in ("sync", "async"):
            for modules in (("paramserver_worker", "paramserver_shard"), ("paramserver_scheduler",)):
                eventually(partial(running.trains, mode), within_s=90, what=f"accuracy in {mode} mode")
                found = {module: eventually(partial(running.serving, module)) for module in modules}
                for pids in found.values():
                    os.kill(pids[0], signal.SIGKILL)
                for module, pids in found.items():
                    eventually(partial(running.replaced, module, pids), what=f"a new {module}")
            eventually(partial(running.printed_line, f"{mode}: "), within_s=150, what=f"the end of {mode}")
        running.process.wait(60)

        reached = re.findall(r"^(a?sync) accuracy (.*) %$", running.printed(), re.M)
    assert running.process.returncode == 0, running.printed()
    for mode in ("sync", "async"):
        assert float(dict(reached)[mode]) >= 96.0
        assert digits.accuracy(load_file(running.out / f"digits-{mode}" / "model.safetensors")) >= 0.96
    assert (running.out / "curves.png").read_bytes().startswith(b"\x89PNG")
    eventually(lambda: not running.processes(), what="the end of every process")


@pytest.mark.parametrize(
    ("sign", "number"),
    [
        ("starting", signal.SIGINT),
        ("status page", signal.SIGTERM),
        ("accuracy", signal.SIGKILL),
    ],
)
def test_nothing_is_left_however_it_is_ended(tmp_path: Path, sign: str, number: signal.Signals) -> None:
    """Interrupted, terminated or killed, the demo leaves no process; its exit code is 128 + signal."""
    with demo(tmp_path, seconds=30) as running:
        eventually(lambda: sign in running.printed(), within_s=120)

        running.process.send_signal(number)
        code = running.process.wait(60)

        # As a shell reports it: the process may exit with 128 + n, or die of the signal itself.
        said = code if code >= 0 else 128 - code
        assert said == 128 + number, running.printed()
        eventually(lambda: not running.processes(), what="the end of every process")
        assert "Traceback" not in running.printed()


def test_missing_packages_are_named(tmp_path: Path) -> None:
    """Without the packages of the extra `demo`, psctl exits with 1 and says what to install."""
    code = "import sys; sys.modules['sklearn'] = None; from paramserver_cli.main import app; app(['demo'])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)

    assert done.returncode == 1
    assert "pip install '.[demo]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_logs_of_a_demo_that_fails_stay(tmp_path: Path) -> None:
    """If the demo fails, the logs are still in the folder that it has named, and nothing else of its cluster is."""
    env = os.environ | {"PARAMSERVER_EXPECT_STATE": "yes"}
    done = subprocess.run([*PSCTL, "demo"], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=100)

    folder = Path(re.search(r"the logs are in (.*)/logs\n", done.stdout)[1])  # type: ignore[index]
    try:
        assert done.returncode == 1
        assert "Redis holds no state" in done.stderr
        assert "Redis holds no state" in (folder / "logs" / "scheduler.log").read_text()
        assert [p.name for p in folder.iterdir()] == ["logs"]
    finally:
        shutil.rmtree(folder)
