"""The serving rule (semantics 6): a shard answers while a scheduler or Redis has confirmed it within the last 3 s."""

from collections.abc import Callable
from time import monotonic
from typing import Final

from paramserver.errors import problem
from paramserver.limits import SERVE_WITHOUT_CONTACT_S

JOINS_S: Final = 0.2
"""After how long to ask a shard that has just started again: it joins within a second."""
_NEVER: Final = float("-inf")


class Serving:
    """Knows whether this shard may serve."""

    def __init__(self) -> None:
        self.closed = False
        """Whether the shard has stopped serving for good."""
        self.on_changed: Callable[[float, float], None] = lambda *_: None
        """Called with (confirmed at, may serve until), in monotonic seconds, on each change; (0, 0): must not serve."""
        self._scheduler_seen_at = self._redis_seen_at = _NEVER

    def check(self) -> None:
        """Raise Unavailable unless the shard may serve now.

        Call it when a request arrives and again before its response is sent: the process may have been paused in
        between.
        """
        seen_at = max(self._scheduler_seen_at, self._redis_seen_at)
        if self.closed:
            raise problem("unavailable", "this shard is stopping")
        if seen_at == _NEVER:
            raise problem("unavailable", "this shard has not joined yet", retry_after_s=JOINS_S)
        # Not the loop's time: it is cached within an iteration, and the process may be paused in the middle of one.
        if monotonic() - seen_at > SERVE_WITHOUT_CONTACT_S:
            raise problem("unavailable", "this shard has no contact with a scheduler or Redis")

    def confirm(self, *, scheduler_at: float | None = None, redis_at: float | None = None) -> None:
        """Record that the scheduler or Redis confirmed this shard, in reply to a request sent at the given time."""
        self._scheduler_seen_at = self._scheduler_seen_at if scheduler_at is None else scheduler_at
        self._redis_seen_at = self._redis_seen_at if redis_at is None else redis_at
        seen_at = max(self._scheduler_seen_at, self._redis_seen_at)
        if not self.closed:
            self.on_changed(seen_at, seen_at + SERVE_WITHOUT_CONTACT_S)

    def end(self) -> None:
        """Stop serving until the next confirmation: the membership has ended."""
        self._scheduler_seen_at = self._redis_seen_at = _NEVER
        self.on_changed(0.0, 0.0)

    def close(self) -> None:
        """Stop serving, for good."""
        self.closed = True
        self.on_changed(0.0, 0.0)
