"""Limits on the size of a pull by name, for JSON and for msgpack, and what a large one holds up."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import msgpack
import numpy as np
import pytest
from starlette.requests import Request
from tests.refusals import refused_with

from paramserver.core.layout import Layout
from paramserver.core.ranges import of_pairs
from paramserver.core.selection import select
from paramserver.core.spec import ModelSpec
from paramserver.errors import RequestError, Unavailable, problem
from paramserver.limits import BODY_BYTES_MAX, JSON_ELEMENTS_MAX, MIB
from paramserver.types import F32, AnyArray, ModelKey
from paramserver.wire.frame import PullFrame, PullSpec, PushFrame
from paramserver.wire.tensor import from_f32, to_msgpack
from paramserver_node.in_flight import InFlight
from paramserver_shard import responses
from paramserver_shard.directory import KnownModel
from paramserver_shard.endpoints import Pull
from paramserver_shard.exchange import GotPart, WantedPart
from paramserver_shard.frames import FrameService
from paramserver_shard.names import NameService, Pulled, PullRequest
from paramserver_shard.responses import check_json, check_msgpack, packed

QUARTER = BODY_BYTES_MAX // 4
SPEC = {
    "name": "m",
    "params": {"w": {"shape": [QUARTER]}, "b": {"shape": [1]}, "j": {"shape": [JSON_ELEMENTS_MAX]}},
    "partitions": 64,
}


def asked(*names: str, dtype: str | None = None) -> PullRequest:
    """Return a pull request for these parameters."""
    layout = Layout(ModelSpec.parse(SPEC))
    return PullRequest(select(layout, names), 0, 0, 0.0, dtype)  # type: ignore[arg-type]


def test_msgpack_holds_as_much_as_a_body() -> None:
    """A msgpack pull is refused if its values, in the requested dtype or their own, exceed the limit for a body."""
    check_msgpack(asked("w"))
    check_msgpack(asked("w", "b", dtype="float16"))
    for refused in (asked("w", "b"), asked("w", dtype="float64")):
        with refused_with("too_large", RequestError):
            check_msgpack(refused)


def test_json_holds_so_many_numbers() -> None:
    """A JSON pull of more than JSON_ELEMENTS_MAX numbers is refused."""
    check_json(asked("j"))
    with refused_with("too_large", RequestError):
        check_json(asked("j", "b"))


LAYOUT = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [MIB]}}, "partitions": 1}))
KNOWN = KnownModel(ModelKey("m", 1), LAYOUT, 0, "ready", (("s", 1),), None, None)


class Values:
    """One partition's values in memory so slow that the event loop must go on before they can be read."""

    def __init__(self, values: F32) -> None:
        self.values = values
        self.went_on = threading.Event()

    def __iter__(self) -> Iterator[F32]:
        assert self.went_on.wait(10), "the event loop waits for the values"
        yield self.values

    async def pull(self, known: KnownModel, wanted: Sequence[WantedPart], **_: Any) -> dict[int, GotPart]:
        """Pull them."""
        return {part.partition: GotPart(part.partition, 1, 1, 0, cast(Any, self)) for part in wanted}


async def test_a_large_pull_by_name_keeps_nobody_waiting() -> None:
    """The event loop goes on while the values of a large pull are put together; 256 MiB stopped it for a second."""
    values = Values(np.arange(MIB, dtype=np.float32))
    names = NameService(cast(Any, None), cast(Any, values))

    pulling = asyncio.ensure_future(names.fetch(KNOWN, PullRequest(select(KNOWN.layout)), lambda _: None))
    await asyncio.sleep(0)
    values.went_on.set()
    assert np.array_equal((await pulling).packed, values.values)


@pytest.mark.parametrize("wait_s", [0.0, 1.0])
async def test_the_values_of_a_pull_by_name_count_once_and_before_they_take_memory(wait_s: float) -> None:
    """Room is made for all values before they are collected; if the pull waits, for those of other shards as they come.

    While it waits it has none.  The answer keeps none of what they were collected in.
    """
    made: list[int] = []
    before: list[int] = []

    class Owners:
        async def pull(self, known: KnownModel, wanted: Any, make_room: Any = lambda _: None, **_: Any) -> Any:
            before.extend(made)
            make_room(MIB)  # a quarter of them are another shard's
            return {part.partition: GotPart(part.partition, 1, 1, 0, (np.zeros(MIB, np.float32),)) for part in wanted}

    names = NameService(cast(Any, None), cast(Any, Owners()))
    pulled = await names.fetch(KNOWN, PullRequest(select(KNOWN.layout), wait_s=wait_s), made.append)

    assert (pulled.packed.nbytes, [part.pieces for part in pulled.parts]) == (4 * MIB, [()])
    assert (before, made) == (([], [MIB, 3 * MIB]) if wait_s else ([4 * MIB], [4 * MIB]))


class Elsewhere:
    """A model whose partitions are all another shard's."""

    shard = "me"

    def __init__(self, elements: int, partitions: int) -> None:
        spec = ModelSpec.parse({"name": "m", "params": {"w": {"shape": [elements]}}, "partitions": partitions})
        owners = (("other", 1),) * partitions
        self.known = KnownModel(ModelKey("m", 1), Layout(spec), 0, "ready", owners, None, None)

    async def find(self, name: str, generation: int | None) -> KnownModel:
        """Find it."""
        return self.known

    async def pull(self, known: KnownModel, wanted: Sequence[WantedPart], **_: Any) -> dict[int, GotPart]:
        """Pull no elements of them."""
        return {part.partition: GotPart(part.partition, 1, 1, 0, ()) for part in wanted}


async def test_a_shard_collects_no_more_than_a_body_from_others() -> None:
    """A frame without a map that asks for more values of other shards than a body may hold is refused."""
    model: Any = Elsewhere(BODY_BYTES_MAX // 4 + 1, 32)
    frames = FrameService(model, model, cast(Any, None), model, cast(Any, None), None)
    with refused_with("too_large", RequestError, "other shards"):
        await frames.pull(PullFrame([(i, None) for i in range(32)], model="m"), lambda _: None)
    fits: Any = [(0, of_pairs([(1, model.known.layout.partition_size(0))])), *((i, None) for i in range(1, 32))]
    await frames.pull(PullFrame(fits, model="m"), lambda _: None)


@pytest.mark.parametrize(("room", "mapped", "checked"), [(True, False, 32), (True, True, None), (False, True, 32)])
async def test_a_pushpull_checks_what_it_sends_before_it_pushes(
    room: bool, mapped: bool, checked: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the push its answer may be refused by its bytes, unless the values can be lent instead of sent."""
    model: Any = Elsewhere(8, 2)
    lending: Any = SimpleNamespace(has_room=lambda _: room)
    frames = FrameService(model, model, cast(Any, None), model, cast(Any, None), lending)
    did: list[Any] = []

    async def push(*_: Any) -> NoReturn:
        did.append("push")
        raise problem("unavailable", "this is all that the test needs")

    monkeypatch.setattr(frames, "push", push)
    spec = PullSpec([(0, None), (1, None)], mapped=mapped)
    arriving: Any = SimpleNamespace(known=model.known, frame=PushFrame("m", [], map_epoch=1, pull=spec))
    with refused_with("unavailable", Unavailable):
        await frames.pushpull(arriving, did.append, lambda _: None, lambda _: None)
    assert did == ["push"] if checked is None else [checked, "push"]


async def test_a_large_answer_in_msgpack_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop goes on while a large answer is converted and packed; 256 MiB stopped it for 0.4 s and more."""
    converting, went_on = threading.Event(), threading.Event()

    def slow(values: F32, dtype: str) -> AnyArray:
        converting.set()
        assert went_on.wait(10), "the event loop waits for the answer"
        return from_f32(values, dtype)

    async def pull(*_: Any) -> Pulled:
        return Pulled(KNOWN, select(LAYOUT), None, 1, 1, 0, np.arange(MIB, dtype=np.float32), ())

    monkeypatch.setattr(responses, "from_f32", slow)
    nothing: Any = SimpleNamespace(check=None, clock=None, pulled=lambda *_: None)
    route = Pull(nothing, nothing, nothing, cast(Any, SimpleNamespace(pull=pull)), nothing, nothing)
    accepts = [(b"accept", b"application/msgpack")]
    state = {"account": InFlight(1 << 30).request("a")}
    request = Request({"type": "http", "method": "POST", "path": "/pull", "headers": accepts, "state": state})
    answering = asyncio.ensure_future(route.by_name(request, {}, 0.0))
    while not converting.is_set():
        await asyncio.sleep(0)
    went_on.set()
    assert int((await answering).headers["content-length"]) > 4 * MIB


@pytest.mark.parametrize("count", [1, 3 * MIB])
def test_the_values_of_a_large_answer_in_msgpack_are_not_copied(count: int) -> None:
    """Values are in the answer as they are: no thread runs while a copy is packed, so 256 MiB stopped all for 0.3 s."""
    values = {name: np.arange(count, dtype=np.float32) for name in ("a", "b")}
    document = {
        "version": 3,
        "params": {name: to_msgpack(v, "float32") for name, v in values.items()},
        "push": {"x": 1},
    }

    pieces = packed(document)

    assert b"".join(pieces) == msgpack.packb(document)
    views = [np.frombuffer(piece, np.uint8) for piece in pieces]
    shared = [any(np.shares_memory(view, v) for view in views) for v in values.values()]
    assert (len(pieces), shared) == ((1, [False, False]) if count == 1 else (5, [True, True]))
