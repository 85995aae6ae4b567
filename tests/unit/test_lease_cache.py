"""The cache of values leased from shards on the same machine, and when a push requests new ones."""

from collections.abc import Sequence

import pytest

from paramserver.client.arrays import Origin
from paramserver.client.lease_cache import IN_VAIN_MAX, KEPT_MAX, RARELY, LeaseCache
from paramserver.client.mapped_buffers import Mappings
from paramserver.client.same_host import Leased, LeasedValues, SameHost


class Shard(SameHost):
    """Confirms the leases in `present`, and records in `ended` those that the cache has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.present: set[int] = set()
        self.ended: list[int] = []

    def confirmed(self, leased: Sequence[Leased]) -> bool:
        return all(lease.number in self.present for lease in leased)

    def end_leases(self, leased: Sequence[Leased]) -> None:
        self.ended += [lease.number for lease in leased]

    def lend(self, number: int) -> LeasedValues:
        """Return values with a new lease, which becomes the only confirmed one."""
        self.present = {number}
        return LeasedValues(self, Mappings(), [Leased("unix://x/requests", number, ())], [])


def origin(version: int, model: str = "m") -> Origin:
    return Origin(model, 1, 0, version, 1, {0: (version, 1)})


@pytest.fixture
def shard() -> Shard:
    """Return a shard without leases."""
    return Shard()


def test_what_is_confirmed_is_the_answer_and_what_is_not_is_given_back_at_once(shard: Shard) -> None:
    """Lookup returns confirmed values, and ends leases no longer confirmed at once, so that their memory is free."""
    cache = LeaseCache(shard)
    cache.keep(origin(3), shard.lend(1))
    found = cache.lookup("m", 1, None, 0)
    assert found is not None
    assert found[1].version == 3
    del found
    assert not shard.ended

    shard.present = {2}
    assert cache.lookup("m", 1, None, 0) is None
    assert shard.ended == [1]


def test_only_what_the_caller_asked_for_is_an_answer(shard: Shard) -> None:
    """Lookup returns nothing for another model, timeline or generation, or if the version is not reached."""
    cache = LeaseCache(shard)
    cache.keep(origin(3), shard.lend(1))
    assert cache.lookup("other", 1, None, 0) is None
    assert cache.lookup("m", 1, 1, 0) is None
    assert cache.lookup("m", 1, None, 4) is None
    assert cache.lookup("m", 1, 0, 3) is not None
    assert cache.lookup("m", 2, None, 0) is None


def test_a_version_does_not_tell_which_commits_are_in_the_values(shard: Shard) -> None:
    """Lookup with a minimum clock returns only values known to include it, whatever their version.

    Assignments raise the version, too.
    """
    cache = LeaseCache(shard)
    cache.keep(origin(7), shard.lend(1))
    assert cache.lookup("m", 1, 0, 0, 1) is None
    cache.keep(origin(8), shard.lend(2), 5)
    assert cache.lookup("m", 1, 0, 0, 5) is not None
    assert cache.lookup("m", 1, 0, 0, 6) is None
    cache.keep(origin(9), shard.lend(3), 6, pushed=True)
    assert cache.lookup("m", 1, 0, 0, 6) is not None


def test_a_push_asks_for_what_it_makes_where_pulls_follow_pushes(shard: Shard) -> None:
    """A push requests values only if a pull followed the last push, and rarely while others' pushes make them stale."""
    cache = LeaseCache(shard)
    assert not cache.should_request_values("m")
    cache.keep(origin(0), shard.lend(1))
    assert cache.should_request_values("m")
    assert not cache.should_request_values("m")

    asked = []
    for i in range(4 * RARELY):
        asked.append(cache.should_request_values("m"))
        if asked[-1]:
            cache.keep(origin(i), shard.lend(2 * i + 2), pushed=True)
        shard.present = set()
        assert cache.lookup("m", 1, None, 0) is None
        cache.keep(origin(i), shard.lend(2 * i + 3))
    assert sum(asked) <= IN_VAIN_MAX + 4
    assert any(asked[-RARELY:])

    for i in range(2 * RARELY):  # the others have stopped pushing
        if cache.should_request_values("m"):
            cache.keep(origin(100 + i), shard.lend(1000 + i), pushed=True)
        assert cache.lookup("m", 1, None, 0) is not None
    assert cache.should_request_values("m")


def test_leases_of_few_models_are_held(shard: Shard) -> None:
    """Leases of the KEPT_MAX most recently used models are kept, and those of others are ended."""
    cache = LeaseCache(shard)
    for i in range(3 * KEPT_MAX):
        cache.keep(origin(0, f"m{i}"), shard.lend(i))
    assert shard.ended == list(range(2 * KEPT_MAX))
