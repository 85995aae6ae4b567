"""Whole models that shards of this machine have lent to this client, for as long as they are the present.

A pull brings them, or the answer to a push, where pulls have followed pushes lately.  While the shards' boards confirm
the leases, the next pull is answered with them and no request is made: nobody could have told it anything else.
"""

import threading
from dataclasses import dataclass
from typing import Final

from paramserver.client.arrays import Origin
from paramserver.client.same_host import Held, SameHost

IN_VAIN_MAX: Final = 3
"""After so many answers to pushes whose values were past before anybody pulled, few are asked for any more."""
RARELY: Final = 16


@dataclass(slots=True)
class _Model:
    held: Held | None = None
    origin: Origin | None = None
    unused: bool = False
    """It came with a push and was not pulled yet."""
    pulled: bool = False
    """Somebody has pulled since the last push."""
    in_vain: int = 0
    pushes: int = 0


class Present:
    """What one client holds; safe between threads."""

    def __init__(self, same_host: SameHost) -> None:
        self._same_host = same_host
        self._lock = threading.Lock()
        self._models: dict[str, _Model] = {}

    def of(self, model: str, generation: int, timeline: int | None, min_version: int) -> tuple[Held, Origin] | None:
        """What a pull of all of that model would bring now; None where only a request can tell."""
        with self._lock:
            m = self._models.get(model)
            if m is None or m.held is None or m.origin is None:
                return None
            held, origin = m.held, m.origin
        fits = origin.generation == generation and origin.version >= min_version
        if not fits or timeline not in (None, origin.timeline) or not self._same_host.confirmed(held.leased):
            return None
        m.pulled, m.unused, m.in_vain = True, False, 0
        return held, origin

    def pulled(self, origin: Origin, held: Held) -> None:
        """A pull has brought these."""
        with self._lock:
            m = self._models.setdefault(origin.model, _Model())
            m.in_vain += m.unused
            m.held, m.origin, m.unused, m.pulled = held, origin, False, True

    def pushed(self, origin: Origin, held: Held) -> None:
        """These came with the answer to a push."""
        with self._lock:
            m = self._models.setdefault(origin.model, _Model())
            m.in_vain += m.unused
            m.held, m.origin, m.unused = held, origin, True

    def wanted(self, model: str) -> bool:
        """Whether the push that is made now is to bring what it makes; to be asked once for each push."""
        with self._lock:
            m = self._models.get(model)
            if m is None:
                return False
            m.pushes += 1
            pulled, m.pulled = m.pulled, False
            return pulled and (m.in_vain < IN_VAIN_MAX or m.pushes % RARELY == 0)
