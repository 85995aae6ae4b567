"""How the writing of journals ends."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import pytest

from paramserver.core.journal import JournalEntry
from paramserver.types import ModelKey, PartitionKey
from paramserver_shard.journal import Batch, Verdict
from paramserver_shard.journal_writer import JournalWriter

pytestmark = pytest.mark.asyncio


class Deaf:
    """A journal whose client loses the cancellation of a write that is just being done."""

    def __init__(self) -> None:
        self.writing = asyncio.Event()

    async def probe(self, *, fsync: bool) -> None:
        """It can be written."""

    async def append(self, batches: Sequence[Batch], *, fsync: bool) -> list[Verdict]:
        """Ends well when it is cancelled."""
        self.writing.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return [Verdict.WRITTEN] * len(batches)


async def test_it_ends_though_the_client_of_redis_has_lost_the_cancellation() -> None:
    """As `asyncio.wait_for` of Python 3.11 does, by which that client sends: the process would never end."""
    journal: Any = Deaf()
    writer = JournalWriter(journal, Mock(), Mock(return_value=True))
    writing = asyncio.ensure_future(writer.run())
    writer.add([JournalEntry(PartitionKey(ModelKey("m", 1), 0), 1, 1, "drop", {}, ())], False)
    await journal.writing.wait()
    writing.cancel()
    await asyncio.wait([writing], timeout=5.0)
    assert writing.done()
