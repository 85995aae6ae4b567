"""Shared memory between a shard and clients on its machine: folders, buffers, leases, slots, mappings."""

import asyncio
import mmap
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import numpy as np
import pytest
from starlette.types import Message
from tests.refusals import refused_with

from paramserver import limits
from paramserver.client.mapped_buffers import (
    KEPT_MAX,
    PAGE_BYTES,
    MappedBuffers,
    Mappings,
    RemappableMemory,
    private,
    writable,
)
from paramserver.errors import ConflictError, NotFoundError, RequestError, Unavailable, problem
from paramserver.types import F32
from paramserver.wire.frame import PullFrame, PushFrame, PushPart, encode_header
from paramserver_node.in_flight import InFlight
from paramserver_shard.buffers import BufferPool
from paramserver_shard.frames import FrameService
from paramserver_shard.lending import Lending
from paramserver_shard.receiving import Body, FrameReader
from paramserver_shard.shared_folder import SharedFolder

from .sharding import Now

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="buffers are mapped in place on Linux")

COUNT = 1 << 16
"""Elements of a buffer: 256 KiB, which is large enough to be pooled."""


@pytest.fixture
def versions(folder: SharedFolder) -> BufferPool:
    """The pool of partition versions."""
    return BufferPool(folder=folder)


@pytest.fixture
def lending(folder: SharedFolder, versions: BufferPool, now: Now) -> Lending:
    """The leases and slots of the folder's shard."""
    return Lending(versions, BufferPool(folder=folder), folder.board, now)


def slot(lending: Lending, size_bytes: int) -> str:
    """Lend a slot."""
    return asyncio.run(lending.allocate_slot(size_bytes))


def next_turn(versions: BufferPool, values: list[F32]) -> list[F32]:
    """Return buffers for the version that follows these values."""
    pairs = zip(versions.take_free(values), values, strict=True)
    return [versions.take(COUNT, shared=True, after=v) if found is None else found for found, v in pairs]


def test_partitions_go_to_and_fro_between_the_same_buffers(versions: BufferPool) -> None:
    """Successive versions of a model alternate between two rows of files, so that clients reuse their mappings."""
    values = [versions.take(COUNT, shared=True) for _ in range(6)]
    assert versions.take_free(values) == [None] * 6  # the computing threads allocate them: first use of a page is slow
    rows = []
    for _ in range(8):
        values = next_turn(versions, values)
        rows.append(tuple(versions.file_of(v) for v in values))

    assert len(set(rows)) == 2
    assert not set(rows[0]) & set(rows[1])


def test_a_reader_that_holds_a_version_takes_no_buffer_away(versions: BufferPool) -> None:
    """New values never use the buffers of a version that is being read, and at most three rows are in use."""
    values, rows = [versions.take(COUNT, shared=True) for _ in range(4)], []
    held: list[list[F32]] = []
    for _ in range(12):
        held = [*held, values][-1:]
        values = next_turn(versions, values)
        assert not {versions.file_of(v) for v in values} & {versions.file_of(v) for row in held for v in row}
        rows.append(tuple(versions.file_of(v) for v in values))

    assert len({file for row in rows for file in row}) <= 3 * 4
    assert len(set(rows[-6:])) <= 3


def test_readers_who_let_go_in_any_order_find_few_rows(versions: BufferPool) -> None:
    """Three readers that release versions in any order leave no more than KEPT_MAX rows of buffers in use.

    With more rows than a client keeps mapped, nearly every pull would map memory again.
    """
    chance = random.Random(7)
    values, rows = [versions.take(COUNT, shared=True) for _ in range(8)], []
    held: list[list[F32]] = [[], [], []]
    for _ in range(300):
        held[chance.randrange(3)] = list(values) if chance.random() < 0.8 else [chance.choice(values)]
        values = next_turn(versions, values)
        rows.append(tuple(versions.file_of(v) for v in values))

    assert len(set(rows)) <= KEPT_MAX


def test_memory_of_others_takes_a_turn_and_stays(versions: BufferPool) -> None:
    """Buffers left by another model are used before new ones are made, and stay with their new partition."""
    other = [versions.take(COUNT, shared=True) for _ in range(2)]
    left = {versions.file_of(v) for v in other}
    values = [versions.take(COUNT, shared=True) for _ in range(2)]
    del other
    rows = []
    for _ in range(4):
        values = next_turn(versions, values)
        rows.append(tuple(versions.file_of(v) for v in values))

    assert set(rows[0]) == left
    assert rows[0] == rows[2]
    assert rows[1] == rows[3]
    assert versions.kept_bytes == versions.lent_bytes


def test_memory_of_a_size_that_nobody_asks_for_makes_room(folder: SharedFolder) -> None:
    """Kept buffers of a size that is no longer requested are deleted in favor of those that others return."""
    pool = BufferPool(8 * 4 * COUNT, folder)
    deleted = [pool.take(COUNT, shared=True) for _ in range(8)]
    files = [folder.path / str(pool.file_of(a)) for a in deleted]
    del deleted
    values, taken = pool.take(2 * COUNT, shared=True), []
    for _ in range(100):
        values = pool.take(2 * COUNT, shared=True, after=values)
        taken.append(pool.file_of(values))

    assert len(set(taken[-50:])) == 2
    assert not any(file.exists() for file in files)
    assert pool.kept_bytes == pool.lent_bytes
    assert folder.bytes == pool.kept_bytes + pool.lent_bytes


def test_memory_that_is_asked_for_by_turns_is_kept(folder: SharedFolder) -> None:
    """When two models train by turns and only one's buffers fit, they are kept and not evicted by the other's."""
    pool, taken = BufferPool(4 * COUNT, folder), list[str | None]()
    for _ in range(50):
        taken.append(pool.file_of(pool.take(COUNT, shared=True)))
        pool.take(COUNT // 2, shared=True)

    assert len(set(taken)) == 1


def test_mapped_buffers_lie_side_by_side(folder: SharedFolder, versions: BufferPool) -> None:
    """A client sees two buffers of a shard as one contiguous read-only array, without a copy."""
    first, second = versions.take(COUNT, shared=True), versions.take(COUNT, shared=True)
    first[:], second[:] = 1.0, 2.0
    paths = [str(folder.path / str(versions.file_of(a))) for a in (first, second)]
    mapped = MappedBuffers([(paths[0], 4 * COUNT), (paths[1], 40)]).values()
    assert mapped.size == COUNT + 10
    assert mapped[COUNT - 1] == 1.0
    assert mapped[COUNT] == 2.0
    first[-1] = 5.0
    assert mapped[COUNT - 1] == 5.0
    with pytest.raises(ValueError, match="read-only"):
        mapped[0] = 1.0


def test_a_reader_keeps_its_bytes_when_the_file_goes(
    folder: SharedFolder, versions: BufferPool, lending: Lending, now: Now
) -> None:
    """A buffer whose lease has expired is never reused, so a slow reader's bytes stay; its file goes when it does."""
    values = versions.take(COUNT, shared=True)
    values[:] = 3.0
    granted = lending.lease([values])
    assert granted is not None
    path = folder.path / granted[1][0]
    mapped = MappedBuffers([(str(path), 4 * COUNT)]).values()
    now.s += limits.SHARED_LEASE_S
    lending.expire()
    assert lending.leased_bytes == 0
    del values
    assert not path.exists()
    assert folder.bytes == 0
    for _ in range(4):
        versions.take(COUNT, shared=True)[:] = 9.0
    assert (mapped == 3.0).all()


def test_values_at_rest_are_lent_again_after_a_lease_of_them_has_expired(
    versions: BufferPool, lending: Lending, now: Now
) -> None:
    """A reader that takes long does not make others copy the same values: they are lent until they are replaced."""
    values = versions.take(COUNT, shared=True)
    assert lending.lease([values], current=True) is not None
    now.s += limits.SHARED_LEASE_S
    again = lending.lease([values], current=True)
    assert again is not None
    assert again[1] == (versions.file_of(values),)


def test_a_released_lease_gives_its_memory_back(versions: BufferPool, lending: Lending) -> None:
    """A buffer is reused once its lease is released, and not before."""
    values = versions.take(COUNT, shared=True)
    file = versions.file_of(values)
    granted = lending.lease([values])
    assert granted is not None
    del values
    other = versions.take(COUNT, shared=True)
    assert versions.file_of(other) != file
    lending.release([granted[0], 999])
    assert versions.file_of(versions.take(COUNT, shared=True)) == file


async def test_a_request_that_is_refused_gives_back_what_its_client_holds_no_longer(
    versions: BufferPool, lending: Lending
) -> None:
    """Leases that a request ends are ended, whatever becomes of it: its client tells of them only once."""

    async def find(*_: object) -> NoReturn:
        raise problem("unknown_model", "it was deleted")

    pulled, pushed = (lending.lease([versions.take(COUNT, shared=True)]) for _ in range(2))
    assert pulled is not None
    assert pushed is not None
    unused = cast(Any, None)
    frames = FrameService(unused, cast(Any, SimpleNamespace(find=find)), unused, unused, unused, lending)
    with pytest.raises(NotFoundError):
        await frames.pull(PullFrame([(0, None)], model="m", release=[pulled[0]]), lambda _: None)
    with pytest.raises(NotFoundError):
        await frames.prepare_push(PushFrame("m", [PushPart(0, None, None)], release=[pushed[0]]))
    assert lending.leased_bytes == 0


def test_a_lease_is_ended_only_by_who_knows_its_number(versions: BufferPool, lending: Lending) -> None:
    """Nobody ends another's lease by trying numbers: its memory would be reused while the other reads it."""
    values = versions.take(COUNT, shared=True)
    assert lending.lease([values]) is not None
    lending.release(range(100_000))
    assert lending.leased_bytes == values.nbytes


def test_leases_are_bounded(versions: BufferPool, lending: Lending, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no lease beyond LEASED_BYTES_MAX or for private memory; those values travel over HTTP."""
    values = versions.take(COUNT, shared=True)
    assert lending.lease([values, versions.take(COUNT)]) is None
    monkeypatch.setattr("paramserver_shard.lending.LEASED_BYTES_MAX", 4 * COUNT)
    assert lending.lease([values]) is not None
    assert lending.lease([versions.take(COUNT, shared=True)]) is None


def test_values_that_many_lease_count_once(
    versions: BufferPool, lending: Lending, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound on leased bytes is one on memory: any number of readers may lease the same values."""
    monkeypatch.setattr("paramserver_shard.lending.LEASED_BYTES_MAX", 8 * COUNT)
    first, second = versions.take(COUNT, shared=True), versions.take(COUNT, shared=True)
    granted = [lending.lease(arrays) for arrays in ([first, second], [first], [second, first])]
    numbers = [found[0] for found in granted if found is not None]
    assert len(numbers) == 3
    assert lending.leased_bytes == 8 * COUNT

    lending.release(numbers[::2])
    assert lending.leased_bytes == 4 * COUNT
    lending.release(numbers)
    assert lending.leased_bytes == 0


def test_a_slot_is_the_shards_from_submission_to_reply(folder: SharedFolder, lending: Lending) -> None:
    """A submitted slot cannot be submitted again before its reply, and then only if the reply left it reusable."""
    file = slot(lending, 4 * COUNT)
    mine = writable(str(folder.path / file), 4 * COUNT)
    mine.view(np.float32)[:] = 7.0
    body = lending.begin_push(file, 4 * COUNT)
    assert (body.view(np.float32) == 7.0).all()
    with pytest.raises(ConflictError, match="slot"):
        lending.begin_push(file, 4 * COUNT)
    lending.finish_push(file, reusable=True)
    mine.view(np.float32)[:] = 8.0
    assert (lending.begin_push(file, 4 * COUNT).view(np.float32) == 8.0).all()
    lending.finish_push(file, reusable=False)
    with pytest.raises(ConflictError, match="ask for another"):
        lending.begin_push(file, 4 * COUNT)
    assert lending.slot_bytes == 0


def test_an_idle_slot_is_taken_back_and_never_lent_again(folder: SharedFolder, lending: Lending, now: Now) -> None:
    """A slot unused for SHARED_LEASE_S is taken back, and what its client still writes reaches no other slot."""
    file = slot(lending, 4 * COUNT)
    mine = writable(str(folder.path / file), 4 * COUNT)
    now.s += limits.SHARED_LEASE_S
    other = slot(lending, 4 * COUNT)
    mine[:] = 255
    assert other != file
    assert not lending.begin_push(other, 4 * COUNT).any()


@pytest.mark.parametrize("mapped", [False, True])
def test_the_memory_of_a_kept_slot_serves_others_unless_arrays_are_in_it(
    folder: SharedFolder, lending: Lending, mapped: bool
) -> None:
    """Memory that a push leaves is lent again; if its client may still read there, it is removed instead."""
    file = slot(lending, 4 * COUNT)
    mine = writable(str(folder.path / file), 4 * COUNT)
    held = lending.begin_push(file, 4 * COUNT)
    lending.finish_push(file, reusable=False, mapped=mapped)
    assert lending.slot_bytes == 0
    assert (folder.path / file).exists(), "the push needs it"
    del held
    assert (folder.path / file).exists() != mapped

    other = slot(lending, 4 * COUNT)
    lending.begin_push(other, 4 * COUNT)[:] = 255
    assert mine.any() != mapped


def test_a_slot_that_a_push_uses_is_not_idle(lending: Lending, now: Now) -> None:
    """A slot stays lent however long its push takes, and its idle time begins anew with the reply."""
    file = slot(lending, 4 * COUNT)
    lending.begin_push(file, 4 * COUNT)
    now.s += limits.SHARED_LEASE_S
    lending.expire()
    lending.finish_push(file, reusable=True)
    now.s += limits.SHARED_LEASE_S / 2
    lending.expire()

    lending.begin_push(file, 4 * COUNT)


def test_a_returned_slot_serves_another_client(folder: SharedFolder, lending: Lending) -> None:
    """A returned slot is lent again before new memory is taken, but not while its push is being applied."""
    file = slot(lending, 4 * COUNT)
    lending.begin_push(file, 4 * COUNT)
    lending.free_slot(file)
    other = slot(lending, 4 * COUNT)
    assert other != file
    lending.finish_push(file, reusable=True)
    taken = folder.bytes
    for lent in (file, other, other, "b0"):
        lending.free_slot(lent)
    assert lending.slot_bytes == 0
    assert len({slot(lending, 4 * COUNT), slot(lending, 4 * COUNT)} - {file, other}) == 2
    assert folder.bytes == taken


def test_a_slot_is_used_only_by_who_knows_its_name(lending: Lending) -> None:
    """Nobody pushes or returns another's slot by trying names: its memory would be reused while the other writes it."""
    file = slot(lending, 4 * COUNT)
    for number in range(1000):
        lending.free_slot(f"b{number}")
    lending.begin_push(file, 4 * COUNT)


def test_a_slot_that_is_returned_twice_is_not_taken_from_its_next_client(lending: Lending) -> None:
    """The second of two requests that return a slot changes nothing, although its memory is lent again."""
    file = slot(lending, 4 * COUNT)
    lending.free_slot(file)
    other = slot(lending, 4 * COUNT)
    lending.free_slot(file)

    lending.begin_push(other, 4 * COUNT)


def test_a_slot_whose_file_is_gone_is_not_lent_again(folder: SharedFolder, lending: Lending) -> None:
    """If somebody has removed a returned slot's file, the next request gets none, and the one after it a new one."""
    file = slot(lending, 4 * COUNT)
    lending.free_slot(file)
    (folder.path / file).unlink()
    with refused_with("queue_full", Unavailable):
        slot(lending, 4 * COUNT)
    assert (folder.path / slot(lending, 4 * COUNT)).exists()


async def test_a_large_body_keeps_nobody_waiting(folder: SharedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop goes on while memory for a large body is made; for the next one the same memory is used."""
    pool, size = BufferPool(folder=folder), 2 * limits.MIB
    went_on = threading.Event()
    allocate = folder.allocate

    def slow(size_bytes: int) -> tuple[str, mmap.mmap] | None:
        assert went_on.wait(10), "the event loop waits for the memory"
        return allocate(size_bytes)

    async def receive() -> Message:
        begun = encode_header(PushFrame("m", [PushPart(0, None, None)]))
        return {"type": "http.request", "body": begun + bytes(2 * size), "more_body": False}

    async def sized(frame: PushFrame) -> tuple[PushFrame, Body]:
        return frame, Body((size, size))

    async def read() -> None:
        with InFlight(1 << 30).request("") as account:
            await FrameReader(pool).read({"state": {"account": account}}, receive, PushFrame, sized)

    monkeypatch.setattr(folder, "allocate", slow)
    reading = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    went_on.set()
    await reading
    made = folder.bytes
    while pool.lent_bytes:  # the thread may hold its result for a moment
        await asyncio.sleep(0)
    await read()
    assert folder.bytes == made


async def test_a_large_slot_keeps_nobody_waiting(
    folder: SharedFolder, lending: Lending, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop goes on while memory for a large slot is made, and what is being made counts against the bound."""
    went_on = threading.Event()
    allocate = folder.allocate

    def slow(size_bytes: int) -> tuple[str, mmap.mmap] | None:
        assert went_on.wait(10), "the event loop waits for the memory"
        return allocate(size_bytes)

    monkeypatch.setattr(folder, "allocate", slow)
    monkeypatch.setattr("paramserver_shard.lending.SLOT_BYTES_MAX", 12 * limits.MIB)
    asking = asyncio.ensure_future(lending.allocate_slot(8 * limits.MIB))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await lending.allocate_slot(8 * limits.MIB)
    went_on.set()
    lending.free_slot(await asking)
    assert lending.slot_bytes == 0


def test_a_lying_client_is_refused(lending: Lending, monkeypatch: pytest.MonkeyPatch) -> None:
    """A push larger than its slot, an unknown slot, and slots beyond SLOT_BYTES_MAX are refused."""
    file = slot(lending, 4 * COUNT)
    with pytest.raises(RequestError):
        lending.begin_push(file, 1 << 30)
    with pytest.raises(ConflictError):
        lending.begin_push("../lock", 4)
    monkeypatch.setattr("paramserver_shard.lending.SLOT_BYTES_MAX", 4 * COUNT)
    with pytest.raises(Unavailable):
        slot(lending, 4 * COUNT)


def test_a_full_folder_gives_private_memory(short_path: Path) -> None:
    """When the shared folder is full, further buffers are private and nothing fails."""
    folder = SharedFolder.open(str(short_path), "shard-0", 4 * COUNT)
    assert folder is not None
    pool = BufferPool(folder=folder)
    first, second = pool.take(COUNT, shared=True), pool.take(COUNT, shared=True)
    second[:] = 1.0
    assert pool.file_of(first) is not None
    assert pool.file_of(second) is None
    folder.close()


def test_private_memory_for_what_a_full_folder_cannot_hold_is_reused(short_path: Path) -> None:
    """Versions that do not fit into the folder take turns in the same private memory, and use the folder once they can.

    They took new memory each time, which the pool then kept.
    """
    small = SharedFolder.open(str(short_path), "shard-0", 4 * COUNT)
    assert small is not None
    pool = BufferPool(folder=small)
    in_folder = pool.take(COUNT, shared=True)
    values, addresses = pool.take(COUNT, shared=True), set[int]()
    for _ in range(20):
        values = pool.take(COUNT, shared=True, after=values)
        addresses.add(values.ctypes.data)
    assert len(addresses) == 2
    assert pool.kept_bytes + pool.lent_bytes == 3 * 4 * COUNT

    del in_folder
    assert pool.file_of(pool.take(COUNT, shared=True, after=values)) is not None
    small.close()


def test_shared_memory_leaves_files_for_connections(folder: SharedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory takes at most half of the files that the shard may open; the rest is private."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (6, 6))
    pool = BufferPool(folder=folder)
    taken = [pool.take(COUNT, shared=True) for _ in range(5)]
    assert [pool.file_of(a) is not None for a in taken] == [True, True, True, False, False]


def test_a_full_folder_costs_no_memory_that_is_not_used(short_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With a full folder private memory is used again, and none is made for a slot; that it is full is logged once."""
    folder = SharedFolder.open(str(short_path), "shard-0", 4 * COUNT)
    assert folder is not None
    pool, slots = BufferPool(folder=folder), BufferPool(folder=folder)
    lending = Lending(pool, slots, folder.board, Now())
    first = pool.take(COUNT, shared=True)
    for _ in range(3):
        pool.take(COUNT, shared=True)[:] = 1.0
        with pytest.raises(Unavailable, match="full"):
            slot(lending, 4 * COUNT)
    assert pool.kept_bytes == pool.lent_bytes == first.nbytes
    assert slots.kept_bytes == slots.lent_bytes == lending.slot_bytes == 0
    assert len(caplog.records) == 1
    folder.close()


def test_mappings_are_kept_for_the_next_turn(folder: SharedFolder, versions: BufferPool) -> None:
    """The same buffers give the same mapping until its folder is forgotten; buffers that cannot be mapped raise."""
    mappings = Mappings()
    values = versions.take(COUNT, shared=True)
    path = str(folder.path / str(versions.file_of(values)))
    first = mappings.of([(path, 4 * COUNT)])
    assert mappings.of([(path, 4 * COUNT)]) is first
    assert mappings.of([(path, 4)]) is not first
    mappings.forget(str(folder.path)[:-1])
    assert mappings.of([(path, 4 * COUNT)]) is first
    mappings.forget(str(folder.path))
    assert mappings.of([(path, 4 * COUNT)]) is not first
    with pytest.raises(OSError, match="No such file"):
        mappings.of([(path + "x", 4 * COUNT)])
    with pytest.raises(OSError, match="shorter than expected"):
        mappings.of([(path, os.stat(path).st_size + 1)])
    with pytest.raises(ValueError, match="page"):
        mappings.of([(path, PAGE_BYTES + 4), (path, 4)])


def test_pages_of_a_file_become_private_unseen(short_path: Path) -> None:
    """A reader sees the same contents at every moment while pages change between file and private memory."""
    size, path = 64 * PAGE_BYTES, short_path / "slot"
    path.write_bytes(bytes([7]) * size)
    memory, runs, over, found = private(size), [(0, 0, size)], threading.Event(), set[int]()
    pages, values = RemappableMemory(memory), np.frombuffer(memory, np.uint8)
    pages.map_file(str(path), runs)

    def read() -> None:
        while not over.is_set():
            found.update((int(values.min()), int(values.max())))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(2000):
        pages.make_private(runs)
        pages.map_file(str(path), runs)
    pages.make_private(runs)
    over.set()
    reader.join()
    assert found == {7}
    values[:] = 8
    assert path.read_bytes() == bytes([7]) * size


def test_values_can_be_read_to_the_very_end_of_a_process(short_path: Path) -> None:
    """An atexit handler that runs last can still read values, which once ended in a segmentation fault."""
    file = short_path / "values"
    file.write_bytes(np.arange(1024, dtype=np.float32).tobytes())
    program = f"""
import atexit
atexit.register(lambda: print(values.sum()))
from paramserver.client.mapped_buffers import MappedBuffers
values = MappedBuffers([({str(file)!r}, 4096)]).values()
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "523776.0"), done.stderr
