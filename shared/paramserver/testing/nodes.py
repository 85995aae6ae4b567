"""A simulated process: it performs effects in order, may crash after each, can be paused, and sends Redis commands."""

from collections.abc import Callable
from typing import Any, TypeVar

from paramserver.testing.storage import SimRedis
from paramserver.testing.world import Answer, Call, Delivery, World

T = TypeVar("T")

REDIS_S = 1.0
"""Timeout of Redis commands."""


class Node:
    """One process of the cluster."""

    def __init__(self, world: World, name: str, redis: SimRedis) -> None:
        self.world, self.name, self.redis = world, name, redis
        self.up = False
        self.deaths = 0
        self.paused_until_s = 0.0
        self._free_at = 0.0
        self._numbers = 0
        self._waiting: dict[int, Answer] = {}

    def start(self) -> None:
        """Start with no state but what Redis holds."""
        raise NotImplementedError

    def crash(self) -> None:
        """Crash now; restart after a while."""
        if not self.up:
            return
        self.up = False
        self.deaths += 1
        self._waiting.clear()
        self._free_at = self.paused_until_s = 0.0
        self.world.after(self.world.rng.uniform(*self.world.faults.down_s), f"start {self.name}", self.start)

    def pause(self, seconds: float) -> None:
        """Stop for a while without noticing.  A pause in progress is not extended: that would reorder the actions that
        wait for its end."""
        if self.paused_until_s <= self.world.now:
            self.paused_until_s = self.world.now + seconds

    def later(self, delay_s: float, what: str, action: Callable[[], None]) -> None:
        """Run `action` after a delay, and not before a pause is over; drop it if this process has crashed by then."""
        life = self.deaths

        def act() -> None:
            if not self.up or self.deaths != life:
                return
            if self.paused_until_s > self.world.now:
                self.world.after(self.paused_until_s - self.world.now, f"{self.name} wakes: {what}", act)
            else:
                action()

        self.world.after(delay_s, f"{self.name}: {what}", act)

    def in_turn(self, what: str, action: Callable[[], None]) -> None:
        """Run `action` after all earlier ones given to this method; the process may crash right after it."""

        def act() -> None:
            action()
            if self.up and self.world.chance(self.world.faults.crash) and self.world.now >= self.world.calm_until_s:
                self.crash()

        self._free_at = max(self._free_at, self.world.now) + self.world.rng.uniform(1e-5, 2e-3)
        self.later(self._free_at - self.world.now, what, act)

    def number(self, answer: Answer) -> int:
        """Return a number for a request whose outcome is to go to `answer`."""
        self._numbers += 1
        self._waiting[self._numbers] = answer
        return self._numbers

    def answer(self, request: int, outcome: Any) -> None:
        """Deliver the outcome of a request; ignored if it already had one."""
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            waiting(outcome)

    def call(self, what: str, source: str, take: Delivery, *, once: bool = False) -> Call:
        """Return a request to this process, which `take` handles on arrival."""

        def deliver(answer: Answer) -> None:
            if self.up:
                self.later(0.0, what, lambda: take(answer))

        return Call(f"{source} to {self.name}: {what}", deliver, self.name, source, once)

    def ask_redis(self, what: str, work: Callable[[SimRedis], T], done: Callable[[T | None], None]) -> None:
        """Run one atomic command and pass its result to `done`; None if no answer came, whether it ran or not."""
        open_ = True

        def settle(outcome: T | None) -> None:
            nonlocal open_
            if open_:
                open_ = False
                done(outcome)

        def arrive() -> None:
            if self.redis.down:
                return
            outcome = work(self.redis)
            if self.world.arrives("redis", self.name):
                self.later(self.world.delay(), f"redis says {what}", lambda: settle(outcome))

        if self.world.arrives(self.name, "redis"):
            self.world.after(self.world.delay(), f"redis does {what} of {self.name}", arrive)
        self.later(REDIS_S, f"redis silent {what}", lambda: settle(None))
