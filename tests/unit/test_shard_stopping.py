"""A shard that stops: what arrives after its runtime has closed."""

import asyncio
from typing import Any, cast
from unittest.mock import Mock

import pytest

from paramserver.core.layout import Layout
from paramserver.core.shard import ShardCore
from paramserver.core.shard_events import ModelView, PullReceived
from paramserver.core.spec import ModelSpec
from paramserver.errors import Unavailable
from paramserver.types import ModelKey, make_token
from paramserver_shard.buffers import BufferPool
from paramserver_shard.directory import Directory
from paramserver_shard.runtime import Runtime

SPEC = ModelSpec.parse({"name": "m", "params": {"w": {"shape": [8]}}, "partitions": 1})


@pytest.mark.parametrize("loading", [False, True], ids=["later", "while it loads"])
def test_a_partition_that_is_assigned_to_a_stopping_shard_does_not_end_it(loading: bool) -> None:
    """A map that names a stopping shard as an owner, just before or after it closes, loads and raises nothing."""
    view = ModelView(ModelKey("m", 1), SPEC, Layout(SPEC), 0, 0, 0, True, {0: make_token(1, 1)}, "init", {})

    async def stop() -> None:
        async with asyncio.TaskGroup() as group:
            unused = cast(Any, Mock())
            runtime = Runtime(ShardCore(), Directory("s"), BufferPool(), unused, unused, group)
            runtime.scheduler = unused
            if loading:
                runtime.feed(view)
            runtime.close()
            if not loading:
                runtime.feed(view)
            with pytest.raises(Unavailable, match="is stopping"):
                await runtime.pull(lambda n: PullReceived(n, "m", (0,)))
            with pytest.raises(Unavailable, match="is stopping"):
                await runtime.submit(int)

    asyncio.run(stop())
