"""A push that one shard spreads over the owners of its partitions."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from paramserver.core.layout import Layout
from paramserver.core.served_model import wrong_owner
from paramserver.core.shard_io import PushPart, PushReceived
from paramserver.core.spec import ModelSpec
from paramserver.types import ModelKey
from paramserver.wire.frame import PushReply
from paramserver_shard.directory import Directory, KnownModel
from paramserver_shard.exchange import Exchange

KEY = ModelKey("m", 1)


class Fenced:
    """A shard that has lost its partitions by the time it has computed: what it might spend holds something else."""

    async def push(self, event: Callable[[int], PushReceived]) -> Any:
        for part in event(1).parts:
            if part.owned:
                part.data[:] = 77.0
        raise wrong_owner(KEY, 0, 2)


class Peers:
    """The shard that has them now."""

    def __init__(self) -> None:
        self.got: list[np.ndarray[Any, Any]] = []

    async def call(self, url: str, frame: Any, arrays: Any, kind: Any) -> tuple[PushReply, None]:
        self.got += [np.array(a) for a in arrays]
        parts = [(p.partition, 1, 2, 0) for p in frame.parts]
        return PushReply("applied", False, 1, 0, 2, 0, parts), None


@pytest.mark.asyncio
async def test_what_was_refused_after_it_was_computed_is_sent_on_as_it_came() -> None:
    """The next owner gets the gradient, whatever was computed where it lies."""
    layout = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [4]}}, "partitions": 1}))
    known = KnownModel(KEY, layout, 0, "ready", (("me", 1),), None, None)
    directory, peers = Directory("me"), Peers()
    directory.models["m"] = replace_owner(known)
    directory.addresses = {"other": ("http://other",)}
    part = PushPart(0, np.full(4, 0.5, np.float32), "float32", None, True, owned=True)

    done = await Exchange(directory, cast(Any, Fenced()), cast(Any, peers)).push(known, PushReceived(0, "m", (part,)))

    assert done.state == "applied"
    assert [a.tolist() for a in peers.got] == [[0.5] * 4]


def replace_owner(known: KnownModel) -> KnownModel:
    """The model after the move."""
    return KnownModel(known.key, known.layout, 0, "ready", (("other", 2),), None, None)
