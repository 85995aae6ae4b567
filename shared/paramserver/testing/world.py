"""Virtual time, a seeded network and a trace, on which simulated nodes run.

All actions are entries of one heap, ordered by virtual time and then by creation, and all random choices come from one
seeded generator: the same seed gives the same run, whose trace has the same hash.
"""

import hashlib
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Final

from paramserver.errors import PsError, problem

TIMEOUT_S: Final = 5.0
"""Timeout of a request."""


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of a run; probabilities are per message or per effect unless noted."""

    drop: float = 0.02
    duplicate: float = 0.05
    crash: float = 0.0005
    """A node crashes right after an effect."""
    feed_cut: float = 0.005
    pause: float = 0.0
    """Per second: some process is stopped for a while, as by SIGSTOP."""
    cut: float = 0.0
    """Per second: messages from one process to another are lost for a while, in that direction only."""
    redis_away: float = 0.0
    """Per second: Redis does not answer for a while."""
    empty_at_s: float | None = None
    """When Redis loses everything, once."""
    redis_restarts_s: tuple[float, float] | None = None
    """Range of the time between restarts of Redis, which then lacks the last of what was written, up to `lag_s`."""
    lag_s: float = 1.5
    drain: float = 0.0
    """Per second: a shard is drained for a while."""
    stop: float = 0.0
    """Per second: a shard is asked to stop, as by SIGTERM; it hands over or stores what it has, and starts again."""
    store_s: float = 0.0
    """Longest time to write the blocks of a snapshot for which nobody waits."""
    compute_s: float = 0.05
    """Longest time to compute the tasks of one event."""
    delay_s: tuple[float, float] = (0.001, 0.05)
    """Range of each message's delay; messages can overtake one another."""
    down_s: tuple[float, float] = (0.2, 9.0)
    """Range of the time from a crash to the restart."""
    fault_duration_s: tuple[float, float] = (0.3, 8.0)
    """Range of the duration of a pause, a cut, a drain or an outage of Redis."""
    until_s: float = 60.0
    """No faults after this time, so that the run can finish."""


Answer = Callable[[Any], None]
Delivery = Callable[[Answer], None]
"""Handles a message on arrival; it answers immediately, later, or never."""
Script = Generator["Call | float", Any, Any]
"""A simulated client: yields a call and gets its outcome, or yields seconds to sleep."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request over the network."""

    what: str
    deliver: Delivery
    target: str
    """The process it is sent to."""
    source: str
    once: bool
    """Never delivered twice: the second delivery would count as another request."""


class World:
    """One simulated run."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.faults = faults
        self.rng = random.Random(seed)
        self.now = 0.0
        self.events = 0
        self.calm_until_s = 0.0
        """No node crashes before."""
        self.cuts: dict[tuple[str, str], float] = {}
        """(from, to) -> the time until which no message gets through."""
        self.log: list[str] = []
        """The newest lines of the trace, for failure reports."""
        self._heap: list[tuple[float, int, str, Callable[[], None]]] = []
        self._count = 0
        self._hash = hashlib.sha256()

    @property
    def trace(self) -> str:
        """Hash of everything that has happened so far."""
        return self._hash.hexdigest()

    @property
    def faults_active(self) -> bool:
        """Whether faults still happen."""
        return self.now < self.faults.until_s

    def chance(self, probability: float) -> bool:
        """Return True with this probability, but False once faults have ended."""
        return self.faults_active and self.rng.random() < probability

    def arrives(self, source: str, target: str) -> bool:
        """Whether a message sent now will arrive."""
        return self.cuts.get((source, target), 0.0) <= self.now and not self.chance(self.faults.drop)

    def fault_duration(self) -> float:
        """Draw the duration of a fault."""
        return self.rng.uniform(*self.faults.fault_duration_s)

    def after(self, delay_s: float, what: str, action: Callable[[], None]) -> None:
        """Schedule an action."""
        self._count += 1
        heappush(self._heap, (self.now + delay_s, self._count, what, action))

    def run(self, until_s: float, done: Callable[[], bool]) -> None:
        """Run actions until `done` returns True, none is left, or `until_s` is reached."""
        while self._heap and self._heap[0][0] <= until_s and not done():
            at, _, what, action = heappop(self._heap)
            self.now = at
            self.events += 1
            line = f"{at:.6f} {what}"
            self._hash.update(line.encode())
            self.log.append(line)
            del self.log[:-400]
            action()

    def delay(self) -> float:
        """Draw the delay of one message."""
        return self.rng.uniform(*self.faults.delay_s)

    def send(self, call: Call, on_answer: Answer) -> None:
        """Send a request, which may be lost or delivered twice; `on_answer` gets the first answer, or `in_doubt`."""
        open_ = True

        def settle(outcome: Any) -> None:
            nonlocal open_
            if open_:
                open_ = False
                on_answer(outcome)

        def answered(outcome: Any) -> None:
            if self.arrives(call.target, call.source):
                self.after(self.delay(), f"answer {call.what} {_named(outcome)}", lambda: settle(outcome))

        copies = 2 if not call.once and self.chance(self.faults.duplicate) else 1
        for _ in range(copies):
            if self.arrives(call.source, call.target):
                self.after(self.delay(), call.what, lambda: call.deliver(answered))
        late = problem("in_doubt", f"{call.what}: no answer within {TIMEOUT_S} s")
        self.after(TIMEOUT_S, f"timeout {call.what}", lambda: settle(late))

    def play(
        self,
        script: Script,
        send: Callable[[Call, Answer], None] | None = None,
        after: Callable[[float, str, Callable[[], None]], None] | None = None,
    ) -> None:
        """Run a client's script to its end; with the `send` and `after` of a process, it ends with that."""

        def step(value: Any) -> None:
            try:
                wanted = script.send(value)
            except StopIteration:
                return
            if isinstance(wanted, Call):
                (send or self.send)(wanted, step)
            else:
                (after or self.after)(wanted, "wake", lambda: step(None))

        step(None)


def _named(outcome: Any) -> str:
    return outcome.code if isinstance(outcome, PsError) else type(outcome).__name__
