"""Data whose ranges the simulated workers lease: what they have worked on."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

RANGES: Final = 8
PASSES: Final = 3
ASSIGNMENTS: Final = ("dynamic", "static")


class Tasks:
    """The ranges that workers were done with, and how often."""

    def __init__(self) -> None:
        self._times = Counter[tuple[int, int]]()
        self._done_s: dict[tuple[int, int], float] = {}
        """When a worker first knew that its report of a range counts."""

    def worked_on(self, task: Mapping[str, Any]) -> None:
        """Note that a worker has worked on a range, and will report that."""
        self._times[task["pass"], task["index"]] += 1

    def done(self, task: Mapping[str, Any], now: float) -> None:
        """Note that the report of a range was confirmed."""
        self._done_s.setdefault((task["pass"], task["index"]), now)

    def leased(self, task: Mapping[str, Any], asked_s: float) -> None:
        """Assert that a range that was asked for then was not known to be done before."""
        at = task["pass"], task["index"]
        assert asked_s <= self._done_s.get(at, asked_s), f"{at} is handed out again, but was done"

    def check(self, document: Mapping[str, Any], *, once: bool) -> None:
        """Assert that all ranges were worked on, each in every pass, exactly `once` if no worker joined again."""
        assert document["finished"], f"there is data left: {document}"
        assert not document["leased"], f"finished data is leased: {document}"
        for at in [(p, i) for p in range(PASSES) for i in range(RANGES)]:
            assert self._times[at] == 1 or (self._times[at] and not once), f"{at} was worked on {self._times[at]} times"
        assert len(self._times) == PASSES * RANGES, f"ranges that do not exist: {self._times}"
