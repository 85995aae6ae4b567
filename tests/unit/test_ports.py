"""Which blocks of ports the clusters of this machine get."""

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from paramserver.errors import PsError
from paramserver_cli import ports


def test_a_block_of_ports_is_taken_whole_and_by_one_cluster() -> None:
    """Two reservations do not overlap, a block in use is refused, and a released block can be reserved again."""
    one = ports.reserve(3, schedulers=2)
    two = ports.reserve(3, schedulers=2)
    base = one.schedulers[0]
    try:
        mine, others = ({*b.schedulers, *map(b.shard, range(b.shards_max)), b.redis} for b in (one, two))
        assert len(mine) == 2 + one.shards_max + 1 == 100
        assert mine.isdisjoint(others)
        with pytest.raises(PsError, match="in use"):
            ports.reserve(3, base=base)
    finally:
        one.lock.close()
        two.lock.close()
    again = ports.reserve(3, base=base)
    again.lock.close()
    assert again.schedulers == [base]


def test_an_address_of_another_machine_is_not_blamed_on_the_ports() -> None:
    """Reserving ports on another machine's address fails with an error about the address, not about ports in use."""
    with pytest.raises(PsError, match=r"192\.0\.2\.1.*of this machine"):
        ports.reserve(1, host="192.0.2.1")


def test_many_shards_fit_between_scheduler_and_redis() -> None:
    """With more shards than a block has ports, the block grows, and the shards' ports stay between the others."""
    block = ports.reserve(150)
    block.lock.close()
    assert block.shards_max >= 150
    assert block.schedulers[0] < block.shard(0) < block.shard(block.shards_max - 1) < block.redis


def test_a_large_block_of_ports_is_taken_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a block of several strides is reserved, no other can begin or end inside it."""
    monkeypatch.setattr("paramserver_cli.ports.tempfile.gettempdir", lambda: str(tmp_path))  # no other cluster's locks
    first, second, third = (20_000 + i * ports.STRIDE for i in range(3))
    with closing(ports.reserve(150, base=second).lock):
        for shards, base in ((150, first), (3, second), (3, third)):
            with pytest.raises(PsError, match="in use"):
                ports.reserve(shards, base=base)
        ports.reserve(3, base=first).lock.close()
    ports.reserve(150, base=first).lock.close()
    ports.reserve(3, base=third).lock.close()


def test_blocks_of_ports_that_overlap_exclude_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that begins in the middle of another, or ends there, is refused, even if no common port is in use yet."""
    monkeypatch.setattr("paramserver_cli.ports.tempfile.gettempdir", lambda: str(tmp_path))  # no other cluster's locks
    base, half = 20_000, ports.STRIDE // 2
    with closing(ports.reserve(3, base=base).lock):
        for at in (base + half, base - half):
            with pytest.raises(PsError, match=f"{base + half} to|{base - half} to"):
                ports.reserve(3, base=at)
        ports.reserve(3, base=base + ports.STRIDE).lock.close()


@pytest.fixture
def stretch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The first port of two strides that nothing else uses, and that are all the ports there are for clusters."""
    held = ports.reserve(150)
    base = held.schedulers[0]
    monkeypatch.setattr("paramserver_cli.ports.tempfile.gettempdir", lambda: str(tmp_path))  # not that lock
    monkeypatch.setattr(ports, "BASE", base)
    monkeypatch.setattr(ports, "LAST_BASE", base + 2 * ports.STRIDE)
    with closing(held.lock):
        yield base


@pytest.mark.parametrize(("offset", "host"), [(0, "127.0.0.1"), (2, "127.0.0.1"), (99, "127.0.0.1"), (1, "::1")])
def test_a_block_with_a_port_in_use_is_passed_over(stretch: int, offset: int, host: str) -> None:
    """A block is refused, and by default passed over, while another program listens on a port that it needs."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, stretch + offset), family=family):
        with pytest.raises(PsError, match=f"some of the ports {stretch} to {stretch + 99} are in use"):
            ports.reserve(2, host, stretch)
        other = ports.reserve(2, host)
        with closing(other.lock), pytest.raises(PsError, match="no block of ports is free"):
            ports.reserve(2, host)
    assert other.schedulers == [stretch + ports.STRIDE]
    ports.reserve(2, host, stretch).lock.close()


def test_a_cluster_can_start_again_at_once_on_its_ports(stretch: int) -> None:
    """A port counts as free although the kernel still remembers connections that its last server has closed."""
    with socket.create_server(("127.0.0.1", stretch)) as server, socket.create_connection(server.getsockname()):
        server.accept()[0].close()
    ports.reserve(2, base=stretch).lock.close()


@pytest.mark.parametrize(("shards", "schedulers", "size"), [(98, 1, 100), (99, 1, 200), (96, 3, 100), (97, 3, 200)])
def test_a_block_is_no_larger_than_its_processes_need(stretch: int, shards: int, schedulers: int, size: int) -> None:
    """A block has a port for each scheduler, each shard and Redis, rounded up to whole strides."""
    block = ports.reserve(shards, schedulers=schedulers)
    block.lock.close()
    assert block.redis + 1 - block.schedulers[0] == size


def test_no_port_is_reserved_in_another_users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever made the folder of the locks could hold every port, or have files made elsewhere through a link."""
    monkeypatch.setattr("paramserver_cli.ports.tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / f"paramserver-ports-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(OSError, match="not this user's own"):
        ports.reserve(1)
