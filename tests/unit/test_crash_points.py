"""Crash points: only the one named in the environment kills, and each name is used at one place of the code."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paramserver.errors import RequestError
from paramserver_node.crash import POINTS, Fuse

SERVICES = Path(__file__).parents[2] / "services"


def test_every_point_is_somewhere_in_the_services() -> None:
    """Every name in POINTS is used at exactly one place of the services, and no other name is used."""
    text = "".join(p.read_text() for p in SERVICES.rglob("*.py") if p.name != "crash.py")
    placed = [n for call in re.findall(r"crash_point\(([^)]*)\)", text) for n in re.findall(r'"([^"]+)"', call)]

    assert sorted(placed) == sorted(POINTS)
    assert len(POINTS) >= 12


def test_a_process_dies_at_its_point_and_nowhere_else() -> None:
    """A process is killed by SIGKILL at the crash point and pass that the environment names, and not before."""
    first, second = sorted(POINTS)[:2]
    code = (
        f"from paramserver_node.crash import crash_point as p\np({second!r})\nfor i in range(3): print(i); p({first!r})"
    )
    env = os.environ | {"PARAMSERVER_CRASH_AT": f"{first}:2", "PYTHONUNBUFFERED": "1"}

    died = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=30)

    assert died.returncode == -signal.SIGKILL
    assert died.stdout.split() == ["0", "1"]
    assert first in died.stderr


@pytest.mark.parametrize("setting", ["nowhere", "shard.before_apply:0", "shard.before_apply:soon"])
def test_a_point_that_does_not_exist_is_refused(setting: str) -> None:
    """An unknown crash point or an invalid number of passes is refused.

    Otherwise a test that names no crash point would pass without a crash.
    """
    with pytest.raises(RequestError, match="PARAMSERVER_CRASH_AT"):
        Fuse(setting)
