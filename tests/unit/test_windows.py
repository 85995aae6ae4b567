"""psctl on Windows, where clusters do not run: what it says there, and that its other commands work."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

AS_ON_WINDOWS = """
import os, signal, socket, sys, sysconfig
import paramserver.client.client, paramserver_cli.main  # others' modules decide by this system what they need
sysconfig.get_config_vars()  # so does Python

for name in [n for n in sys.modules if n.partition(".")[0].startswith("paramserver")]:
    del sys.modules[name]
for name in ("fcntl", "grp", "pwd", "resource", "termios", "uvloop"):
    sys.modules[name] = None
lacking = {os: ["fork", "getuid", "geteuid", "killpg", "sched_getaffinity", "setsid"], socket: ["AF_UNIX"]}
lacking[signal] = ["SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGUSR1", "setitimer"]
for module, names in lacking.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "win32"

from paramserver_cli.main import app
app(sys.argv[1:], prog_name="psctl")
"""

NOBODY = "http://127.0.0.1:1"
NO_CLUSTER = "psctl: a cluster does not run on Windows itself: use Docker or WSL2; clients and psctl work from here\n"


def psctl(arguments: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """Return (exit code, output, errors) of a psctl that finds what Windows has."""
    command = [sys.executable, "-P", "-c", AS_ON_WINDOWS, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=50, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_cluster_is_refused_on_windows_with_what_to_do(command: str, tmp_path: Path) -> None:
    """A command that starts a cluster says in one line that none runs on Windows, and where one does."""
    code, _, errors = psctl([command], tmp_path)
    assert (code, errors) == (1, NO_CLUSTER)


@pytest.mark.slow
def test_psctl_works_on_windows_where_it_needs_no_cluster_of_its_own(tmp_path: Path) -> None:
    """Commands that list, check and control begin on Windows without any module or signal that it lacks."""
    none_runs = "no cluster of yours runs on this machine; psctl up starts one\n"
    assert psctl(["list"], tmp_path) == (0, none_runs, "")
    code, found, errors = psctl(["doctor", "--json", "--url", NOBODY], tmp_path)
    assert (code, errors) == (0, "")
    assert "Windows runs clients only" in found
    code, _, errors = psctl(["models", "--url", NOBODY], tmp_path)
    assert code == 3
    assert NOBODY in errors
