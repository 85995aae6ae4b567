"""The board of a shard in shared memory: which leases a client may use without asking, and how they end."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paramserver import limits
from paramserver.client.board import BoardView
from paramserver.client.same_host import Leased, SameHost
from paramserver.core.partition_state import PartitionState
from paramserver_shard.board import Board
from paramserver_shard.buffers import BufferPool
from paramserver_shard.lending import Lending
from paramserver_shard.shared_folder import SharedFolder

from .sharding import Now

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="buffers are mapped in place on Linux")


COUNT = 1 << 16
"""Elements of a buffer: 256 KiB, which is large enough to be pooled."""


@pytest.fixture
def board(folder: SharedFolder) -> Board:
    """The board of the folder's shard, which is allowed to serve for the next minute."""
    now = time.monotonic()
    folder.board.set_serving_window(now, now + 60.0)
    return folder.board


def test_a_lease_stands_on_the_board_until_other_values_take_its_place(
    folder: SharedFolder, board: Board, now: Now
) -> None:
    """A lease is confirmed until one of its partitions is superseded or it is released, and never again."""
    versions = BufferPool(folder=folder)
    lending = Lending(versions, BufferPool(folder=folder), board, now)
    view = BoardView(str(folder.path))
    old, other, new = (versions.take(COUNT, shared=True) for _ in range(3))
    first, second = lending.lease([old, other], current=True), lending.lease([other], current=True)
    past = lending.lease([old])
    assert first is not None
    assert second is not None
    assert past is not None
    assert [view.confirms(n) for n, _ in (first, second, past)] == [True, True, False]

    lending.clear_superseded([PartitionState(old, (), ())])
    third = lending.lease([new, other], current=True)
    assert third is not None
    assert [view.confirms(n) for n, _ in (first, second, third)] == [False, True, True]

    lending.release([second[0]])
    lending.clear_superseded([PartitionState(other, (), ())])
    assert [view.confirms(n) for n, _ in (first, second, third)] == [False, False, False]


def test_a_lease_that_has_ended_is_not_confirmed(folder: SharedFolder, board: Board, now: Now) -> None:
    """A lease that has expired is not confirmed, even if its values are still current."""
    versions = BufferPool(folder=folder)
    lending = Lending(versions, BufferPool(folder=folder), board, now)
    granted = lending.lease([versions.take(COUNT, shared=True)], current=True)
    assert granted is not None
    now.s += limits.SHARED_LEASE_S
    lending.expire()
    assert not BoardView(str(folder.path)).confirms(granted[0])


def test_a_shard_that_may_not_serve_confirms_nothing(folder: SharedFolder, board: Board) -> None:
    """Outside its serving window a board confirms nothing, nor with a start in the future (another clock)."""
    view, now = BoardView(str(folder.path)), time.monotonic()
    board.mark_current(5)
    assert view.confirms(5)
    for said, until in ((now - 9.0, now - 6.0), (now + 60.0, now + 63.0), (0.0, 0.0)):
        board.set_serving_window(said, until)
        assert not view.confirms(5)


def test_the_board_of_a_process_that_has_ended_confirms_nothing(short_path: Path) -> None:
    """The board of a process that has ended confirms nothing, because the lock has ended with it."""
    code = (
        "import sys, time; "
        "from paramserver_shard.shared_folder import SharedFolder\n"
        "f = SharedFolder.open(sys.argv[1], 's', 1 << 20); b = f.board\n"
        "b.set_serving_window(time.monotonic(), time.monotonic() + 60.0); b.mark_current(7)\n"
        "print(f.path, flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(short_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process:
        view = BoardView(process.stdout.readline().strip())
        assert view.confirms(7)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not view.confirms(7)


def test_nothing_is_held_of_shards_that_have_ended(short_path: Path) -> None:
    """A client that uses the next shard keeps no open files and mappings of the one that has ended."""
    same_host = SameHost()

    def held() -> tuple[int, int]:
        links = [os.readlink(f.path) for f in os.scandir("/proc/self/fd") if os.path.islink(f.path)]
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        return sum(str(short_path) in link for link in links), sum(str(short_path) in line for line in maps)

    found = []
    for i in range(4):
        folder = short_path / f"shard-{i}"
        folder.mkdir()
        for name, size in (("board", 8 * 8192), ("b1", 4 * COUNT), ("b2", 4 * COUNT)):
            (folder / name).write_bytes(bytes(size))
        with open(folder / "lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            address = f"unix://{folder}/requests"
            slot = same_host.map_slot(address, "b1", 4 * COUNT)
            assert slot is not None
            same_host.keep(slot)
            del slot
            leased = [Leased(address, 1, ((0, "b2", 4 * COUNT),))]
            assert same_host.hold(leased).values() is not None
            assert not same_host.confirmed(leased)
            assert same_host.take_ended(address) == (1,)
            found.append(held())
    assert len(set(found)) == 1


def test_without_a_board_nothing_is_confirmed(short_path: Path) -> None:
    """Where the folder is gone nothing is confirmed, so the client has to ask the shard."""
    assert not BoardView(str(short_path / "gone")).confirms(1)


def test_leases_that_are_over_are_told_once_by_whoever_asks_first() -> None:
    """Each ended lease is taken exactly once, without an error, when several threads take them at the same time."""
    same_host = SameHost()
    address = "unix:///x/socket"
    told: list[int] = []
    wrong: list[Exception] = []

    def ask() -> None:
        try:
            for _ in range(3000):
                told.extend(same_host.take_ended(address))
        except Exception as e:
            wrong.append(e)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(3000):
            same_host.end_leases([Leased(address, number, ())])
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    told.extend(same_host.take_ended(address))
    assert not wrong
    assert sorted(told) == list(range(3000))
