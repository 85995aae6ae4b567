"""A shard's view of the cluster, made from what a real scheduler's core publishes."""

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from tests.refusals import refused_with
from tests.unit.scheduling import Driver

from paramserver.core.scheduler import io
from paramserver.errors import FencedError, NotFoundError, Unavailable, problem
from paramserver_shard.arrays import ArrayService
from paramserver_shard.directory import Directory
from paramserver_shard.models import Models


def told(d: Driver) -> Directory:
    """Return the view of a shard that has just opened its feed."""
    directory = Directory("s0")
    follow(directory, d)
    return directory


def follow(directory: Directory, d: Driver) -> None:
    """Take in the complete state."""
    for document in d.ask(lambda n: io.OpenFeed(n))["documents"]:
        directory.update(document)


def test_a_partition_is_reached_at_its_owner_if_it_has_one() -> None:
    """The address of a live owner is known; that of a dead one, or of nobody, is `unavailable`, and why is said."""
    d = Driver.with_model()
    directory = told(d)
    assert directory.map_epoch == d.core.read.map()["map_epoch"]
    assert {directory.address(shard) for shard, _ in directory.models["m"].owners} == {"http://s0:1", "http://s1:1"}

    for name in ("s0", "s1"):
        d.ask(lambda n, name=name: io.LeaveShard(n, name, d.shards[name]))  # type: ignore[misc]
    follow(directory, d)
    with refused_with("unavailable", Unavailable, match="shard 's0' is unreachable"):
        directory.address("s0")
    assert {shard for shard, _ in directory.models["m"].owners} == {""}
    with refused_with("unavailable", Unavailable, match="the shard that owned it is gone"):
        directory.address("")


async def test_what_is_told_of_an_earlier_creation_of_a_model_changes_nothing() -> None:
    """Documents of an earlier creation are ignored, a later one replaces it; equal settings keep their layout."""
    d = Driver.with_model()
    directory = told(d)
    first, old = directory.models["m"], d.document()
    follow(directory, d)
    assert directory.models["m"].layout is first.layout
    d.ask(lambda n: io.PatchModel(n, "m", {"optimizer": {"lr": 0.5}}))
    follow(directory, d)
    assert directory.models["m"].spec.optimizer.lr == 0.5

    d.ask(lambda n: io.DeleteModel(n, "m"))
    gone: dict[str, Any] = {**d.published[-1]}
    d.model(params={"w": {"shape": [8]}})
    follow(directory, d)
    new = directory.models["m"]
    assert (new.layout.size, new.key.generation) == (8, 2)
    for document in (old, gone):
        directory.update(document)
        assert directory.models["m"] == new
    with refused_with("model_replaced", FencedError):
        await directory.newer(first, 0.01)
    directory.update(gone | {"generation": 2})
    assert not directory.models


async def test_a_model_that_has_just_arrived_outlives_a_late_word_that_there_is_none() -> None:
    """A model whose document comes while the scheduler is asked for it stays known, though the answer is a 404."""
    directory, d = Directory("s0"), Driver.with_model()

    class Late:
        async def request(self, *_: Any) -> Any:
            follow(directory, d)
            raise problem("unknown_model", "there was none when it was asked")

    link: Any = Late()
    with refused_with("unknown_model", NotFoundError):
        await Models(directory, link).find("m")
    assert (await Models(directory, link).find("m")).key.name == "m"


async def test_a_request_waits_for_the_owners_to_change_and_no_longer() -> None:
    """Who was refused waits until the owners are others, or its time is over; a model that was replaced is an error."""
    d = Driver.with_model()
    directory = told(d)
    known = directory.models["m"]
    assert await directory.newer(known, 0.01) is known
    assert await directory.changed(0.01) is False

    waiting, other = asyncio.ensure_future(directory.newer(known, 60.0)), asyncio.ensure_future(directory.changed(60.0))
    await asyncio.sleep(0)
    directory.update({"type": "ping"})
    await asyncio.sleep(0)
    assert not waiting.done()
    assert not other.done()
    d.ask(lambda n: io.LeaveShard(n, "s1", d.shards["s1"]))
    async with asyncio.timeout(20):
        follow(directory, d)
        assert {shard for shard, _ in (await waiting).owners} == {"s0"}
        assert await other is True
        now, waiting = directory.models["m"], asyncio.ensure_future(directory.newer(directory.models["m"], 60.0))
        await asyncio.sleep(0)
        directory.update({"type": "gone", "model": "m", "generation": now.key.generation})
        with pytest.raises(FencedError, match="deleted or created again"):
            await waiting


@pytest.mark.parametrize("restored", [False, True])
def test_lost_values_that_nobody_can_upload_may_be_assigned(restored: bool) -> None:
    """A restored model's lost values are never uploaded again, so that a PUT of them is taken without a token."""
    d = Driver.with_model(params={"w": {"shape": [8], "init": {"kind": "upload"}}})
    directory = told(d)
    known = directory.models["m"]
    lost = replace(known, restored=restored, upload_token=None, missing=frozenset({"w"}), lost=frozenset({0}))
    service: Any = ArrayService(*[None] * 4)  # type: ignore[arg-type]
    with nullcontext() if restored else refused_with("initializing", Unavailable):
        service._check_upload(lost, "w", None)
