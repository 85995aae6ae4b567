"""A rate limit on frames that make work without use: pings, resets, empty frames, tiny window updates."""

from collections.abc import Callable
from typing import Final

from paramserver.wire import http2 as wire
from paramserver.wire.http2 import Http2Error

COUNT_MAX: Final = 1000
"""Count above which a client is disconnected."""
DECREASE_PER_S: Final = 20.0
"""Decrease of the count per second, so that occasional pings do not add up."""
FRAMES_MAX: Final = 256
"""After a read with more frames, of any kind, other connections get their turn, and the next read is short."""
UPDATE_BYTES_MIN: Final = 1 << 10
"""Window updates smaller than this count."""
UPDATE_PER_BYTES: Final = 4 << 10
"""Decrease of the count by one for so many bytes of answers: who reads them may send a small update now and then, as
HAProxy does for the rest of each frame that its buffer could not take."""
DECREASE_PER_ANSWER: Final = 2.0
"""Decrease of the count per request answered: after a short answer the window updates are small, too."""


class FrameAbuseLimit:
    """Counts one client's useless frames; `time` is a clock in seconds."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self._count = 0.0
        self._at_s = time()
        self._sent_bytes = 0

    def count(self) -> None:
        """Count one more; raises Http2Error if that is too many."""
        now_s = self._time()
        self._count = max(0.0, self._count - (now_s - self._at_s) * DECREASE_PER_S) + 1.0
        self._at_s = now_s
        if self._count > COUNT_MAX:
            raise Http2Error(wire.ENHANCE_YOUR_CALM, "too many useless frames")

    def count_update(self, by: int, sent_bytes: int) -> None:
        """Count a window update by so many bytes if it is small; raises Http2Error like `count`.

        `sent_bytes`: size of what the client was sent of the bodies of answers, ever.
        """
        if by < UPDATE_BYTES_MIN:
            self._count = max(0.0, self._count - (sent_bytes - self._sent_bytes) / UPDATE_PER_BYTES)
            self._sent_bytes = sent_bytes
            self.count()

    def request_ended(self, *, answered: bool) -> None:
        """Note the end of a request; if it was answered, lower the count."""
        if answered:
            self._count = max(0.0, self._count - DECREASE_PER_ANSWER)
