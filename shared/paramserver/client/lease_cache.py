"""Values of whole models, leased from shards on this machine and reused by pulls for as long as they are current.

They come with the answer to a pull or, if pulls have followed pushes lately, to a push.  While the shards' boards
confirm the leases, the next pull returns these values without a request: a shard would answer with the same ones.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from paramserver.client.arrays import Origin
from paramserver.client.same_host import LeasedValues, SameHost
from paramserver.net.forks import call_in_forked_child

KEPT_MAX: Final = 8
"""Models with entries; the least recently used one is evicted first."""
IN_VAIN_MAX: Final = 3
"""After this many pushes in a row whose values were replaced before a pull used them, most pushes ask for none."""
RARELY: Final = 16
"""Then only every 16th push asks for values."""


@dataclass(slots=True)
class _Model:
    found: tuple[LeasedValues, Origin] | None = None
    clock: int = 0
    """sync: lower bound on the commits that the values include; they may include more than the pull asked for."""
    unused: bool = False
    """The values came with a push, and no pull has used them yet."""
    pulled: bool = False
    """Whether there was a pull since the last push."""
    in_vain: int = 0
    """Values that came with pushes and were replaced unused, since a pull last used any."""
    pushes: int = 0


class LeaseCache:
    """The current values that one client holds.  Safe between threads; empty in a forked child."""

    def __init__(self, same_host: SameHost) -> None:
        self._same_host = same_host
        self._begin()
        call_in_forked_child(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._models: OrderedDict[str, _Model] = OrderedDict()

    def drop(self) -> None:
        """Forget all values, because the client is closed."""
        with self._lock:
            self._models.clear()

    def lookup(
        self, model: str, generation: int, timeline: int | None, min_version: int, min_clock: int = 0
    ) -> tuple[LeasedValues, Origin] | None:
        """Return what a pull of the whole model would return now; None if that takes a request."""
        with self._lock:
            m = self._models.get(model)
            found = None if m is None else m.found
            if m is None or found is None:
                return None
            leased_values, origin = found
            if origin.generation != generation or not self._same_host.confirmed(leased_values.leased):
                m.found = None  # this releases its leases; the request that follows reports that to the shards
                return None
            if origin.version < min_version or m.clock < min_clock or timeline not in (None, origin.timeline):
                return None
            m.pulled, m.unused, m.in_vain = True, False, 0
            self._models.move_to_end(model)
            return found

    def keep(self, origin: Origin, leased_values: LeasedValues, clock: int = 0, *, pushed: bool = False) -> None:
        """Keep the values of a pull or, if `pushed`, of the answer to a push; they include at least `clock` commits."""
        with self._lock:
            m = self._models.setdefault(origin.model, _Model())
            m.in_vain += m.unused
            m.found, m.clock, m.unused = (leased_values, origin), clock, pushed
            m.pulled |= not pushed
            self._models.move_to_end(origin.model)
            if len(self._models) > KEPT_MAX:
                self._models.popitem(last=False)

    def should_request_values(self, model: str) -> bool:
        """Whether the current push should ask for the values it produces.  To be called once per push."""
        with self._lock:
            m = self._models.get(model)
            if m is None:
                return False
            m.pushes += 1
            pulled, m.pulled = m.pulled, False
            return pulled and (m.in_vain < IN_VAIN_MAX or m.pushes % RARELY == 0)
