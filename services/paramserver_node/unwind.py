"""Termination of a program that works in its main thread, by an exception that unwinds all blocks.

A signal can arrive during a callback that Python itself makes (of a finalizer, or of the import system).  An exception
raised there is only reported as ignored, and lost; so it is raised again a moment later.
"""

import inspect
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

RETRY_S: Final = 0.05
ENDING: Final = (signal.SIGINT, signal.SIGTERM) + (() if sys.platform == "win32" else (signal.SIGHUP,))
"""The signals that tell a process to end."""


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


@contextmanager
def own_handlers() -> Iterator[None]:
    """Let the block handle the signals that end a process itself; afterwards their handlers are those of before.

    Raises Terminated in place of what such a handler has raised, be it `sys.exit(0)`, or what followed from that.
    """
    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield
    except BaseException as e:
        number = _handled_before(e)
        if number is not None:
            raise Terminated(128 + number) from e
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handled_before(error: BaseException) -> int | None:
    """Return the signal whose handler raised the error, or one in its context; None if none did."""
    unseen: list[BaseException | None] = [error]
    seen: set[int] = set()
    while unseen:
        e = unseen.pop()
        if e is None or id(e) in seen:
            continue
        seen.add(id(e))
        for frame, _ in traceback.walk_tb(e.__traceback__):
            number = _handled_by(frame)
            if number is not None:
                return number
        unseen += [e.__context__, *(e.exceptions if isinstance(e, BaseExceptionGroup) else ())]
    return None


def _handled_by(frame: FrameType) -> int | None:
    """Return the signal that this call handles, as its arguments tell: the handler itself may be set no more."""
    args = inspect.getargvalues(frame)
    further = args.locals.get(args.varargs) if args.varargs else ()
    given = [args.locals.get(name) for name in args.args] + list(further if isinstance(further, tuple) else ())
    for number, interrupted in pairwise(given):
        if isinstance(interrupted, FrameType) and isinstance(number, int) and number in ENDING:
            return number
    return None
