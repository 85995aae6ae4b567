"""The scheduler's state in a real Redis: written atomically, in order, by the newest leader only."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from tests.chaos.proxy import Link
from tests.refusals import refused_with
from tests.servers import free_port

from paramserver.errors import PsError
from paramserver.types import ModelKey, PartitionKey
from paramserver_node import redis as node_redis
from paramserver_node import redis_server
from paramserver_node.redis import LEADER_KEY, connect
from paramserver_scheduler import leadership as leadership_module
from paramserver_scheduler import lease as lease_module
from paramserver_scheduler.leadership import Leadership, kept
from paramserver_scheduler.lease import SCHEDULERS_KEY, Deposed, Leader, Lease, RedisDataLost
from paramserver_scheduler.store import StateStore

pytestmark = pytest.mark.process


async def leading(redis: AsyncRedis) -> StateStore:
    """The store of a scheduler that has just acquired the lease."""
    lease = Lease(redis, name="s", place="here", url="http://127.0.0.1:1")
    assert await lease.try_acquire()
    return StateStore(redis, lease)


def leases(redis: AsyncRedis, count: int) -> list[Lease]:
    """Return the leases of schedulers s1, s2, …, none of which is held."""
    return [Lease(redis, name=f"s{n}", place=f"place-{n}", url=f"http://127.0.0.1:{n}") for n in range(1, count + 1)]


KEY = PartitionKey(ModelKey("m", 1), 0)
HOUR_MS = 3_600_000


@pytest.fixture
def plain(redis_url: str) -> Iterator[Redis]:
    """A synchronous client of an empty Redis."""
    with Redis.from_url(redis_url) as client:
        client.flushall()
        yield client


async def test_what_was_written_is_read_by_the_next(redis_url: str, plain: Redis) -> None:
    """The next leader reads the fields that were set, changed and deleted, under a higher term."""
    async with connect(redis_url) as redis:
        first = await leading(redis)
        assert await first.open() == {}
        await first.write({"a": {"x": 1}, "b": {"x": 2}}, [(KEY, 5)])
        await first.write({"a": {"x": 3}, "b": None})
        second = await leading(redis)

        assert await second.open() == {"a": {"x": 3, "format": 1}}
        assert second.term == first.term + 1
        assert plain.get("{m.1/0}:token") == b"00000000000000000005"


async def test_an_older_scheduler_cannot_write(redis_url: str, plain: Redis) -> None:
    """Once a newer scheduler leads, a write of the older one raises `Deposed` and stores nothing."""
    async with connect(redis_url) as redis:
        first = await leading(redis)
        await first.open()
        second = await leading(redis)
        await second.open()

        with pytest.raises(Deposed):
            await first.write({"a": {"x": 1}}, [(KEY, 5)])
        await second.write({"b": {"x": 2}})

        assert plain.hkeys("ps:state") == [b"b"]
        assert plain.get("{m.1/0}:token") is None


async def test_an_emptied_redis_gets_everything_back(redis_url: str, plain: Redis) -> None:
    """An emptied Redis refuses partial writes; the whole state is written at once, in a new term."""
    async with connect(redis_url) as redis:
        store = await leading(redis)
        await store.open()
        await store.write({"a": {"x": 1}, "b": {"x": 2}}, [(KEY, 5)], [("shard-0", 3)])
        term = store.term
        plain.flushall()
        with pytest.raises(RedisDataLost):
            await store.write({"b": None, "c": {"x": 3}})
        assert plain.dbsize() == 0
        assert store.begin_new_term()
        assert not store.begin_new_term()
        plain.hset("ps:state", "stale", "1")
        await store.write({"a": {"x": 1}, "b": None, "c": {"x": 3}}, [(KEY, 5)], [("shard-0", 3)])

        assert sorted(plain.hkeys("ps:state")) == [b"a", b"c"]
        assert plain.get("{m.1/0}:token") == b"00000000000000000005"
        assert plain.hgetall("ps:fence") == {b"shard-0": b"3"}
        assert store.term == term + 1
        assert plain.get("ps:term") == str(store.term).encode()


async def test_a_redis_that_is_emptied_again_gets_everything_again(redis_url: str, plain: Redis) -> None:
    """Once the whole state is written again, a Redis that is emptied another time refuses partial writes as before."""
    async with connect(redis_url) as redis:
        store = await leading(redis)
        await store.open()
        assert store.begin_new_term()
        await store.write({"a": {"x": 1}, "b": {"x": 2}})
        plain.flushall()

        with pytest.raises(RedisDataLost):
            await store.write({"a": {"x": 3}})
        assert plain.dbsize() == 0
        assert store.begin_new_term()


async def test_a_lease_that_is_written_with_the_whole_state_is_like_a_renewed_one(redis_url: str, plain: Redis) -> None:
    """The lease that a write of the whole state begins has the time of Redis: if its holder dies, another can lead."""
    async with connect(redis_url) as redis:
        lease = Lease(redis, name="s", place="here", url="http://127.0.0.1:1")
        assert await lease.try_acquire()
        store = StateStore(redis, lease)
        plain.flushall()
        assert store.begin_new_term()
        before = plain.time()
        await store.write({"a": {"x": 1}})
        after = plain.time()
        written = json.loads(plain.get(LEADER_KEY) or b"")
        await lease.renew()
        renewed = json.loads(plain.get(LEADER_KEY) or b"")

        assert in_ms(before) <= written.pop("renewed") <= in_ms(after)
        assert renewed.pop("renewed")
        assert written == renewed


def in_ms(answer: Any) -> int:
    """What Redis answers to TIME, in milliseconds."""
    seconds, microseconds = answer
    return int(seconds) * 1000 + int(microseconds) // 1000


async def test_a_redis_that_went_back_gets_everything_back(redis_url: str, plain: Redis) -> None:
    """A Redis that lost a term's last writes is noticed by the next write and by the lease renewal."""
    async with connect(redis_url) as redis:
        lease = Lease(redis, name="s", place="here", url="http://127.0.0.1:1")
        assert await lease.try_acquire()
        store = StateStore(redis, lease)
        await store.open()
        await store.write({"a": {"x": 1}})
        earlier = plain.get("ps:written")
        assert isinstance(earlier, bytes)
        await store.write({"a": {"x": 2}, "b": {"x": 2}})
        await lease.renew()
        plain.set("ps:written", earlier)
        plain.hdel("ps:state", "b")

        with pytest.raises(RedisDataLost):
            await lease.renew()
        with pytest.raises(RedisDataLost):
            await store.write({"c": {"x": 3}})
        assert plain.hkeys("ps:state") == [b"a"]
        assert store.begin_new_term()
        await store.write({"a": {"x": 2}, "b": {"x": 2}, "c": {"x": 3}})
        await lease.renew()

        assert sorted(plain.hkeys("ps:state")) == [b"a", b"b", b"c"]


async def test_fences_only_rise(redis_url: str, plain: Redis) -> None:
    """A fence never decreases, except that 0 removes it."""
    async with connect(redis_url) as redis:
        store = await leading(redis)
        await store.open()
        await store.write({"a": {"x": 1}}, [(KEY, 5)], [("shard-0", 3), ("shard-1", 1), ("shard-2", 4)])
        await store.write({}, (), [("shard-0", 2), ("shard-2", 0)])

        assert plain.hgetall("ps:fence") == {b"shard-0": b"3", b"shard-1": b"1"}


@pytest.fixture
async def slow_link(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Link]:
    """A link to Redis that carries 512 KiB in a second, where an eighth of that is put up with."""
    monkeypatch.setattr(node_redis, "PACE_BYTES_PER_S", 64 * 1024)
    link = Link("redis", urlsplit(redis_url).port or 0)
    await link.start()
    link.bytes_per_s = 512 * 1024
    yield link
    await link.stop()


async def test_a_large_state_has_the_time_that_it_takes(redis_url: str, plain: Redis, slow_link: Link) -> None:
    """Over a slow link a large state takes longer to write and to read than a small one may; a cut link is noticed."""
    states = {f"worker:m:m/w{i}": {"state": "x" * 65_536} for i in range(16)}
    async with connect(redis_url) as redis, connect(f"redis://127.0.0.1:{slow_link.port}/0", timeout_s=None) as slow:
        lease = Lease(redis, name="s", place="here", url="http://127.0.0.1:1")
        assert await lease.try_acquire()
        store = StateStore(slow, lease, timeout_s=0.5)
        began_s = time.monotonic()
        await store.write(states)
        assert time.monotonic() - began_s > 0.5
        began_s = time.monotonic()
        assert await store.open() == {name: {**state, "format": 1} for name, state in states.items()}
        assert time.monotonic() - began_s > 0.5
        slow_link.cut()
        with refused_with("storage_unavailable"):
            await store.write({"a": {"x": 1}})


async def test_the_lease_is_kept_while_a_large_state_is_read(
    redis_url: str, plain: Redis, monkeypatch: pytest.MonkeyPatch, slow_link: Link
) -> None:
    """A scheduler renews its lease while it reads the state, which may take longer than the lease lasts."""
    monkeypatch.setattr(leadership_module, "RENEW_S", 0.01)
    slow_link.cut("back")
    async with connect(redis_url) as redis, connect(f"redis://127.0.0.1:{slow_link.port}/0", timeout_s=None) as slow:
        lease = Lease(redis, name="s", place="here", url="http://127.0.0.1:1")
        assert await lease.try_acquire()
        taken = plain.get(LEADER_KEY)
        async with asyncio.timeout(10), kept(lease):
            reading = asyncio.ensure_future(StateStore(slow, lease).open())
            while plain.get(LEADER_KEY) == taken:
                await asyncio.sleep(0)
            assert not reading.done()
            slow_link.heal()
            assert await reading == {}


async def test_a_late_write_changes_nothing(redis_url: str, plain: Redis) -> None:
    """A write that reaches Redis after a newer one of the same scheduler is ignored."""
    async with connect(redis_url) as redis:
        store = await leading(redis)
        await store.open()
        await store.write({"a": {"x": 1}})
        last = plain.get("ps:written")
        assert isinstance(last, bytes)
        plain.set("ps:written", str(int(last) + 1).zfill(len(last)))
        await store.write({"a": {"x": 2}})

        assert plain.hget("ps:state", "a") == b'{"x":1,"format":1}'


@asynccontextmanager
async def silent_redis() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Yield the URL of a server that reads all and answers nothing, and an event for the first thing it was asked."""
    asked = asyncio.Event()

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        asked.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(read, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


@pytest.mark.parametrize("silent", [True, False])
async def test_a_redis_that_is_away_is_unavailable(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Redis that is unreachable, or does not answer in time, is `storage_unavailable`, which is retryable."""
    monkeypatch.setattr(lease_module, "TIMEOUT_S", 0.1)
    async with silent_redis() as (url, _), asyncio.timeout(20.0):
        where = url if silent else redis_server.url(free_port())
        async with connect(where, timeout_s=None) as redis:  # so the time is the lease's own
            lease = Lease(redis, name="s", place="here", url="http://127.0.0.1:1")
            reads = () if silent else (StateStore(redis, lease, timeout_s=0.2).open,)  # a large state may take long
            for ask in (lease.try_acquire, *reads):
                with pytest.raises(PsError) as caught:
                    await ask()
                assert (caught.value.code, caught.value.retryable) == ("storage_unavailable", True)
                assert "is it running and reachable" in caught.value.hint


async def test_a_redis_that_is_full_is_not_taken_for_one_that_is_away(redis_url: str, plain: Redis) -> None:
    """If Redis refuses to write the lease, the error says so, and asks whether it is full."""
    plain.config_set("maxmemory", 1)
    try:
        async with connect(redis_url) as redis:
            with pytest.raises(PsError, match=r"Redis refuses: .*maxmemory") as caught:
                await leases(redis, 1)[0].try_acquire()
    finally:
        plain.config_set("maxmemory", 0)
    assert (caught.value.code, "is it full" in caught.value.hint) == ("storage_unavailable", True)


@pytest.mark.parametrize("text", ["{", "[]", '{"x": 1}', '{"format": 2}', "null"])
async def test_documents_of_another_format_are_refused(redis_url: str, plain: Redis, text: str) -> None:
    """A stored document that is invalid or of another format is `corrupt_state`."""
    plain.hset("ps:state", "a", text)
    async with connect(redis_url) as redis:
        with refused_with("corrupt_state"):
            await (await leading(redis)).open()


async def test_a_request_in_doubt_is_let_go_when_the_reign_ends() -> None:
    """A request that waits for a lease renewal gets False, and no cancellation, when the leadership ends."""

    async def nobody() -> bool:
        return False

    async with silent_redis() as (url, asked), connect(url) as redis:
        lease = Lease(redis, name="s", place="here", url="http://127.0.0.1:1")
        leadership = Leadership(lease, lambda _: None, lambda: None, nobody)
        running = asyncio.ensure_future(leadership.run())
        await asked.wait()
        leadership._unconfirmed = True
        leads = asyncio.ensure_future(leadership.confirm())
        await asyncio.sleep(0)
        running.cancel()
        assert await leads is False
        await asyncio.gather(running, return_exceptions=True)


async def test_a_clock_of_redis_that_is_put_back_keeps_nobody_from_leading(redis_url: str, plain: Redis) -> None:
    """When the clock of Redis goes back an hour, a living leader goes on leading, and a dead one is replaced."""
    async with connect(redis_url) as redis:
        old, new = leases(redis, 2)
        assert await old.try_acquire()
        assert not await new.try_acquire()
        # All times that either knows of are now an hour in the future.
        held = json.loads(plain.get(LEADER_KEY) or b"")
        plain.set(LEADER_KEY, json.dumps(held | {"renewed": held["renewed"] + HOUR_MS}))
        new._answered_ms = (new._answered_ms[0] + HOUR_MS, new._answered_ms[1] + HOUR_MS)
        for _ in range(10):
            await old.renew()
            assert not await new.try_acquire()
            await asyncio.sleep(0.2)
        held = json.loads(plain.get(LEADER_KEY) or b"")
        plain.set(LEADER_KEY, json.dumps(held | {"renewed": held["renewed"] + HOUR_MS}))
        assert await new.try_acquire()


async def test_a_deposed_leader_cannot_renew(redis_url: str, plain: Redis) -> None:
    """The renewal of a leader that was replaced raises `Deposed`, and the lease stays with its successor."""
    async with connect(redis_url) as redis:
        old = Lease(redis, name="old", place="here", url="http://127.0.0.1:1")
        new = Lease(redis, name="new", place="here", url="http://127.0.0.1:2")
        assert await old.try_acquire()
        assert await new.try_acquire()
        lease = plain.get(LEADER_KEY)

        with pytest.raises(Deposed):
            await old.renew()
        assert plain.get(LEADER_KEY) == lease
        assert old.leader == new.leader
        await new.renew()


async def test_a_lease_is_released_by_its_holder_alone(redis_url: str, plain: Redis) -> None:
    """A standby that stops leaves the lease to the leader; once the leader releases it, another leads at once."""
    async with connect(redis_url) as redis:
        leader, standby, third = leases(redis, 3)
        assert await leader.try_acquire()
        assert not await standby.try_acquire()
        await standby.release()
        assert not await third.try_acquire()
        await leader.renew()
        await leader.release()

        assert await third.try_acquire()


async def test_running_schedulers_know_each_other(redis_url: str, plain: Redis) -> None:
    """Each scheduler lists all that run by name, itself included; one that has stopped is listed no longer."""
    async with connect(redis_url) as redis:
        standby, leader = leases(redis, 2)
        assert await leader.try_acquire()
        assert not await standby.try_acquire()
        await leader.renew()
        listed = [("s1", "http://127.0.0.1:1"), ("s2", "http://127.0.0.1:2")]
        for lease in (leader, standby):
            assert [(s.name, s.url) for s in lease.schedulers] == listed
        await standby.release()
        await leader.renew()

        assert [(s.name, s.url) for s in leader.schedulers] == listed[1:]


@pytest.mark.parametrize(
    ("since_ms", "last_ms", "age_ms", "seen", "takes"),
    [
        (HOUR_MS, HOUR_MS, HOUR_MS, False, False),
        (-60_000, -5_000, HOUR_MS, False, False),
        (-500, -100, HOUR_MS, False, False),
        (-3_000, HOUR_MS, HOUR_MS, False, True),
        (-3_000, -100, 4_000, False, True),
        (-3_000, -100, -4_000, False, True),
        (-3_000, -100, 1_000, False, False),
        (-3_000, -100, 4_000, True, False),
    ],
)
async def test_after_an_outage_of_redis_the_leader_comes_first(
    redis_url: str, plain: Redis, since_ms: int, last_ms: int, age_ms: int, seen: bool, takes: bool
) -> None:
    """A lease that ran out is taken only by a scheduler that Redis has answered for 1.5 s without a gap.

    That time begins anew with the first answer after a gap, so the next attempt fails, too; likewise if it has `seen` a
    later renewal, for then Redis has come back with older data.
    """
    async with connect(redis_url) as redis:
        old, new = leases(redis, 2)
        assert await old.try_acquire()
        assert not seen or not await new.try_acquire()
        held = json.loads(plain.get(LEADER_KEY) or b"")
        plain.set(LEADER_KEY, json.dumps(held | {"renewed": held["renewed"] - age_ms}))
        now_ms = in_ms(plain.time())
        new._answered_ms = (now_ms + since_ms, now_ms + last_ms)

        for _ in range(2):
            assert await new.try_acquire() is takes


@pytest.mark.parametrize(
    ("leader_heard", "standby_heard", "yields"),
    [
        ([], [2.5, 4.0], True),
        ([3.0], [2.5, 4.0], False),  # shards reach both, or what the standby forwards reaches the leader
        ([], [], False),  # there is no shard
        ([], [0.5, 1.5], False),  # the shards have died
        ([], [3.9], False),  # the first shard joins through the standby; the leader had no time to say that it heard it
    ],
)
async def test_a_leader_that_hears_of_no_shard_is_succeeded_by_a_standby_that_does(
    redis_url: str,
    plain: Redis,
    monkeypatch: pytest.MonkeyPatch,
    leader_heard: list[float],
    standby_heard: list[float],
    yields: bool,
) -> None:
    """A leader whose lease is valid is succeeded only if it is cut off from all shards and a standby is not.

    The lists say when shards have asked either one for something, in the 4 s since the leader has the lease.
    """
    now = 100.0
    monkeypatch.setattr(lease_module, "monotonic", lambda: now)
    async with connect(redis_url) as redis:
        leader, standby = leases(redis, 2)
        assert await leader.try_acquire()
        for lease, times in ((leader, leader_heard), (standby, standby_heard)):
            for time_s in times:
                now = 100.0 + time_s
                lease.hear()
        now = 104.0
        await leader.renew()

        assert await standby.try_acquire() is yields
        if yields:
            with pytest.raises(Deposed):
                await leader.renew()


async def test_an_emptied_redis_is_left_to_the_leader(redis_url: str, plain: Redis) -> None:
    """A standby does not lead on a Redis that was emptied, because the leader still has the state, unless told to."""
    async with connect(redis_url) as redis:
        leader, standby = leases(redis, 2)
        assert await leader.try_acquire()
        for _ in range(2):
            assert not await standby.try_acquire()
            assert (standby.term, standby.known_term, standby.emptied) == (0, leader.term, False)
        plain.flushall()

        assert not await standby.try_acquire()
        assert standby.emptied
        assert await standby.try_acquire(even_if_emptied=True)
        assert standby.term == leader.term + 1


async def test_everybody_knows_who_leads_and_who_was_seen_when(redis_url: str, plain: Redis) -> None:
    """Each scheduler knows the holder of the lease, hears of its successor, and how long ago each one was seen.

    One that was not seen for 10 s is listed no longer.
    """
    async with connect(redis_url) as redis:
        old, standby, new = leases(redis, 3)
        assert await old.try_acquire()
        assert not await standby.try_acquire()
        first = Leader(old.id, "place-1", "http://127.0.0.1:1", old.term)
        assert old.leader == standby.leader == first
        waiting = asyncio.ensure_future(standby.wait_for_successor(first))
        await old.renew()
        assert not await standby.try_acquire()
        await asyncio.sleep(0)
        assert not waiting.done()

        seen = json.loads(plain.hget(SCHEDULERS_KEY, "place-1") or b"")
        await old.release()
        plain.hset(SCHEDULERS_KEY, "place-1", json.dumps(seen | {"seen": seen["seen"] - 4000}))
        plain.hset(SCHEDULERS_KEY, "place-9", json.dumps(seen | {"name": "s9", "seen": seen["seen"] - 11_000}))
        assert await new.try_acquire()
        assert not await standby.try_acquire()
        async with asyncio.timeout(20):
            await waiting
        assert standby.leader == Leader(new.id, "place-3", "http://127.0.0.1:3", old.term + 1)
        assert standby.known_term == old.term + 1
        ages = {s.name: s.age_s for s in standby.schedulers}
        assert sorted(ages) == ["s1", "s2", "s3"]
        assert ages["s2"] == 0 <= ages["s3"] < 4 <= ages["s1"] < 10


async def deposed_while_redis_was_empty(redis: AsyncRedis, plain: Redis) -> tuple[Lease, StateStore, Lease]:
    """Return a leader that has yet to write its state again, in a term that another scheduler has begun meanwhile."""
    old, new = leases(redis, 2)
    assert await old.try_acquire()
    store = StateStore(redis, old)
    await store.write({"a": {"x": 1}}, [(KEY, 5)])
    assert not await new.try_acquire()
    plain.flushall()
    with pytest.raises(RedisDataLost):
        await old.renew()
    assert store.begin_new_term()
    await old.release()
    assert await new.try_acquire(even_if_emptied=True)
    return old, store, new


@pytest.mark.parametrize("renews", [True, False])
async def test_a_leader_whose_new_term_another_has_begun_is_deposed(redis_url: str, plain: Redis, renews: bool) -> None:
    """A leader that did not write its state again in time neither renews nor writes in the term of its successor."""
    async with connect(redis_url) as redis:
        old, store, new = await deposed_while_redis_was_empty(redis, plain)
        assert old.term == new.term
        await StateStore(redis, new).write({"b": {"x": 1}}, [(KEY, 7)])
        before = {key: plain.dump(key) for key in (LEADER_KEY, "ps:state", "ps:written", "{m.1/0}:token")}

        with pytest.raises(Deposed):
            await (old.renew() if renews else store.write({"a": {"x": 1}}, [(KEY, 6)]))

        assert before == {key: plain.dump(key) for key in before}
        assert old.deposed_by(new.term)
        await new.renew()


async def begun_beside_a_leader(redis: AsyncRedis, plain: Redis) -> tuple[Lease, StateStore, Lease, StateStore]:
    """Return a leader and its store, and those of a scheduler that began to lead, too, when Redis had been emptied."""
    old, new = leases(redis, 2)
    assert await old.try_acquire()
    store, later = StateStore(redis, old), StateStore(redis, new)
    await store.write({"a": {"x": 1}})
    plain.flushall()
    assert await new.try_acquire()
    return old, store, new, later


@pytest.mark.parametrize("renews", [True, False])
async def test_a_scheduler_that_starts_on_an_emptied_redis_yields_to_the_leader(
    redis_url: str, plain: Redis, renews: bool
) -> None:
    """A scheduler that had never heard of the leader, and begins its term again, is deposed once that notices."""
    async with connect(redis_url) as redis:
        old, store, new, later = await begun_beside_a_leader(redis, plain)
        assert old.term == new.term
        assert [old.deposed_by(old.term + more) for more in (-1, 0, 1)] == [False, False, True]
        for x in range(3):
            await later.write({"b": {"x": x}})

        with pytest.raises(RedisDataLost):
            await (old.renew() if renews else store.write({"c": {"x": 1}}))
        await new.renew()
        assert store.begin_new_term()
        await store.write({"a": {"x": 1}, "c": {"x": 1}})
        await old.renew()

        assert sorted(plain.hkeys("ps:state")) == [b"a", b"c"]
        for refused in (new.renew(), later.write({"b": {"x": 9}})):
            with pytest.raises(Deposed):
                await refused


async def test_a_scheduler_that_starts_on_an_emptied_redis_yields_before_the_state_is_written(
    redis_url: str, plain: Redis
) -> None:
    """The scheduler that yields does so even before the leader has written its state: the two begin no term twice."""
    async with connect(redis_url) as redis:
        old, store, new, later = await begun_beside_a_leader(redis, plain)
        await later.write({"b": {"x": 1}})
        for _ in range(2):
            with pytest.raises(RedisDataLost):
                await old.renew()
            store.begin_new_term()

        for refused in (new.renew(), later.write({"b": {"x": 9}})):
            with pytest.raises(Deposed):
                await refused
        await store.write({"a": {"x": 1}})
        assert plain.hkeys("ps:state") == [b"a"]
