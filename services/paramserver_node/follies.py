"""Frames that make work and are of no use: pings, resets, empty ones, windows wider by a few bytes."""

from collections.abc import Callable
from typing import Final

from paramserver.wire import http2 as wire
from paramserver.wire.http2 import Http2Error

MOST: Final = 1000
"""So many at once before a client is cut off ..."""
PER_S: Final = 20.0
"""... of which so many are forgotten each second: a ping now and then is none."""
WIDER_BYTES_MIN: Final = 1 << 10
"""By how much a client that reads makes its windows wider ..."""
PER_ANSWER: Final = 2.0
"""... unless the answer was short: so many words about it are none."""


class Follies:
    """Those of one client; `time` is in seconds."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self._count = 0.0
        self._at_s = time()

    def one(self) -> None:
        """One more; raises Http2Error for one too many."""
        now_s = self._time()
        self._count = max(0.0, self._count - (now_s - self._at_s) * PER_S) + 1.0
        self._at_s = now_s
        if self._count > MOST:
            raise Http2Error(wire.ENHANCE_YOUR_CALM, "too many frames of no use")

    def made_up(self, answered: bool) -> None:
        """A request is over."""
        if answered and self._count:
            self._count = max(0.0, self._count - PER_ANSWER)
