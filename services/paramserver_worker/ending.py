"""The end of the process, which threads that a training function has left behind cannot put off for ever.

Python ends only once every thread that is not a daemon has ended, and a thread that waits for what nobody sends any
more never does.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import typer

log = logging.getLogger("paramserver.worker")

QUIET_S: Final = 1.0
"""How long threads may take to end before the log names them."""
GRACE_S: Final = 5.0
"""Longest time that they keep the process; less than the supervisor gives it."""


@contextmanager
def in_time() -> Iterator[None]:
    """Let the process end with the block's exit status at most `GRACE_S` after the block, whatever it leaves running.

    To be used in the main thread, around all that the process does.
    """
    status = 0
    try:
        yield
    except typer.Exit as e:
        status = e.exit_code
        raise
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
        raise
    except BaseException:
        status = 1
        raise
    finally:
        # A daemon, so it runs as long as Python waits for the other threads, and keeps nothing alive itself.
        threading.Thread(target=_watch, args=(status,), name="end of process", daemon=True).start()


def _watch(status: int) -> None:
    began = time.monotonic()
    if not _remaining(began + QUIET_S):
        return
    log.warning("worker.waits threads=%s: they are no daemons, so the process waits for them", _names())
    if _remaining(began + GRACE_S):
        log.error("worker.ends status=%d threads=%s: ending the process without waiting for them", status, _names())
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(status)


def _remaining(until: float) -> bool:
    """Wait up to that time for the threads that keep the process; return whether some still do."""
    for thread in _keeping():
        thread.join(max(0.0, until - time.monotonic()))
    return bool(_keeping())


def _keeping() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]


def _names() -> str:
    return ",".join(t.name.replace(" ", "_") for t in _keeping())
