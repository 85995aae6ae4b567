"""Whole models that shards of this machine have lent to this client, for as long as they are the present.

A pull brings them, or the answer to a push, where pulls have followed pushes lately.  While the shards' boards confirm
the leases, the next pull is answered with them and no request is made: nobody could have told it anything else.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from paramserver.client.arrays import Origin
from paramserver.client.forks import in_child
from paramserver.client.same_host import Held, SameHost

KEPT_MAX: Final = 8
"""Models of which something is held; the one used least lately goes first."""
IN_VAIN_MAX: Final = 3
"""After so many answers to pushes whose values were past before anybody pulled, few are asked for any more."""
RARELY: Final = 16


@dataclass(slots=True)
class _Model:
    found: tuple[Held, Origin] | None = None
    clock: int = 0
    """sync: commits that those values are known to have in them; more where the shards were not asked for any."""
    unused: bool = False
    """It came with a push and was not pulled yet."""
    pulled: bool = False
    """Somebody has pulled since the last push."""
    in_vain: int = 0
    pushes: int = 0


class Present:
    """What one client holds; safe between threads.  A forked child holds nothing at first."""

    def __init__(self, same_host: SameHost) -> None:
        self._same_host = same_host
        self._begin()
        in_child(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._models: OrderedDict[str, _Model] = OrderedDict()

    def drop(self) -> None:
        """Nothing is held any more: its client is closed."""
        with self._lock:
            self._models.clear()

    def of(
        self, model: str, generation: int, timeline: int | None, min_version: int, min_clock: int = 0
    ) -> tuple[Held, Origin] | None:
        """What a pull of all of that model would bring now; None where only a request can tell."""
        with self._lock:
            m = self._models.get(model)
            found = None if m is None else m.found
            if m is None or found is None:
                return None
            held, origin = found
            if origin.generation != generation or not self._same_host.confirmed(held.leased):
                m.found = None  # its lease is over, which the request that follows tells
                return None
            if origin.version < min_version or m.clock < min_clock or timeline not in (None, origin.timeline):
                return None
            m.pulled, m.unused, m.in_vain = True, False, 0
            self._models.move_to_end(model)
            return found

    def pulled(self, origin: Origin, held: Held, clock: int = 0) -> None:
        """A pull has brought these, in which so many commits are at least."""
        self._keep(origin, held, clock).pulled = True

    def pushed(self, origin: Origin, held: Held, clock: int = 0) -> None:
        """These came with the answer to a push, and so many commits are in them at least."""
        self._keep(origin, held, clock).unused = True

    def _keep(self, origin: Origin, held: Held, clock: int) -> _Model:
        with self._lock:
            m = self._models.setdefault(origin.model, _Model())
            m.in_vain += m.unused
            m.found, m.clock, m.unused = (held, origin), clock, False
            self._models.move_to_end(origin.model)
            if len(self._models) > KEPT_MAX:
                self._models.popitem(last=False)
            return m

    def wanted(self, model: str) -> bool:
        """Whether the push that is made now is to bring what it makes; to be asked once for each push."""
        with self._lock:
            m = self._models.get(model)
            if m is None:
                return False
            m.pushes += 1
            pulled, m.pulled = m.pulled, False
            return pulled and (m.in_vain < IN_VAIN_MAX or m.pushes % RARELY == 0)
