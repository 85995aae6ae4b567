"""How a program that works in its main thread is told to end: by an exception that leaves all blocks in order.

A signal can come in the middle of a callback that Python makes by itself (a finalizer, an import's).  What is raised
there is reported as ignored, and is gone; so it is raised again a moment later.
"""

import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

AGAIN_S: Final = 0.05


class Terminated(SystemExit):
    """The process was told to end, unlike a SystemExit of somebody who calls `sys.exit()`."""


def on_signals() -> None:
    """From now on SIGTERM raises Terminated in the main thread; neither that nor Ctrl-C is lost."""
    told: BaseException = Terminated(128 + signal.SIGTERM)

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated(128 + number)

    def once_more(number: int, frame: FrameType | None) -> None:
        raise told

    def ignored(what: "UnraisableHookArgs") -> None:
        nonlocal told
        if isinstance(what.exc_value, Terminated | KeyboardInterrupt):
            told = what.exc_value
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        else:
            before(what)

    before, sys.unraisablehook = sys.unraisablehook, ignored
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGALRM, once_more)
