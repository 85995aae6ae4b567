"""What the entity tag of a parameter tells apart."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from tests.refusals import refused_with

from paramserver.core.layout import Layout
from paramserver.core.spec import ModelSpec
from paramserver.errors import ConflictError
from paramserver.types import ModelKey
from paramserver_node.conditions import Conditions
from paramserver_shard.arrays import ArrayService, etag
from paramserver_shard.directory import KnownModel
from paramserver_shard.exchange import GotPart, WantedPart

LAYOUT = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [4]}}, "partitions": 2}))
KNOWN = KnownModel(ModelKey("m", 1), LAYOUT, 0, "ready", (("s", 5), ("s", 6)), None, None)


class Shards:
    """The model and its partitions, each at version 3, whose owners the test changes."""

    def __init__(self) -> None:
        self.incarnations = [5, 6]

    async def find(self, model: str) -> KnownModel:
        """Find the model."""
        return KNOWN

    async def pull(self, known: KnownModel, wanted: Sequence[WantedPart], **_: Any) -> dict[int, GotPart]:
        """Pull what is wanted."""
        values = (np.zeros(1, np.float32),)
        return {p.partition: GotPart(p.partition, 3, self.incarnations[p.partition], 0, values) for p in wanted}


@pytest.mark.parametrize("died", [0, 1])
async def test_a_version_that_is_reached_again_under_another_owner_has_another_etag(died: int) -> None:
    """At `applied` a death takes versions back, and other pushes lead to them again: a copy of before is not current.

    A change that is conditional on the value of before is refused, too.
    """
    shards = Shards()
    service = ArrayService(*[cast(Any, shards)] * 4)

    async def get(given: Conditions) -> Any:
        return await service.get("m", "w", given, lambda _: None, head=True)

    tag = (await get(Conditions())).etag
    assert (await get(Conditions(match=tag, none_match=tag))).unchanged
    shards.incarnations[died] = 7

    assert not (await get(Conditions(none_match=tag))).unchanged
    with refused_with("precondition_failed", ConflictError):
        await get(Conditions(match=tag))


def test_an_etag_is_of_one_creation_and_of_each_version() -> None:
    """The creation of the model and the version of each partition are part of the tag."""

    def tag(versions: Sequence[int], generation: int = 1) -> str:
        known = replace(KNOWN, key=ModelKey("m", generation))
        return etag(known, [GotPart(i, version, 5 + i, 0, ()) for i, version in enumerate(versions)])

    assert tag([3, 3]) == tag([3, 3])
    assert len({tag([3, 3]), tag([4, 3]), tag([3, 4]), tag([3, 3], generation=2)}) == 4
