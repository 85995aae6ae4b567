"""Connections that wait for their next request."""

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from paramserver.net.forks import call_in_forked_child

KEPT_MAX: Final = 32
"""Idle connections kept for each address: as many as one call uses at once (`client.uploads.AT_ONCE`)."""


class _Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


class Idle(Generic[C]):
    """Idle connections by address.  Safe between threads; empty in a forked child, as they are the parent's."""

    def __init__(self, still_open: Callable[[C], bool]) -> None:
        """`still_open` says whether a kept connection can be used again."""
        self._still_open = still_open
        self._closed = False
        self._begin()
        call_in_forked_child(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._kept = defaultdict[str, list[C]](list)

    def addresses(self) -> list[str]:
        """Return the addresses that have idle connections."""
        with self._lock:
            return list(self._kept)

    def take(self, address: str) -> C | None:
        """Take a connection that is still open; None if there is none."""
        while True:
            with self._lock:
                kept = self._kept[address]
                connection = kept.pop() if kept else None
                if not kept:
                    del self._kept[address]
            if connection is None or self._still_open(connection):
                return connection
            connection.close()

    def keep(self, address: str, connection: C) -> None:
        """Keep a connection for a later request, or close it if there are enough, or after `close`."""
        with self._lock:
            if not self._closed and len(self._kept[address]) < KEPT_MAX:
                self._kept[address].append(connection)
                return
        connection.close()

    def drop(self, address: str) -> None:
        """Close the connections to an address that is down, so that no later request tries them one by one."""
        with self._lock:
            dropped = self._kept.pop(address, [])
        for connection in dropped:
            connection.close()

    def close(self) -> None:
        """Close all of them, and keep no more."""
        self._closed = True
        for address in self.addresses():
            self.drop(address)
