"""The client's side of shared memory, on plain files: mappings, remapped pages, slots and leases."""

import gc
import logging
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paramserver.client.cluster import Cluster
from paramserver.client.mapped_buffers import KEPT_MAX, PAGE_BYTES, MappedBuffers, Mappings, RemappableMemory, private
from paramserver.client.same_host import Leased, SameHost, Slot
from paramserver.limits import SHARED_LEASE_S
from paramserver.types import AnyArray

from .sharding import Now

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is shared on Linux")

MIB = 1 << 20


@pytest.fixture
def same_host(now: Now) -> SameHost:
    """The slots and leases of one client."""
    return SameHost(now)


def file(folder: Path, name: str, size_bytes: int = PAGE_BYTES, value: float = 0.0) -> str:
    """Make a file of a shard that is filled with this value, and return its path."""
    path = folder / name
    path.write_bytes(np.full(size_bytes // 4, value, np.float32).tobytes())
    return str(path)


def test_the_mappings_kept_are_those_used_last(tmp_path: Path) -> None:
    """As many mappings are kept as a shard has buffers in turn; one more takes the place of the least recently used."""
    mappings = Mappings()
    pieces = [[(file(tmp_path, f"b{i}"), PAGE_BYTES)] for i in range(KEPT_MAX + 1)]
    made = [mappings.of(piece) for piece in pieces[:KEPT_MAX]]
    assert mappings.of(pieces[0]) is made[0]
    mappings.of(pieces[KEPT_MAX])

    assert all(mappings.of(pieces[i]) is made[i] for i in range(KEPT_MAX) if i != 1)
    assert mappings.of(pieces[1]) is not made[1]


def is_mapped(path: str) -> bool:
    """Whether the file, or the deleted one that had this path, is mapped into this process."""
    return path in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_buffers_that_were_deleted_are_unmapped(tmp_path: Path) -> None:
    """The next mapping, or `drop_deleted`, drops those with a buffer that its shard has deleted; arrays keep theirs."""
    first, second, third = (file(tmp_path, name, PAGE_BYTES, 1.0) for name in ("b1", "b2", "b3"))
    mappings = Mappings()
    values = mappings.of([(first, PAGE_BYTES), (second, PAGE_BYTES)]).values()
    mappings.of([(third, PAGE_BYTES)])
    os.unlink(second)
    mappings.drop_deleted()
    assert is_mapped(second)
    assert set(values.tolist()) == {1.0}
    del values
    assert (is_mapped(first), is_mapped(second), is_mapped(third)) == (False, False, True)

    os.unlink(third)
    mappings.of([(first, PAGE_BYTES)])
    assert (is_mapped(first), is_mapped(third)) == (True, False)


def test_a_client_that_leaves_keeps_no_values_mapped(tmp_path: Path) -> None:
    """A client that is closed unmaps all values; an array that is still in use keeps its own."""
    for name in ("used", "unused"):
        file(tmp_path, name)
    cluster = Cluster(("http://127.0.0.1:1",))
    values = [
        cluster.same_host.hold([Leased(f"unix://{tmp_path}/requests", 5, ((0, name, PAGE_BYTES),))]).values()
        for name in ("used", "unused")
    ]
    assert values.pop() is not None
    list(cluster.leave())

    assert (is_mapped(str(tmp_path / "used")), is_mapped(str(tmp_path / "unused"))) == (True, False)
    values.clear()
    assert not is_mapped(str(tmp_path / "used"))


def test_memory_that_is_not_to_be_had_is_an_error(tmp_path: Path) -> None:
    """A mapping larger than the address space raises OSError that says how much could not be mapped, and why."""
    size = 1 << 60
    with pytest.raises(OSError, match=f"cannot map {size} bytes: Cannot allocate memory"):
        MappedBuffers([(file(tmp_path, "b"), size)])


@pytest.fixture
def pages() -> tuple[mmap.mmap, AnyArray, RemappableMemory]:
    """64 MiB of memory whose pages can be remapped: itself, its bytes, and what remaps it."""
    memory = private(64 * MIB)
    return memory, np.frombuffer(memory, np.uint8), RemappableMemory(memory)


def mapped_bytes() -> int:
    """Return the size of this process' address space."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * PAGE_BYTES


def test_pages_that_cannot_become_private_stay_the_files(
    tmp_path: Path, pages: tuple[mmap.mmap, AnyArray, RemappableMemory]
) -> None:
    """If pages cannot be moved, OSError is raised, the memory is still the file's, and nothing stays allocated."""
    memory, values, remappable = pages
    path = tmp_path / "slot"
    path.write_bytes(b"\x07" * len(memory))
    remappable.map_file(str(path), [(0, 0, len(memory))])
    before = mapped_bytes()

    with pytest.raises(OSError, match=f"cannot move {len(memory) - PAGE_BYTES} bytes: Invalid argument"):
        remappable.make_private([(1, 0, len(memory) - PAGE_BYTES)])  # pages can only go where a page begins

    assert mapped_bytes() - before < len(memory) // 2
    values[:3] = 8
    assert path.read_bytes()[:4] == b"\x08\x08\x08\x07"


def test_pages_that_cannot_be_protected_are_an_error(pages: tuple[mmap.mmap, AnyArray, RemappableMemory]) -> None:
    """If pages cannot be made read-only, OSError is raised."""
    with pytest.raises(OSError, match=f"cannot protect {PAGE_BYTES} bytes: Invalid argument"):
        pages[2].make_read_only([(1, 0, PAGE_BYTES)])


def test_cleared_pages_are_zeros_of_ones_own(
    tmp_path: Path, pages: tuple[mmap.mmap, AnyArray, RemappableMemory]
) -> None:
    """Pages that are cleared are zero, all others stay, and what is written to them afterwards is not in the file."""
    _, values, remappable = pages
    path = tmp_path / "slot"
    path.write_bytes(b"\x07" * 3 * PAGE_BYTES)
    remappable.map_file(str(path), [(0, 0, 3 * PAGE_BYTES)])

    remappable.clear([(PAGE_BYTES, 0, PAGE_BYTES)])

    assert [set(values[i * PAGE_BYTES : (i + 1) * PAGE_BYTES].tolist()) for i in range(4)] == [{7}, {0}, {7}, {0}]
    values[PAGE_BYTES : 3 * PAGE_BYTES] = 9
    assert path.read_bytes() == b"\x07" * 2 * PAGE_BYTES + b"\x09" * PAGE_BYTES


def test_a_file_that_is_too_short_is_not_mapped(
    tmp_path: Path, pages: tuple[mmap.mmap, AnyArray, RemappableMemory]
) -> None:
    """A slot whose file lacks pages of any run raises OSError, because reading them would end the process."""
    _, values, remappable = pages
    path = file(tmp_path, "slot", 3 * PAGE_BYTES, 1.0)

    with pytest.raises(OSError, match="shorter than expected"):
        remappable.map_file(path, [(0, 3 * PAGE_BYTES, 4), (PAGE_BYTES, 0, PAGE_BYTES)])

    assert not values[: 2 * PAGE_BYTES].any()


@pytest.fixture
def lend(tmp_path: Path, same_host: SameHost) -> Callable[[int], Slot]:
    """Maps a new slot of so many bytes, in use."""

    def lent(size_bytes: int) -> Slot:
        name = f"s{len(os.listdir(tmp_path))}"
        file(tmp_path, name, size_bytes)
        slot = same_host.map_slot(f"unix://{tmp_path}/requests", name, size_bytes)
        assert slot is not None
        return slot

    return lent


def test_an_idle_slot_is_taken_if_it_is_large_enough(same_host: SameHost, lend: Callable[[int], Slot]) -> None:
    """A push gets an idle slot of at least its size, and no other push gets it until it is idle again."""
    small, large = lend(PAGE_BYTES), lend(2 * PAGE_BYTES)
    address = small.address
    same_host.keep(small)
    same_host.keep(large)

    assert large.path == f"{address.removeprefix('unix://').removesuffix('/requests')}/{large.file}"
    assert same_host.slot(address, 2 * PAGE_BYTES + 1) is None
    assert same_host.slot(address, PAGE_BYTES + 1) is large
    assert same_host.slot(address, PAGE_BYTES + 1) is None
    assert same_host.slot(address, PAGE_BYTES) is small
    same_host.keep(large)
    assert same_host.slot(address, 2 * PAGE_BYTES) is large


def test_a_slot_that_the_shard_may_take_back_is_not_used(
    same_host: SameHost, lend: Callable[[int], Slot], now: Now
) -> None:
    """A slot idle for 0.6 of its lease is not used any more; `idle`, unlike `keep`, does not count as a use."""
    kept, left = lend(PAGE_BYTES), lend(PAGE_BYTES)
    now.s += SHARED_LEASE_S * 0.3
    same_host.keep(kept)
    same_host.idle(left)
    now.s += SHARED_LEASE_S * 0.3

    assert same_host.slot(kept.address, PAGE_BYTES) is kept
    assert same_host.slot(kept.address, PAGE_BYTES) is None
    assert same_host.take_idle() == []


def test_idle_slots_are_kept(same_host: SameHost, lend: Callable[[int], Slot]) -> None:
    """The slots that become idle at a shard, finalizers' ones too, are all kept, and given back once.

    One that was dropped instead would stay lent until it expires.
    """
    slots = [lend(PAGE_BYTES) for _ in range(7)]
    for slot in slots[:5]:
        same_host.keep(slot)
    for slot in slots[5:]:
        slot.mapped = True
        same_host.idle_from_finalizer(slot)

    assert same_host.take_idle() == slots
    assert not any(slot.mapped for slot in slots)
    assert same_host.take_idle() == []
    same_host.idle_from_finalizer(slots[0])
    assert same_host.slot(slots[0].address, PAGE_BYTES) is slots[0]


def test_slots_that_are_not_needed_any_more_expire(same_host: SameHost, lend: Callable[[int], Slot], now: Now) -> None:
    """Pushes that do not overlap use one slot again and again, so that the others of an earlier burst expire."""
    slots = [lend(PAGE_BYTES) for _ in range(7)]
    for slot in slots:
        same_host.keep(slot)
    for _ in range(3):
        now.s += SHARED_LEASE_S * 0.3
        assert same_host.slot(slots[0].address, PAGE_BYTES) is slots[-1]
        same_host.keep(slots[-1])

    assert same_host.take_idle() == slots[-1:]


def test_a_slot_that_is_gone_is_not_used(tmp_path: Path, same_host: SameHost, caplog: pytest.LogCaptureFixture) -> None:
    """A slot or values whose file cannot be mapped are None, so that bytes travel over HTTP; the log says so once."""
    caplog.set_level(logging.INFO, "paramserver")
    address = f"unix://{tmp_path}/requests"

    assert same_host.map_slot(address, "gone", PAGE_BYTES) is None
    assert same_host.hold([Leased(address, 5, ((0, "gone", PAGE_BYTES),))]).values() is None

    assert [r.getMessage() for r in caplog.records if "shared_memory.unused" in r.getMessage()] == [
        f"shared_memory.unused reason=[Errno 2] No such file or directory: '{tmp_path}/gone': values travel over HTTP"
    ]
    assert same_host.take_ended(address) == (5,)


def test_leased_values_are_in_the_order_of_partitions(tmp_path: Path, same_host: SameHost) -> None:
    """Values leased from several shards, in whatever order they answered, are in the order of the partitions."""
    leased: list[Leased] = []
    for shard, partitions in (("b", (3, 1)), ("a", (2, 0))):
        (tmp_path / shard).mkdir()
        for p in partitions:
            file(tmp_path / shard, f"f{p}", PAGE_BYTES, float(p))
        pieces = tuple((p, f"f{p}", PAGE_BYTES) for p in partitions)
        leased.append(Leased(f"unix://{tmp_path}/{shard}/requests", len(leased), pieces))
    held = same_host.hold(leased)
    values = held.values()

    assert values is not None
    assert values[:: PAGE_BYTES // 4].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_lease_lasts_as_long_as_any_array_of_its_values(tmp_path: Path, same_host: SameHost) -> None:
    """A lease ends when neither its values nor a view of them is left, and is reported to its shard once."""
    address = f"unix://{tmp_path}/requests"
    file(tmp_path, "f")
    values = same_host.hold([Leased(address, 5, ((0, "f", PAGE_BYTES),))]).values()
    assert values is not None
    view = values[1:2]
    del values
    gc.collect()
    assert same_host.lenders() == []
    assert same_host.take_ended(address) == ()

    del view
    gc.collect()
    assert same_host.lenders() == [address]
    assert same_host.take_ended(None) == ()
    assert same_host.take_ended(address) == (5,)
    assert same_host.lenders() == []
