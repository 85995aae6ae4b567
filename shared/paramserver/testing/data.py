"""Data whose ranges the simulated workers lease: what they have worked on."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

RANGES: Final = 8
PASSES: Final = 3


class Tasks:
    """The ranges that workers were done with, and how often."""

    def __init__(self) -> None:
        self._times = Counter[tuple[int, int]]()

    def worked_on(self, task: Mapping[str, Any]) -> None:
        """Note that a worker has worked on a range, and will report that."""
        self._times[task["pass"], task["index"]] += 1

    def check(self, document: Mapping[str, Any], *, once: bool) -> None:
        """Assert that all ranges were worked on, each in every pass, exactly `once` if no worker joined again."""
        assert document["finished"], f"there is data left: {document}"
        assert not document["leased"], f"finished data is leased: {document}"
        for at in [(p, i) for p in range(PASSES) for i in range(RANGES)]:
            assert self._times[at] == 1 or (self._times[at] and not once), f"{at} was worked on {self._times[at]} times"
        assert len(self._times) == PASSES * RANGES, f"ranges that do not exist: {self._times}"
