"""Where a partition's first state comes from: the newest good snapshot and the journal after it, or initial values.

What is damaged is noticed by its checksum.  The snapshot before stands in, and the journal after that one leads to the
same state; where there is no journal (level `applied`) what was changed between the two is lost, and the log says so.
"""

import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

from paramserver.core.shard_io import LoadedState, LoadPartition
from paramserver.errors import problem
from paramserver_shard.buffers import BufferPool
from paramserver_shard.computing import INLINE_ELEMENTS_MAX
from paramserver_shard.journal import Journal
from paramserver_shard.snapshots import first_state, from_stored, set_later
from paramserver_shard.store import SnapshotStore

log = logging.getLogger("paramserver.shard")
T = TypeVar("T")


class Offload(Protocol):
    """Runs work in a compute thread."""

    def __call__(self, work: Callable[[], T]) -> Coroutine[Any, Any, T]: ...


class Loader:
    """Reads partitions.  Raises RedisError or OSError when Redis does not answer."""

    def __init__(self, store: SnapshotStore, journal: Journal, pool: BufferPool, offload: Offload) -> None:
        self._store = store
        self._journal = journal
        self._pool = pool
        self._offload = offload

    async def load(self, effect: LoadPartition) -> LoadedState:
        """The state that the partition begins with.

        Raises CorruptState where stored state is damaged beyond repair, Unavailable while Redis lacks the owner token.
        """
        key, source = effect.key, effect.source
        if source == "init":
            return await self._first(effect)
        if not await self._store.knows(key, effect.token):
            raise problem("storage_unavailable", f"Redis has lost its state; partition {key} waits for its new token")
        manifest = await self._store.manifest(key)
        wanted = [e for e in manifest if not isinstance(source, int) or e["cut"] == source]
        if not wanted and not (manifest and isinstance(source, int)):
            if set_later(effect.spec, effect.layout, key.index):
                reason = f"partition {key}: its first values were never stored"
                raise problem("corrupt_state", reason, never_stored=True)
            return await self._first(effect)
        for entry in wanted:
            stored = await self._store.read(key, entry)
            if stored is None:
                log.error("partition %s: its snapshot of version %d is damaged", key, entry["version"])
                continue
            if entry is not manifest[0]:
                log.error("partition %s: its snapshot of version %d is used", key, entry["version"])
            return from_stored(stored.head, stored.arrays)
        which = f"the cut at clock {source} of" if isinstance(source, int) else "the snapshots of"
        raise problem("corrupt_state", f"{which} partition {key} cannot be read back whole")

    async def _first(self, effect: LoadPartition) -> LoadedState:
        work = partial(first_state, effect.spec, effect.layout, effect.key.index, self._pool.take)
        if effect.layout.partition_size(effect.key.index) <= INLINE_ELEMENTS_MAX // 16:
            return work()
        return await self._offload(work)
