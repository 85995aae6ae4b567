"""Checks of a push while it arrives."""

import asyncio
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import numpy as np
import pytest
from tests.refusals import refused_with

from paramserver.codecs.stage import pack
from paramserver.core.layout import Layout
from paramserver.core.partition_state import PartitionState
from paramserver.core.ranges import of_pairs
from paramserver.core.shard.update import UpdateInput, single_task
from paramserver.core.spec import ModelSpec
from paramserver.errors import problem
from paramserver.limits import BODY_BYTES_MAX, RANGES_PER_REQUEST_MAX
from paramserver.types import Coding, ModelKey, PartitionKey
from paramserver.wire.frame import PushFrame, PushPart, encode_header
from paramserver.wire.tensor import slice_crc
from paramserver_node.in_flight import InFlight
from paramserver_shard.arriving import BLOCK_BYTES, Arriving, checked
from paramserver_shard.buffers import SMALL_BYTES, BufferPool
from paramserver_shard.computing import compute
from paramserver_shard.directory import KnownModel
from paramserver_shard.exchange import Exchange
from paramserver_shard.models import Models
from paramserver_shard.names import NameService
from paramserver_shard.receiving import Body, FrameReader
from paramserver_shard.runtime import Runtime

DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": np.uint16}


@pytest.mark.parametrize("coding", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("size_bytes", [8, BLOCK_BYTES, BLOCK_BYTES + 8, 3 * BLOCK_BYTES + 1000])
def test_blocks_are_checked_like_the_whole(coding: Coding, size_bytes: int) -> None:
    """Checking a slice in blocks yields the CRC of the whole slice, and finds a single NaN wherever it is."""
    data = (np.arange(size_bytes // np.dtype(DTYPES[coding]).itemsize) % 97).astype(DTYPES[coding])
    ranges = ((0, data.size),)

    assert checked(data, coding, ranges) == (True, slice_crc(coding, ranges, data))
    assert checked(data, coding, None) == (True, 0)
    for place in (0, data.size // 2, data.size - 1):
        bad = data.copy()
        bad[place] = 0x7FC0 if coding == "bfloat16" else np.nan
        assert checked(bad, coding, ranges)[0] is False
        assert checked(bad, coding, ranges)[1] == slice_crc(coding, ranges, bad)


@pytest.mark.parametrize("fields", [{"map_epoch": 7}, {"forwarded": True}])
async def test_a_push_that_came_before_its_partition_has_a_checksum(fields: dict[str, Any]) -> None:
    """A push that is forwarded or names a map epoch gets a CRC even if another shard owns its partition on arrival."""
    spec = ModelSpec.parse({"name": "m", "params": {"w": {"shape": [4]}}, "partitions": 1})
    known = KnownModel(ModelKey("m", 1), Layout(spec), 0, "ready", (("other", 1),), None, None)
    frame = PushFrame("m", [PushPart(0, None, None)], worker="a", epoch=1, seq=1, **fields)
    gradient = np.ones(4, np.float32)

    arriving = Arriving(known, frame, False, [gradient.nbytes], cast(Runtime, SimpleNamespace(threads=2)))
    arriving.check([(0, gradient.view(np.uint8))])
    (part,) = await arriving.parts()

    assert part.crc == slice_crc("float32", ((0, 4),), gradient)


BUFFERED = ModelSpec.parse(
    {
        "name": "m",
        "params": {"w": {"shape": [20 * 40_000]}},
        "partitions": 20,
        "consistency": {"mode": "buffered", "count": 100},
    }
)
KNOWN = KnownModel(ModelKey("m", 1), Layout(BUFFERED), 0, "ready", (("here", 1),) * 20, None, None)


async def test_a_held_part_keeps_only_its_own_bytes_in_memory() -> None:
    """Once a part of one element is all that is held of a push, the memory of the large part beside it is free."""
    frame = PushFrame("m", [PushPart(0, None, None), *(PushPart(i, None, of_pairs([(0, 1)])) for i in range(1, 20))])
    gradient = np.ones(KNOWN.layout.partition_size(0) + 19, np.float32)
    sizes, pool = [gradient.nbytes - 4 * 19, *[4] * 19], BufferPool()

    arriving = Arriving(KNOWN, frame, True, sizes, cast(Runtime, SimpleNamespace(threads=2)))
    body = Body(sizes, arriving.check)
    body.allocate(pool)
    body.feed(gradient.data.cast("B"))
    body.end()
    assert pool.lent_bytes >= gradient.nbytes
    held = (await arriving.parts())[-1]
    del body, arriving

    assert pool.lent_bytes == 0
    assert held.data.tolist() == [1.0]


async def test_a_push_that_was_taken_keeps_no_memory() -> None:
    """Once its parts are handed over, a push that waits for its commit keeps none of them in memory.

    Its body no longer counts as in flight then, and of one that was sent again nothing is staged that would count.
    """
    size, pool = 4 * KNOWN.layout.partition_size(0), BufferPool()
    frame = PushFrame("m", [PushPart(0, None, None)])
    arriving = Arriving(KNOWN, frame, True, [size], cast(Runtime, SimpleNamespace(threads=2)))
    body = Body([size], arriving.check)
    body.allocate(pool)
    body.feed(memoryview(bytes(size)))
    del body

    (part,) = await arriving.parts()
    assert pool.lent_bytes >= part.data.nbytes == size
    del part

    assert pool.lent_bytes == 0


@pytest.mark.parametrize(("slot_elements", "shares"), [(40_000, True), (1_000_000, False)])
async def test_a_held_part_keeps_no_slot_that_is_much_larger(slot_elements: int, shares: bool) -> None:
    """A held gradient stays in the slot that it came in, unless that is so much larger that a copy keeps less."""
    slot = np.ones(4 * slot_elements, np.uint8)
    frame = PushFrame("m", [PushPart(0, None, None)], slot="b1")
    arriving = Arriving(KNOWN, frame, True, [4 * 40_000], cast(Runtime, SimpleNamespace(threads=2)))
    arriving.take(slot)
    (held,) = await arriving.parts()
    assert np.shares_memory(held.data, slot) is shares
    assert held.data.tobytes() == slot[: 4 * 40_000].tobytes()


@pytest.mark.parametrize("stage", ["zstd", "lz4"])
async def test_what_was_unpacked_takes_no_result(stage: str) -> None:
    """Packed elements of partitions of one size are applied, none of them into the gradient of the one before.

    That is in a bytes object: a kernel that refuses to write to it ended the shard.
    """
    spec = ModelSpec.parse(
        {"name": "m", "params": {"w": {"shape": [2 * SMALL_BYTES]}}, "partitions": 2, "optimizer": {"name": "sum"}}
    )
    layout = Layout(spec)
    known = KnownModel(ModelKey("m", 1), layout, 0, "ready", (("here", 1),) * 2, None, None)
    gradient = np.random.default_rng(1).standard_normal(SMALL_BYTES, dtype=np.float32)
    packed = pack(stage, gradient.view(np.uint8))
    sizes = [(packed.size, gradient.nbytes)] * 2
    frame = PushFrame("m", [PushPart(0, None, None), PushPart(1, None, None)], encoding=f"fp32+{stage}", sizes=sizes)
    in_a_thread = partial(asyncio.get_running_loop().run_in_executor, None)
    runtime = cast(Runtime, SimpleNamespace(threads=1, submit=in_a_thread))
    arriving = Arriving(known, frame, True, [packed.size] * 2, runtime)
    state = PartitionState(np.zeros(SMALL_BYTES, np.float32), (), (0,))

    arriving.check([(0, packed), (1, packed)])
    parts = await arriving.parts()
    work = [
        single_task(
            UpdateInput(PartitionKey(known.key, i), state, spec, layout.segments[i]),
            part.data, "float32", None, 1.0, 1.0, reuse_direct=part.exclusive_buffer,
        )
        for i, part in enumerate(parts)
    ]  # fmt: skip
    results = compute(work, BufferPool())

    assert all(part.data.tobytes() == gradient.tobytes() for part in parts)
    assert all(r.state is not None and np.array_equal(r.state.values, gradient) for r in results)


async def test_a_held_part_of_a_push_by_name_keeps_only_its_own_bytes_in_memory() -> None:
    """Of a push by name, each part that may be held has memory of its own."""
    pushed: list[Any] = []

    async def find(name: str) -> KnownModel:
        return KNOWN

    async def push(known: KnownModel, command: Any) -> None:
        pushed.append(command)

    names = NameService(cast(Models, SimpleNamespace(find=find)), cast(Exchange, SimpleNamespace(push=push)))
    await names.push({"model": "m", "grads": {"w": [1.0] * BUFFERED.size}}, None)

    parts = pushed[0].parts
    assert len(parts) == 20
    assert all(part.data.base is None and part.data.tolist() == [1.0] * part.data.size for part in parts)


@pytest.mark.parametrize(
    ("owners", "fits"),
    [(("here", "there"), True), (("there", "there"), False), (("", ""), True), (("", "there"), True)],
)
async def test_a_push_by_name_has_no_more_ranges_for_a_shard_than_a_frame(owners: tuple[str, str], fits: bool) -> None:
    """A push by name is refused as a whole if one shard would get more ranges than it takes in a frame.

    That shard refused its part, when others had applied theirs.  Partitions that nobody has may get several owners.
    """
    spec = ModelSpec.parse(
        {"name": "m", "params": {n: {"shape": [3 * RANGES_PER_REQUEST_MAX]} for n in "ab"}, "partitions": 2}
    )
    known = KnownModel(ModelKey("m", 1), Layout(spec), 0, "ready", tuple((o, 1) for o in owners), None, None)
    push = AsyncMock()
    names = NameService(
        cast(Models, SimpleNamespace(find=AsyncMock(return_value=known))), cast(Exchange, SimpleNamespace(push=push))
    )
    count = RANGES_PER_REQUEST_MAX // 2 + 1
    ranges = {n: [(2 * i, 2 * i + 1) for i in range(count)] for n in "ab"}
    body = {"model": "m", "grads": dict.fromkeys("ab", [1.0] * count), "ranges": ranges}

    with nullcontext() if fits else refused_with("too_large"):
        await names.push(body, None)

    assert push.called is fits


SIZES = [(), (5,), (5, 1, 7), (SMALL_BYTES, 2 * SMALL_BYTES), (3, SMALL_BYTES, 9)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("cuts", [1, 3, 12])
@pytest.mark.parametrize("in_place", [False, True])
def test_each_part_of_a_body_is_handed_on_once_it_is_whole(sizes: tuple[int, ...], cuts: int, in_place: bool) -> None:
    """However a body is cut, its parts are handed on in order, each at once when complete; no byte may be missing."""
    data = np.arange(sum(sizes)).astype(np.uint8).tobytes()
    ends = np.cumsum(sizes).tolist()
    parts = [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    came: list[tuple[int, bytes]] = []
    body = Body(sizes, lambda ready: came.extend((i, part.tobytes()) for i, part in ready))
    body.allocate(BufferPool())

    step = max(1, -(-len(data) // cuts))
    for at in range(0, len(data), step):
        with refused_with("malformed"):
            body.end()
        piece = data[at : at + step]
        if in_place:
            left = piece
            for memory in body.rest():
                memory[: len(left)], left = left[: len(memory)], left[len(memory) :]
                if not left:
                    break
            body.filled(len(piece))
        else:
            body.feed(piece)
        assert sum(map(len, body.rest())) == len(data) - at - len(piece)
        assert len(came) == sum(end <= at + len(piece) for end in ends)
    body.end()

    assert came == list(enumerate(parts))
    assert len(body.room()) == 0
    with refused_with("malformed"):
        body.feed(b"!")


def test_a_body_has_a_limit() -> None:
    """A body that is announced to be larger than BODY_BYTES_MAX is refused before any memory is taken for it."""
    assert Body((BODY_BYTES_MAX - 1, 1), unpacked_bytes=7).memory_bytes == BODY_BYTES_MAX + 7
    with refused_with("too_large"):
        Body((BODY_BYTES_MAX, 1))


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
async def test_a_frame_is_read_however_it_is_cut(piece: int) -> None:
    """A frame is read whole from pieces of any size; one that is cut off, or refused, has no effect.

    What is left of a refused one is read before its sender is told.
    """
    gradient = np.arange(100, dtype=np.float32)
    frame = encode_header(PushFrame("m", [PushPart(0, None, None), PushPart(1, None, None)])) + gradient.tobytes()
    messages: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    def send(data: bytes) -> None:
        cut = [data[at : at + piece] for at in range(0, len(data), piece)]
        messages[:] = [{"type": "http.request", "body": b, "more_body": n < len(frame)} for n, b in counted(cut)]

    def counted(pieces: list[bytes]) -> list[tuple[int, bytes]]:
        return list(zip(np.cumsum([len(p) for p in pieces]).tolist(), pieces, strict=True))

    async def sized(header: PushFrame) -> tuple[Body, Body]:
        body = Body((4, 396))
        return body, body

    async def refuse(header: PushFrame) -> tuple[Body, Body]:
        raise problem("unknown_model", "no model m")

    async def read(of: Any) -> Body:
        with InFlight(1 << 30).request("") as account:
            found: Body = await FrameReader(BufferPool()).read({"state": {"account": account}}, receive, PushFrame, of)
            assert account.size_bytes == 400
        return found

    send(frame)
    assert b"".join(part.tobytes() for part in (await read(sized)).parts) == gradient.tobytes()
    for size in (5, len(frame) - 399, len(frame) - 1):
        send(frame[:size])
        with refused_with("malformed", match="cut off"):
            await read(sized)
    send(frame)
    with refused_with("unknown_model"):
        await read(refuse)
    assert not messages
