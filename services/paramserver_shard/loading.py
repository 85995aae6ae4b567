"""Loads a partition's first state: the newest intact snapshot and the journal after it, or initial values.

Damage is detected by checksums.  The previous snapshot is used then, and the journal after it leads to the same state;
without a journal (level `applied`) the changes between the two are lost, and the log says so.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from paramserver.core.partition_state import LoadedState
from paramserver.core.shard.effects import LoadPartition, Task
from paramserver.core.shard.events import TaskResult
from paramserver.core.shard.initial import first_state, has_assigned_values
from paramserver.core.shard.replay import replay
from paramserver.errors import CorruptState, PsError, problem
from paramserver.types import PartitionKey, Token
from paramserver_shard.buffers import BufferPool, unavailable_if_full
from paramserver_shard.computing import compute
from paramserver_shard.journal import Journal
from paramserver_shard.snapshot_store import SnapshotStore

log = logging.getLogger("paramserver.shard")

LOADS_AT_ONCE: Final = 64
"""Partitions that ask Redis at the same time; each has a connection, and a shard may be given thousands at once."""
REPLAYS_AT_ONCE: Final = 8
"""Of these, partitions whose journals are read and replayed: pages of up to 16 MiB in Redis, and all of it here."""
FIRST_INLINE_MAX: Final = 4096
"""Elements up to which initial values are made on the event loop: a model's partitions are loaded all at once."""


class Loader:
    """Reads partitions.  Raises RedisError or OSError when Redis does not answer."""

    def __init__(
        self,
        store: SnapshotStore,
        journal: Journal,
        pool: BufferPool,
        submit: Callable[[Callable[[], LoadedState]], Awaitable[LoadedState]],
        owns: Callable[[PartitionKey, Token], bool],
    ) -> None:
        """`submit` starts work in a compute thread; `owns` says whether a load is still wanted."""
        self._store = store
        self._journal = journal
        self._pool = pool
        self._submit, self._owns = submit, owns
        self._loads, self._replays = asyncio.Semaphore(LOADS_AT_ONCE), asyncio.Semaphore(REPLAYS_AT_ONCE)

    async def load(self, effect: LoadPartition) -> LoadedState:
        """Return the state that the partition starts from.

        Raises CorruptState (`corrupt_state`) if stored state is damaged beyond repair, Unavailable
        (`storage_unavailable`, `unavailable`) while Redis lacks the owner token or the shard the memory, FencedError
        (`fenced`) if the ownership has ended.
        """
        # This says nothing about what is stored: as damage it would be deleted by the next save.
        with unavailable_if_full(f"partition {effect.key}"):
            if effect.source == "init" and effect.spec.ack == "applied":
                return await self._first(effect)
            async with self._loads:
                self._check_owned(effect)
                return await self._stored(effect)

    def _check_owned(self, effect: LoadPartition) -> None:
        """Raise FencedError if the load is of an ownership that has ended while it waited, as after a rollback."""
        if not self._owns(effect.key, effect.token):
            raise problem("fenced", f"partition {effect.key} is not this shard's under token {effect.token} any more")

    async def _stored(self, effect: LoadPartition) -> LoadedState:
        key, source = effect.key, effect.source
        if not await self._store.has_token(key, effect.token):
            raise problem("storage_unavailable", f"Redis has lost its state; partition {key} waits for its new token")
        manifest = await self._store.manifest(key)
        if isinstance(source, int):
            return await self._cut(effect, source, manifest)
        errors: list[PsError] = []
        for entry in manifest:
            loaded = await self._store.read(key, entry)
            if loaded is None:
                errors.append(problem("corrupt_state", f"the snapshot of version {entry['version']} is damaged"))
                continue
            try:
                loaded = await self._continued(effect, loaded)
            except CorruptState as error:
                errors.append(error)
                continue
            for reason in errors:
                log.error("partition %s: version %d is used instead: %s", key, loaded.version, reason)
            return loaded
        return await self._from_the_beginning(effect, errors)

    async def _from_the_beginning(self, effect: LoadPartition, errors: Sequence[PsError]) -> LoadedState:
        """Load a partition without an intact snapshot; `errors` are those of its damaged ones.

        A journal that was never truncated leads from the initial values to the same state.
        """
        first = await self._first(effect)
        try:
            loaded = await self._continued(effect, first)
        except CorruptState as error:
            raise errors[0] if errors else error from None
        if loaded is not first:
            return loaded
        if errors:
            details = "; ".join(e.detail for e in errors)
            raise problem("corrupt_state", f"partition {effect.key} cannot be restored: {details}")
        if effect.source != "init" and has_assigned_values(effect):
            raise _never_stored(effect)
        return first

    async def _cut(self, effect: LoadPartition, clock: int, manifest: Sequence[Mapping[str, Any]]) -> LoadedState:
        """Load the partition as it was stored at that clock."""
        key = effect.key
        for entry in manifest:
            if entry["cut"] == clock and (loaded := await self._store.read(key, entry)) is not None:
                return loaded
        if manifest:
            raise problem("corrupt_state", f"the cut at clock {clock} of partition {key} cannot be restored")
        if has_assigned_values(effect):
            raise _never_stored(effect)
        return await self._first(effect)

    async def _continued(self, effect: LoadPartition, loaded: LoadedState) -> LoadedState:
        """Replay the journal after `loaded`, if the level has one.  Raises CorruptState if it cannot be replayed."""
        if effect.spec.ack == "applied":
            return loaded
        async with self._replays:
            self._check_owned(effect)
            return await self._replayed(effect, loaded)

    async def _replayed(self, effect: LoadPartition, loaded: LoadedState) -> LoadedState:
        entries = await self._journal.read(effect.key, loaded.lsn)
        if not entries:
            return loaded

        def work() -> LoadedState:
            def computed(task: Task) -> TaskResult:
                return compute((task,), self._pool)[0]

            return replay(effect.key, loaded, entries, effect.spec, effect.layout, computed)

        log.info("partition %s: replaying %d entries after version %d", effect.key, len(entries), loaded.version)
        return await self._submit(work)

    async def _first(self, effect: LoadPartition) -> LoadedState:
        work = partial(first_state, effect, partial(self._pool.take, shared=True))
        if effect.layout.partition_size(effect.key.index) <= FIRST_INLINE_MAX:
            return work()
        return await self._submit(work)


def _never_stored(effect: LoadPartition) -> PsError:
    """The error for initial values that cannot be generated again; heartbeats report it to the scheduler (`lost`)."""
    return problem("corrupt_state", f"partition {effect.key}: its initial values were never stored", never_stored=True)
