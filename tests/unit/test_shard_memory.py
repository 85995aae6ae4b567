"""Pooled buffers, .npy headers and the stored form of partitions."""

import io
import random
import sys
import threading
from collections import deque

import numpy as np
import pytest

from paramserver.core.layout import Layout
from paramserver.core.partition_state import Capture, HeldPart
from paramserver.core.ranges import of_pairs
from paramserver.core.shard.effects import LoadPartition
from paramserver.core.shard.initial import first_state
from paramserver.core.spec import ModelSpec
from paramserver.errors import RequestError
from paramserver.types import ModelKey, PartitionKey
from paramserver_shard.arrays import npy_header, read_npy
from paramserver_shard.buffers import IDLE_S, PAGE_BYTES, SMALL_BYTES, BufferPool
from paramserver_shard.snapshot_format import from_stored, to_stored

COUNT = SMALL_BYTES  # elements of four bytes each: four times the smallest size that is pooled


def test_memory_returns_to_the_pool_only_with_its_last_view() -> None:
    """Memory stays lent while any view of a view of it exists; after the last one, the next buffer reuses it."""
    pool = BufferPool()
    buffer = pool.take(COUNT)
    address = buffer.ctypes.data
    assert address % 4096 == 0
    view = buffer.view(np.uint16)[10:20]
    memory = view.data
    del buffer, view
    assert pool.lent_bytes >= 4 * COUNT
    other = pool.take(COUNT)
    assert other.ctypes.data != address
    del memory
    assert pool.take(COUNT).ctypes.data == address


def test_the_pool_keeps_a_bounded_amount() -> None:
    """The pool keeps at most `kept_bytes_max` of the memory that is returned to it."""
    pool = BufferPool(kept_bytes_max=8 * COUNT)
    buffers = [pool.take(COUNT) for _ in range(5)]
    buffers.clear()
    assert pool.lent_bytes == 0
    assert 0 < pool.kept_bytes <= 8 * COUNT


def test_a_pool_that_is_idle_keeps_nothing() -> None:
    """Once no buffer has been asked for in IDLE_S, free memory is given up; what is lent stays."""
    pool = BufferPool()
    pool.let_go_if_idle(0.0)
    lent, free = pool.take(COUNT), pool.take(COUNT)
    lent[:] = 7.0
    del free
    for now_s, kept in ((10.0, 4 * COUNT), (9.9 + IDLE_S, 4 * COUNT), (10.0 + IDLE_S, 0)):
        pool.let_go_if_idle(now_s)
        assert pool.kept_bytes == kept
    assert pool.lent_bytes == 4 * COUNT
    assert (lent == 7.0).all()
    del lent
    assert pool.kept_bytes == 4 * COUNT
    pool.let_go_if_idle(11.0 + IDLE_S)
    assert pool.kept_bytes == 0


def test_a_buffer_holds_hardly_more_than_was_asked_for() -> None:
    """A buffer takes at most 1/128 or one page more than was asked for, because unused pages are memory, too."""
    pool = BufferPool()
    for size in (5_000_000, 40_000_000, SMALL_BYTES + 1):
        buffer = pool.take_bytes(size)
        assert size <= pool.lent_bytes <= max(size * 129 // 128, size + PAGE_BYTES)
        del buffer


def test_partitions_of_nearly_one_size_share_their_memory() -> None:
    """Buffers of almost equal size serve each other, even if a step between two pooled sizes lies between them."""
    pool = BufferPool()
    step = 16 << 10
    smaller, larger = 240 * step, 240 * step + PAGE_BYTES
    first = pool.take_bytes(smaller)
    second = pool.take_bytes(larger)
    of_smaller, of_larger = first.ctypes.data, second.ctypes.data
    assert pool.reuse(pool.take_bytes(smaller), larger // 4) is not None
    del first, second
    assert pool.kept_bytes <= 2 * 241 * step, "memory that nobody will ask for again"
    again = [pool.take_bytes(smaller), pool.take_bytes(smaller)]
    assert of_larger in (b.ctypes.data for b in again)
    assert of_smaller not in (b.ctypes.data for b in again)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (1, 1, 4), (0,)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_npy_headers_are_numpys(shape: tuple[int, ...], dtype: str) -> None:
    """NumPy reads .npy headers that are written here, and files that NumPy writes are read here."""
    array = np.ones(shape, dtype)
    assert np.array_equal(np.load(io.BytesIO(npy_header(dtype, shape) + array.tobytes())), array)
    file = io.BytesIO()
    np.save(file, array)
    back = read_npy(file.getvalue())
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f4', 'fortran_order': True, 'shape': (1,)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (1e9,)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999,)}",
        b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
        b"[" * 5000,
        b"__import__('os')",
        b"",
    ],
)
def test_damaged_npy_files_are_refused(header: bytes) -> None:
    """A .npy header that is malformed or lies raises RequestError and never anything else."""
    with pytest.raises(RequestError):
        read_npy(npy(header) + bytes(4))


@pytest.mark.parametrize("shape", [(0,) * 100, (0, 2**70), (0, 2**40, 2**40)])
def test_a_npy_file_without_values_has_no_shape_beyond_numpys(shape: tuple[int, ...]) -> None:
    """A shape that NumPy cannot hold is refused, although a size of 0 in it makes the number of bytes right."""
    with pytest.raises(RequestError):
        read_npy(npy(repr({"descr": "<f4", "fortran_order": False, "shape": shape}).encode()))


def npy(header: bytes) -> bytes:
    """Return a .npy file with that header, up to its values."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


def test_a_capture_survives_being_stored() -> None:
    """Values, slots, steps, push memory and held gradients survive the conversion to the stored form and back."""
    spec = ModelSpec.parse(
        {
            "name": "m",
            "params": {"w": {"shape": [8], "init": {"kind": "normal"}}},
            "optimizer": {"name": "adam"},
            "partitions": 2,
        }
    )
    key = PartitionKey(ModelKey("m", 1), 1)
    layout = Layout(spec)
    first = first_state(LoadPartition(key, 9, "init", spec, layout), lambda n: np.empty(n, np.float32))
    held = HeldPart("w0", 1, -1, 7, (3, 9), 0.5, of_pairs([(0, 2)]), np.array([1, 2], np.uint16), "bfloat16")
    capture = Capture(first.state, 4, 0, {"windows": [["w0", 1, 3]]}, (held,), key=key, token=9)
    head, arrays = to_stored(capture)
    back = from_stored(head, [a.copy() for a in arrays])
    assert (back.version, back.stored) == (4, True)
    assert np.array_equal(back.state.values, first.state.values)
    assert len(back.state.slots) == 2
    assert back.state.steps == (0,)
    assert back.memory == {"windows": [["w0", 1, 3]]}
    assert back.buffered[0].ranges is not None
    assert back.buffered[0].ranges.tolist() == [[0, 2]]
    assert back.buffered[0].base == (3, 9)
    assert back.buffered[0].data.tolist() == [1, 2]


def test_rows_are_taken_while_threads_take_and_let_go() -> None:
    """`take_free` returns no buffer in use and does not fail while other threads take and release buffers."""
    pool = BufferPool(kept_bytes_max=24 * COUNT)
    values = [pool.take(COUNT, shared=True) for _ in range(8)]
    over, failed = threading.Event(), []

    def compute(seed: int) -> None:
        chance, held = random.Random(seed), deque([values[seed]], maxlen=3)
        try:
            while not over.is_set():
                mine = pool.take(COUNT, shared=True, after=held[-1])
                mine[0] = seed
                held.append(mine)
                if chance.random() < 0.3:
                    held.popleft()
                assert all(a[0] == seed for a in held if a is not values[seed])
        except Exception as e:
            failed.append(e)

    threads = [threading.Thread(target=compute, args=(seed,)) for seed in range(1, 4)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for t in threads:
            t.start()
        for _ in range(2000):
            fresh = [found for found in pool.take_free(values) if found is not None]
            for i, array in enumerate(fresh):
                array[0] = 100 + i
            assert [a[0] for a in fresh] == [100 + i for i in range(len(fresh))]
    finally:
        sys.setswitchinterval(interval_s)
        over.set()
        for t in threads:
            t.join()
    assert not failed
