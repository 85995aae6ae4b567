"""A push that one shard spreads over the owners of its partitions."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from paramserver.core.layout import Layout
from paramserver.core.served_model import wrong_owner
from paramserver.core.shard_io import PartVersion, PushDone, PushPart, PushReceived
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError, problem
from paramserver.types import ModelKey
from paramserver.wire.frame import PushReply
from paramserver_shard.directory import Directory, KnownModel
from paramserver_shard.exchange import Exchange

KEY = ModelKey("m", 1)


class Fenced:
    """A shard that has lost its partitions by the time it has computed: what it might spend holds something else."""

    async def push(self, event: Callable[[int], PushReceived]) -> Any:
        for part in event(1).parts:
            if part.exclusive_buffer:
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
    part = PushPart(0, np.full(4, 0.5, np.float32), "float32", None, True, exclusive_buffer=True)

    done = await Exchange(directory, cast(Any, Fenced()), cast(Any, peers)).push(known, PushReceived(0, "m", (part,)))

    assert done.state == "applied"
    assert [a.tolist() for a in peers.got] == [[0.5] * 4]


class Applying:
    """This shard, which applies what it owns."""

    async def push(self, event: Callable[[int], PushReceived]) -> PushDone:
        parts = tuple([PartVersion(p.partition, 1, 1, 0) for p in event(1).parts])
        return PushDone(KEY, 0, "applied", False, 1, 0, 1, parts)


class Failing:
    """Other shards, one for each error."""

    def __init__(self, **errors: PsError) -> None:
        self.errors = errors

    async def call(self, url: str, *_: Any) -> Any:
        raise self.errors[url.removeprefix("http://").removesuffix("/push")]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("errors", "code", "partitions"),
    [
        ({"b": "unavailable"}, "in_doubt", [0]),
        ({"b": "unavailable", "c": "in_doubt"}, "in_doubt", [0]),
        ({"b": "non_finite", "c": "unavailable"}, "non_finite", [0]),
        ({"b": "non_finite", "c": "in_doubt"}, "in_doubt", [0]),
        ({"b": "wrong_owner"}, "in_doubt", [0]),
    ],
)
async def test_a_push_of_which_owners_may_have_taken_parts_is_told_as_that(
    errors: dict[str, str], code: str, partitions: list[int]
) -> None:
    """A second one without an id would count twice there: nobody is told that it may be sent again without one."""
    names = ["me", *errors]
    layout = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [9]}}, "partitions": len(names)}))
    known = KnownModel(KEY, layout, 0, "ready", tuple((name, 1) for name in names), None, None)
    directory = Directory("me")
    directory.models["m"] = known
    directory.addresses = {name: (f"http://{name}",) for name in errors}
    others = Failing(**{name: problem(text, "it says why") for name, text in errors.items()})
    parts = [
        PushPart(i, np.ones(layout.partition_size(i), np.float32), "float32", None, True) for i in range(len(names))
    ]

    with pytest.raises(PsError) as e:
        await Exchange(directory, cast(Any, Applying()), cast(Any, others)).push(
            known, PushReceived(0, "m", tuple(parts))
        )

    assert (e.value.code, e.value.members.get("partitions")) == (code, partitions)


def replace_owner(known: KnownModel) -> KnownModel:
    """The model after the move."""
    return KnownModel(known.key, known.layout, 0, "ready", (("other", 2),), None, None)
