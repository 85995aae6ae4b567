"""Stopping the journal writer."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

from paramserver.core.journal import JournalEntry
from paramserver.types import ModelKey, PartitionKey
from paramserver_shard.journal import Batch, Verdict
from paramserver_shard.journal_writer import JournalWriter


class Deaf:
    """A journal whose Redis client swallows the cancellation of a write in progress."""

    def __init__(self) -> None:
        self.writing = asyncio.Event()

    async def probe(self, *, fsync: bool) -> None:
        """Succeed: the journal can be written."""

    async def append(self, batches: Sequence[Batch], *, fsync: bool) -> list[Verdict]:
        """Wait until cancelled, then return as if the batches were written."""
        self.writing.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return [Verdict.WRITTEN] * len(batches)


async def test_it_ends_though_the_client_of_redis_has_lost_the_cancellation() -> None:
    """A cancelled writer ends even if the Redis client swallows the cancellation; else its process would never end.

    The client sends by `asyncio.wait_for`, which can do so in Python 3.11.
    """
    journal: Any = Deaf()
    writer = JournalWriter(journal, Mock(), Mock(return_value=True))
    writing = asyncio.ensure_future(writer.run())
    writer.add([JournalEntry(PartitionKey(ModelKey("m", 1), 0), 1, 1, "drop", {}, ())], False)
    await journal.writing.wait()
    writing.cancel()
    await asyncio.wait([writing], timeout=5.0)
    assert writing.done()
