"""A shard's memory limit, and the load it reports for each partition."""

from pathlib import Path

import numpy as np
import psutil
import pytest

from paramserver.core.partition_state import PartitionState
from paramserver.core.ranges import of_pairs
from paramserver.core.shard.effects import PullDone, PulledPart, PushDone
from paramserver.core.shard.events import PushPart, PushReceived
from paramserver.errors import RequestError
from paramserver.types import ModelKey
from paramserver_node.setting_checks import size_bytes
from paramserver_shard.loads import Loads
from paramserver_shard.memory import Memory, limit_of


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("1073741824", 1 << 30),
        ("512MiB", 512 << 20),
        ("2 GiB", 2 << 30),
        ("2g", 2 << 30),
        ("1.5GB", 3 << 29),
        ("100K", 100 << 10),
    ],
)
def test_a_size_as_people_write_it(text: str, want: int) -> None:
    """A size is a number of bytes, or has any of the usual suffixes, which are read as powers of 1024."""
    assert size_bytes(text) == want


@pytest.mark.parametrize("text", ["", "much", "-1", "0", "5 apples", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """Text that is not a positive size with a known suffix is refused."""
    with pytest.raises(RequestError):
        size_bytes(text)


def test_the_container_limits_what_the_machine_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The limit is the lowest of the setting, the control groups (v1 or v2) around the process, and the machine.

    A setting above the others would admit models for which the system kills the process; the log says so.
    """
    total = int(psutil.virtual_memory().total)
    own = tmp_path / "own"
    groups = tmp_path / "cgroup"
    assert limit_of("", groups, own) == total, "no control groups at all"
    own.write_text("0::/kubepods/pod7/c1\n")
    inner = groups / "kubepods" / "pod7" / "c1"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    assert limit_of("", groups, own) == total
    (inner.parent / "memory.max").write_text("700000000\n")
    assert limit_of("", groups, own) == 700_000_000
    (inner / "memory.max").write_text("600000000\n")
    assert limit_of("", groups, own) == 600_000_000
    (groups / "memory.max").write_text("500000000\n")
    assert limit_of("", groups, own) == 500_000_000, "what a container sees as its own root"
    own.write_text("12:cpu:/x\n7:hugetlb,memory:/docker/ab\n")
    old = groups / "memory" / "docker" / "ab"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("400000000\n")
    assert limit_of("", groups, own) == 400_000_000
    assert limit_of("100MiB", groups, own) == 100 << 20
    assert not caplog.records
    assert limit_of("2GiB", groups, own) == 400_000_000
    assert [r.getMessage() for r in caplog.records] == [
        "memory_limit is 2GiB, but the container or machine has 381 MiB, which counts"
    ]


def test_memory_in_use_is_told() -> None:
    """The memory document has the limit and the memory that this process uses."""
    document = Memory(1 << 40).document()
    assert document["limit_bytes"] == 1 << 40
    assert 10 << 20 < document["used_bytes"] < psutil.virtual_memory().total


def test_a_pull_of_ranges_counts_only_their_bytes() -> None:
    """A pull of ranges adds the bytes of those ranges, not the partition's size, to its load."""
    now = [0.0]
    loads = Loads(lambda: now[0])
    state = PartitionState(np.zeros(1_000_000, np.float32), (), ())
    parts = (PulledPart(0, state, 1, 1), PulledPart(1, state, 1, 1))
    loads.pulled(PullDone(ModelKey("m", 2), 0, parts), [of_pairs([(0, 10), (20, 30)]), None])
    now[0] += 1.0
    (_, _, _, ranged), (_, _, _, whole) = sorted(loads.rates())
    assert float(ranged) == pytest.approx(float(whole) * 80 / 4_000_000, abs=0.1)


def test_loads_follow_the_traffic_and_fade() -> None:
    """After 20 s of 1 MB/s the load is above 0.8 MB/s, 30 s after the end below 0.05, and after 230 s gone."""
    now = [0.0]
    loads = Loads(lambda: now[0])
    model = ModelKey("m", 2)
    part = PushPart(3, np.zeros(250_000, np.float32), "float32", 0, True)
    done = PushDone(model, 0, "applied", False, ())
    for _ in range(20):
        loads.pushed(PushReceived("m", (part,)), done)
        now[0] += 1.0
        loads.rates()
    ((name, generation, index, rate),) = loads.rates()
    assert (name, generation, index) == ("m", 2, 3)
    assert 800_000 < float(rate) <= 1_000_000
    now[0] += 30.0
    assert 0 < float(loads.rates()[0][3]) < 50_000
    now[0] += 200.0
    assert loads.rates() == []
