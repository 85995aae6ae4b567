"""Restores by a scheduler that ceases to lead."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from paramserver import checkpoint
from paramserver.core.spec import ModelSpec
from paramserver.errors import InDoubt
from paramserver_scheduler.checkpoints import CheckpointStore
from paramserver_scheduler.jobs import Jobs
from paramserver_scheduler.runtime import Answer

from .scheduling import SPEC, Driver


async def test_who_waits_for_a_restore_is_told_when_its_scheduler_leads_no_more(tmp_path: Path) -> None:
    """The restore is in doubt: the end of a term ends its jobs, and who waits for them is not cancelled with them."""
    d, begun = Driver.with_model(), asyncio.Event()
    values = {"w": np.zeros(64, np.float32)}
    checkpoint.write(tmp_path / "checkpoints" / "m" / "mine", ModelSpec.parse(SPEC), values, {}, {}, [], {}, {})

    async def ask(make: Any) -> Answer:
        return Answer(200, d.ask(make))

    async def set_all(*args: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def lead() -> None:
        async with asyncio.TaskGroup() as group:
            runtime: Any = SimpleNamespace(core=d.core, send=d.do, ask=ask)
            shards: Any = Mock(restore=set_all)
            jobs = Jobs(runtime, CheckpointStore(tmp_path), Mock(), shards, Mock(), Mock(), group, "s")
            restoring.append(asyncio.ensure_future(jobs.restore("m", "mine", "m", None)))
            await asyncio.Event().wait()

    restoring: list[asyncio.Future[Answer]] = []
    leading = asyncio.ensure_future(lead())
    await begun.wait()
    leading.cancel()

    with pytest.raises(InDoubt, match="leads no more") as told:
        await restoring[0]
    assert told.value.code == "in_doubt"
    assert not told.value.retryable
