"""A program that is asked to end unwinds its blocks, at whatever moment the signal arrives."""

import signal
import subprocess
import sys

import pytest

IN_A_CALLBACK = """
import sys, time, weakref
from paramserver_node import unwind

class Thing:
    pass

def gone(_):
    print("now", flush=True)
    for _ in range(600):
        time.sleep(0.1)

unwind.on_signals()
try:
    thing = Thing()
    reference = weakref.ref(thing, gone)
    del thing
    for _ in range(600):
        time.sleep(0.1)
finally:
    print("left in order")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_not_lost_in_a_callback(number: signal.Signals) -> None:
    """A signal during a callback ends the program in order, although Python ignores what is raised there.

    It once arrived while the lock of an import was being freed, and the program went on.
    """
    with subprocess.Popen(
        [sys.executable, "-P", "-c", IN_A_CALLBACK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "now\n"
        running.send_signal(number)
        printed, wrong = running.communicate(timeout=20)
    said = running.returncode if running.returncode >= 0 else 128 - running.returncode
    assert (said, printed) == (128 + number, "left in order\n")
    assert "ignored" not in wrong
