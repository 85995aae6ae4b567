"""Read-only pulls that all threads of a client share, one for each model, selection and dtype."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final

from paramserver.client import transfer
from paramserver.client.arrays import Params
from paramserver.client.calls import Call, Deadline
from paramserver.client.cluster import Cluster
from paramserver.client.forks import call_in_forked_child
from paramserver.core.fields import whole_number
from paramserver.core.selection import listed

KEPT_MAX: Final = 8
"""Pulls that are kept; the least recently used one is evicted first."""


class SharedArrays:
    """The newest read-only pull of each selection.  Safe between threads; empty in a forked child."""

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
        options: dict[str, Any],
        wait_s: float,
        run: Callable[[Call[Params]], Params],
        deadline: Deadline,
    ) -> Params:
        """Return the kept arrays if they have reached `min_version`, else pull fresh ones."""
        kept = self.kept(model, options)
        if kept is not None:
            return kept
        pulling = transfer.pull(self._cluster, model, deadline, wait_s=wait_s, view=True, **options)
        return self.keep(model, options, run(pulling))

    def kept(self, model: str, options: dict[str, Any]) -> Params | None:
        """Return the kept arrays if `min_version` is given and they have reached it, else None.

        Normalizes `min_version`, `names` and `ranges` in `options`, so that iterators there can be read again.
        """
        options["min_version"] = whole_number("min_version", options["min_version"])
        options["names"], options["ranges"] = listed(options["names"], options["ranges"])
        if not options["min_version"]:
            return None
        with self._lock:
            key = _key(model, options)
            found = self._kept.get(key)
            if found is not None and found.origin.generation != self._cluster.generation(model):
                del self._kept[key]  # the model has been deleted or created again
                found = None
            if found is None or found.version < options["min_version"]:
                return None
            self._kept.move_to_end(key)
            return found

    def keep(self, model: str, options: dict[str, Any], fresh: Params) -> Params:
        """Make these arrays read-only, and share them from now on."""
        fresh = fresh.frozen()
        with self._lock:
            key = _key(model, options)
            self._kept[key] = fresh
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
        return fresh


def _key(model: str, options: dict[str, Any]) -> Hashable:
    return model, options["names"], options["dtype"], tuple(sorted(options["ranges"].items()))
