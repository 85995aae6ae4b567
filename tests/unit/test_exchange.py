"""A push that one shard forwards to the owners of its partitions."""

import asyncio
import socket
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from tests.refusals import refused_with

from paramserver.core.layout import Layout
from paramserver.core.partition_state import PartitionState
from paramserver.core.selection import select
from paramserver.core.shard.effects import PartVersion, PullDone, PulledPart, PushDone
from paramserver.core.shard.events import PushPart, PushReceived
from paramserver.core.shard.served_model import wrong_owner
from paramserver.core.spec import ModelSpec
from paramserver.errors import InDoubt, PsError, RequestError, Unavailable, problem
from paramserver.net.credentials import Credentials
from paramserver.types import ModelKey, PushId
from paramserver.wire.frame import PullFrame, PullReply, PushFrame, PushReply, decode_header
from paramserver.wire.frame import PushPart as FramePart
from paramserver_shard.buffers import BufferPool
from paramserver_shard.directory import Directory, KnownModel
from paramserver_shard.exchange import Exchange, WantedPart
from paramserver_shard.frames import FrameService
from paramserver_shard.names import NameService, PullRequest
from paramserver_shard.peers import PeerClient

from . import virtual_time

KEY = ModelKey("m", 1)


class Fenced:
    """A shard that loses its partitions while it computes a push; it overwrites buffers that it may consume."""

    threads = 1

    async def push(self, event: PushReceived) -> Any:
        for part in event.parts:
            if part.exclusive_buffer:
                part.data[:] = 77.0
        raise wrong_owner(KEY, 0, 2)

    async def pull(self, *_: Any) -> Any:
        raise wrong_owner(KEY, 0, 2)


class Peers:
    """The client of the shard that owns the partitions now, all of them 2.0; it records the gradients it is sent."""

    def __init__(self) -> None:
        self.got: list[np.ndarray[Any, Any]] = []

    async def push(self, address: str, path: str, frame: Any, arrays: Any) -> PushReply:
        self.got += [np.array(a) for a in arrays]
        parts = [(p.partition, 1, 2, 0) for p in frame.parts]
        return PushReply("applied", False, 1, 0, 2, 0, parts)

    async def pull(self, address: str, frame: PullFrame, size_bytes: int, *_: Any) -> tuple[PullReply, Any]:
        parts = [(p, 1, 2) for p, _ in frame.parts]
        return PullReply("m", 1, 0, 1, 2, "float32", parts), np.full(size_bytes // 4, 2.0, np.float32).view(np.uint8)


async def test_what_was_refused_after_it_was_computed_is_sent_on_as_it_came() -> None:
    """Parts refused after this shard has computed them reach the next owner with their gradient unchanged."""
    layout = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [4]}}, "partitions": 1}))
    known = KnownModel(KEY, layout, 0, "ready", (("me", 1),), None, None)
    directory, peers = Directory("me"), Peers()
    directory.models["m"] = replace_owner(known)
    directory.addresses = {"other": ("http://other",)}
    part = PushPart(0, np.full(4, 0.5, np.float32), "float32", None, True, exclusive_buffer=True)

    done = await Exchange(directory, cast(Any, Fenced()), cast(Any, peers)).push(known, PushReceived("m", (part,)))

    assert done.state == "applied"
    assert [a.tolist() for a in peers.got] == [[0.5] * 4]


async def test_a_frame_without_a_map_follows_a_partition_that_moves_while_it_arrives() -> None:
    """Push and pull reach the new owner, the gradient as it came: their client could do nothing about a 421."""
    layout = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [4]}}, "partitions": 1}))
    known = KnownModel(KEY, layout, 0, "ready", (("me", 1),), None, None)
    directory, peers, lost = Directory("me"), Peers(), cast(Any, Fenced())
    directory.models["m"] = replace_owner(known)
    directory.addresses = {"other": ("http://other",)}
    models: Any = Mock(find=AsyncMock(return_value=known))
    exchange = Exchange(directory, lost, cast(Any, peers))
    frames = FrameService(directory, models, lost, exchange, cast(Any, None), None)

    arriving, body = await frames.prepare_push(PushFrame("m", [FramePart(0, None, None)]))
    body.allocate(BufferPool())
    body.feed(np.full(4, 0.5, np.float32).data.cast("B"))
    body.end()
    done, _ = await frames.push(arriving, lambda _: None)
    pulled = await frames.pull(PullFrame([(0, None)], model="m"), lambda _: None)

    assert done.state == "applied"
    assert [a.tolist() for a in peers.got] == [[0.5] * 4]
    assert [piece.tolist() for piece in pulled.pieces] == [[2.0] * 4]


class Waiting(Fenced):
    """A shard that loses its partition when a pull has waited for half of its time."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []

    async def pull(self, *request: Any) -> Any:
        self.waits_s.append(request[0].wait_s)
        await asyncio.sleep(request[0].wait_s / 2)
        return await super().pull()


class WaitingPeers(Peers):
    """The client of the shard that has it then, and how long that is to wait."""

    def __init__(self, waits_s: list[float]) -> None:
        super().__init__()
        self.waits_s = waits_s

    async def pull(self, address: str, frame: PullFrame, size_bytes: int, *_: Any) -> tuple[PullReply, Any]:
        self.waits_s.append(frame.wait_s)
        return await super().pull(address, frame, size_bytes)


@pytest.mark.parametrize("by", ["frame", "name"])
def test_a_pull_that_follows_a_partition_waits_no_longer_than_it_asked_to(by: str) -> None:
    """The new owner is asked to wait for what is left of the time."""
    layout = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [4]}}, "partitions": 1}))
    known, shard = KnownModel(KEY, layout, 0, "ready", (("me", 1),), None, None), Waiting()
    directory = Directory("me")
    directory.models["m"] = moved = replace_owner(known)
    directory.addresses = {"other": ("http://other",)}

    async def pull() -> None:
        exchange = Exchange(directory, cast(Any, shard), cast(Any, WaitingPeers(shard.waits_s)))
        models: Any = Mock(find=AsyncMock(side_effect=[known, moved]))
        frames = FrameService(directory, models, cast(Any, shard), exchange, cast(Any, None), None)
        if by == "frame":
            await frames.pull(PullFrame([(0, None)], model="m", wait_s=8.0), lambda _: None)
        else:
            await exchange.pull(known, [WantedPart(0, None)], wait_s=8.0)

    virtual_time.run(pull())
    assert shard.waits_s == [8.0, 4.0]


async def test_a_pull_that_follows_a_partition_collects_no_more_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pull by frame is refused if after a move other shards have more of it than this one collects."""
    monkeypatch.setattr("paramserver_shard.frames.BODY_BYTES_MAX", 15)
    layout = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [4]}}, "partitions": 1}))
    known = KnownModel(KEY, layout, 0, "ready", (("me", 1),), None, None)
    directory, lost = Directory("me"), cast(Any, Fenced())
    models: Any = Mock(find=AsyncMock(side_effect=[known, replace_owner(known)]))
    frames = FrameService(directory, models, lost, cast(Any, None), cast(Any, None), None)

    with refused_with("too_large", RequestError):
        await frames.pull(PullFrame([(0, None)], model="m"), lambda _: None)


class Refusing:
    """A shard, or the client of one, that has lost its partition while an accepted push waited to be durable."""

    async def push(self, *_: Any) -> Any:
        accepted = {"state": "applied", "duplicate": False, "version": 1}
        raise wrong_owner(KEY, 0, 2).plus(push=accepted)


@pytest.mark.parametrize("owner", ["me", "first"])
@pytest.mark.parametrize("ident", [{}, {"push_id": PushId("w", 1, 1)}, {"key": "k"}])
async def test_an_accepted_push_is_sent_to_the_next_owner_only_under_its_id(owner: str, ident: dict[str, Any]) -> None:
    """What an owner has accepted before it lost the partition is sent on under its id or key; without one, in doubt.

    The next owner may have it from the journal, and would apply it twice.
    """
    layout = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [4]}}, "partitions": 1}))
    known = KnownModel(KEY, layout, 0, "ready", ((owner, 1),), None, None)
    directory, peers = Directory("me"), Peers()
    directory.models["m"] = replace_owner(known)
    directory.addresses = {"first": ("http://first",), "other": ("http://other",)}

    class Both:
        async def push(self, address: str, *rest: Any) -> Any:
            return await (Refusing() if address == "http://first" else peers).push(address, *rest)

    exchange = Exchange(directory, cast(Any, Refusing()), cast(Any, Both()))
    command = PushReceived("m", (PushPart(0, np.ones(4, np.float32), "float32", None, True),), **ident)

    if ident:
        assert (await exchange.push(known, command)).state == "applied"
        assert len(peers.got) == 1
        return
    with pytest.raises(InDoubt) as e:
        await exchange.push(known, command)
    assert e.value.members["push"]["state"] == "applied"
    assert not peers.got


async def test_values_of_two_timelines_are_those_of_the_lower_one() -> None:
    """A pull from several shards names the lowest timeline of its values, not the one that was known before.

    A gradient computed from values of before a rollback would pass for one of after it.
    """
    layout = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [4]}}, "partitions": 2}))
    known = KnownModel(KEY, layout, 3, "ready", (("other", 1), ("me", 1)), None, None)
    directory = Directory("me")
    directory.models["m"] = known
    directory.addresses = {"other": ("http://other",)}
    values = np.ones(2, np.float32)

    class Before:
        async def pull(self, *_: Any) -> tuple[PullReply, Any]:
            return PullReply("m", 1, 2, 7, 1, "float32", [(0, 7, 1)]), values.view(np.uint8)

    class After:
        async def pull(self, *_: Any) -> PullDone:
            return PullDone(KEY, 3, (PulledPart(1, PartitionState(values, (), (1,)), 7, 1),))

    exchange = Exchange(directory, cast(Any, After()), cast(Any, Before()))
    pulled = await NameService(cast(Any, None), exchange).fetch(known, PullRequest(select(layout)), lambda _: None)
    assert (pulled.timeline, pulled.packed.tolist()) == (2, [1.0] * 4)
    models: Any = Mock(find=AsyncMock(return_value=known))
    frames = FrameService(directory, models, cast(Any, None), exchange, cast(Any, None), None)
    answer = await frames.pull(PullFrame([(0, None), (1, None)], model="m"), lambda _: None)
    assert decode_header(answer.header(), PullReply)[0].timeline == 2


async def test_a_shard_that_does_not_take_a_push_in_time_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that another shard did not take in time is `unavailable`, without a hint to use a longer timeout.

    That is of the request between the shards, which the client's timeout does not change.
    """
    monkeypatch.setattr("paramserver_shard.peers.REQUEST_BASE_TIMEOUT_S", 0.2)
    monkeypatch.setattr("paramserver_shard.peers.PACE_BYTES_PER_S", float("inf"))
    frame, client = PushFrame("m", [FramePart(0, None, None)], forwarded=True), PeerClient(BufferPool(), Credentials())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Unavailable, match=r"does not answer .*65535 of 400064 bytes were sent") as e:
            await client.push(address, "/push", frame, [np.ones(100_000, np.float32)])
        await client.aclose()
    assert (e.value.code, e.value.hint) == ("unavailable", "")


class Applying:
    """This shard, which applies the partitions it owns."""

    async def push(self, event: PushReceived) -> PushDone:
        parts = tuple([PartVersion(p.partition, 1, 1, 0) for p in event.parts])
        return PushDone(KEY, 0, "applied", False, parts)


class Failing:
    """The client of other shards, each of which fails with its own error."""

    def __init__(self, **errors: PsError) -> None:
        self.errors = errors

    async def push(self, address: str, *_: Any) -> Any:
        raise self.errors[address.removeprefix("http://")]


async def failed_push(errors: dict[str, PsError], *mine: str) -> PsError:
    """Return the error of a push without an id of which each of these shards has one part, as has this one if named."""
    names = [*mine, *errors]
    layout = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [9]}}, "partitions": len(names)}))
    known = KnownModel(KEY, layout, 0, "ready", tuple((name, 1) for name in names), None, None)
    directory = Directory("me")
    directory.models["m"] = known
    directory.addresses = {name: (f"http://{name}",) for name in errors}
    parts = [
        PushPart(i, np.ones(layout.partition_size(i), np.float32), "float32", None, True) for i in range(len(names))
    ]
    exchange = Exchange(directory, cast(Any, Applying()), cast(Any, Failing(**errors)))
    with pytest.raises(PsError) as e:
        await exchange.push(known, PushReceived("m", tuple(parts)))
    return e.value


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
    """If a push fails after this shard applied its part, the error lists the partition; a retryable one is in doubt.

    A client may repeat such a push only under its id: without one, it would be applied twice here.
    """
    hint = "nothing was changed; send it again"
    error = await failed_push({name: problem(text, "it says why", hint=hint) for name, text in errors.items()}, "me")

    assert (error.code, error.members.get("partitions")) == (code, partitions)
    assert (error.hint != hint) == (code == "in_doubt"), "a part was changed"


async def test_a_push_that_may_be_lost_is_to_be_looked_at_first() -> None:
    """If one owner has applied a push without an id, and another lost its part later, no hint says to repeat it."""
    accepted = {"state": "applied", "duplicate": False, "version": 1}
    error = await failed_push({"c": problem("wrong_owner", "it says why").plus(push=accepted)}, "me")

    assert (error.code, error.members["partitions"]) == ("in_doubt", [0])
    assert "look first" in error.hint


async def test_of_two_owners_the_one_that_may_have_taken_its_part_is_told() -> None:
    """If one owner refuses a push and another has applied it, but not made it durable, the error has member `push`.

    That of the former alone would say that the push may be repeated without an id.
    """
    accepted = {"state": "applied", "duplicate": False, "version": 1}
    full = problem("queue_full", "it says why", hint="nothing was changed; send it again")
    slow = problem("storage_unavailable", "it says why", hint="the push is in doubt").plus(push=accepted)

    error = await failed_push({"b": full, "c": slow})

    assert (error.code, error.hint, error.members.get("push")) == ("storage_unavailable", slow.hint, accepted)


def replace_owner(known: KnownModel) -> KnownModel:
    """Return the model after its partition has moved to another owner."""
    return KnownModel(known.key, known.layout, 0, "ready", (("other", 2),), None, None)
