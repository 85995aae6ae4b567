"""Termination of a program that works in its main thread, by an exception that unwinds all blocks.

A signal can arrive during a callback that Python itself makes (of a finalizer, or of the import system).  An exception
raised there is only reported as ignored, and lost; so it is raised again a moment later.
"""

import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

RETRY_S: Final = 0.05


class Terminated(SystemExit):
    """Raised when the process is told to end, as opposed to a SystemExit raised by `sys.exit()`."""


def on_signals() -> None:
    """Make SIGTERM raise Terminated in the main thread; from now on, neither that nor Ctrl-C is lost.

    So does SIGHUP, which a terminal sends that is closed, unless it is ignored (`nohup`).  Windows has no such signals.
    """
    if sys.platform == "win32":
        return
    pending: BaseException = Terminated(128 + signal.SIGTERM)

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated(128 + number)

    def raise_again(number: int, frame: FrameType | None) -> None:
        raise pending

    def ignored(what: "UnraisableHookArgs") -> None:
        nonlocal pending
        if isinstance(what.exc_value, Terminated | KeyboardInterrupt):
            pending = what.exc_value
            signal.setitimer(signal.ITIMER_REAL, RETRY_S)
        else:
            before(what)

    before, sys.unraisablehook = sys.unraisablehook, ignored
    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, end)
    signal.signal(signal.SIGALRM, raise_again)
