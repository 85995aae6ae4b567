"""Waiting for what real processes will do."""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def eventually(probe: Callable[[], T], *, within_s: float = 30.0, what: str = "") -> T:
    """Poll `probe` and return its first true value; fail with its last value or error if there is none in time."""
    deadline, pause = time.monotonic() + within_s, threading.Event()
    last: Any = None
    while time.monotonic() < deadline:
        try:
            if value := probe():
                return value
            last = value
        except Exception as e:  # what is probed may not be up yet; shown if it stays so
            last = e
        pause.wait(0.05)
    raise AssertionError(f"{what or probe} did not happen within {within_s} s; last: {last!r}")
