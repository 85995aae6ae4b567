"""Traffic of each partition on this shard, which the scheduler uses to balance load."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from paramserver.core.ranges import RangeArray, elements
from paramserver.core.shard.effects import PullDone, PushDone
from paramserver.core.shard.events import PushReceived
from paramserver.types import ModelKey

INTERVAL_S: Final = 0.9
"""Rates are recomputed at most this often; a little less than the heartbeat interval."""
KEPT_PER_S: Final = 0.9
"""Decay of a smoothed rate per second: it follows a change within about ten seconds, but not a single burst."""
LOW_BYTES_PER_S: Final = 1.0


class Loads:
    """Bytes per second of each partition, smoothed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._bytes = defaultdict[ModelKey, Counter[int]](Counter)
        self._rates: dict[tuple[ModelKey, int], float] = {}

    def pushed(self, event: PushReceived, done: PushDone) -> None:
        """Count an accepted push."""
        loads = self._bytes[done.model]
        for part in event.parts:
            loads[part.partition] += part.data.nbytes

    def pulled(self, done: PullDone, ranges: Sequence[RangeArray | None] | None) -> None:
        """Count an answered pull; `ranges` are those requested of each part (None: all of it)."""
        loads = self._bytes[done.model]
        for i, part in enumerate(done.parts):
            wanted = None if ranges is None else ranges[i]
            loads[part.partition] += part.state.values.nbytes if wanted is None else 4 * elements(wanted)

    def rates(self) -> list[list[str | int | float]]:
        """Return [model, generation, index, bytes per second] of each partition with traffic."""
        now = self._clock()
        passed_s = now - self._since
        if passed_s >= INTERVAL_S:
            kept = KEPT_PER_S**passed_s
            carried = {(model, index): size for model, sizes in self._bytes.items() for index, size in sizes.items()}
            rates: dict[tuple[ModelKey, int], float] = {}
            for key in self._rates.keys() | carried.keys():
                rate = kept * self._rates.get(key, 0.0) + (1 - kept) * carried.get(key, 0) / passed_s
                if rate >= LOW_BYTES_PER_S:
                    rates[key] = rate
            self._bytes.clear()
            self._since, self._rates = now, rates
        return [[m.name, m.generation, index, round(rate, 1)] for (m, index), rate in self._rates.items()]
