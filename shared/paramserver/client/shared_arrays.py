"""Read-only pulls that all threads of a client share, one for each model, selection and dtype."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Final

from paramserver.client import transfer
from paramserver.client.arrays import Params
from paramserver.client.cluster import Cluster
from paramserver.client.rows import Rows, ids_of, row_key
from paramserver.client.values import dtype_name
from paramserver.core.fields import whole_number
from paramserver.core.selection import Names, Ranges, listed, range_key
from paramserver.net.calls import Call, Deadline
from paramserver.net.forks import call_in_forked_child
from paramserver.types import DTypeLike

KEPT_MAX: Final = 8
"""Pulls that are kept; the least recently used one is evicted first."""


class SharedArrays:
    """The newest read-only pull of each selection that was pulled by version.

    Safe between threads; empty in a forked child.  What is never asked for by version is not kept: it may be a whole
    model, or memory that a shard has lent.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._begin()
        call_in_forked_child(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Params] = OrderedDict()

    def drop(self) -> None:
        """Forget all arrays, because the client is closed."""
        with self._lock:
            self._kept.clear()

    def pull(
        self,
        model: str,
        deadline: Deadline,
        *,
        names: Names | None = None,
        ranges: Ranges | None = None,
        rows: Rows | None = None,
        dtype: DTypeLike | None = None,
        min_version: int = 0,
        wait_s: float = 0.0,
    ) -> Call[Params]:
        """Return the kept arrays if `min_version` is given and they have reached it, else pull fresh ones."""
        min_version = whole_number("min_version", min_version)
        names, ranges = listed(names, ranges)
        rows = ids_of(rows)
        key = model, names, None if dtype is None else dtype_name(dtype), range_key(ranges), row_key(rows)
        if min_version and (kept := self._reached(key, model, min_version)) is not None:
            return kept
        options: dict[str, Any] = {"names": names, "ranges": ranges, "rows": rows, "dtype": dtype}
        options |= {"min_version": min_version, "wait_s": wait_s}
        fresh = yield from transfer.pull(self._cluster, model, deadline, view=True, **options)
        fresh = fresh.frozen()
        with self._lock:
            if min_version or key in self._kept:
                self._kept[key] = fresh
                self._kept.move_to_end(key)
            if len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
        return fresh

    def _reached(self, key: Hashable, model: str, min_version: int) -> Params | None:
        """Return the kept arrays if there are any and they have reached that version, else None."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None and found.origin.generation != self._cluster.generation(model):
                del self._kept[key]  # the model has been deleted or created again
                found = None
            if found is None or found.version < min_version:
                return None
            self._kept.move_to_end(key)
            return found
