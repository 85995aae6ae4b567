"""A leader that was paused renews its lease before it answers; the test moves the clock."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import Request, Response

from paramserver.errors import problem
from paramserver.net.credentials import Credentials
from paramserver_node import tokens
from paramserver_node.access import Access
from paramserver_node.forward import Forwarder
from paramserver_node.redis import connect
from paramserver_node.roles import Role
from paramserver_node.settings import SchedulerSettings
from paramserver_scheduler.app import make_app, served
from paramserver_scheduler.checkpoints import CheckpointStore
from paramserver_scheduler.leadership import Leadership
from paramserver_scheduler.lease import Deposed, Lease, RedisDataLost
from paramserver_scheduler.main import StopRequested, _lease_of, lead, wait_for_lease
from paramserver_scheduler.store import StateStore


class AskedLease:
    """A lease whose renewals the test ends, when and how it likes."""

    term = 1

    def __init__(self) -> None:
        self.asked: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()

    async def renew(self) -> None:
        """Wait until the test ends this renewal."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(answer)
        await answer


class Stood:
    """A leadership whose process the test pauses by advancing `now`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("paramserver_scheduler.leadership.monotonic", lambda: self.now)
        lease: Any = AskedLease()
        self.asked = lease.asked
        self.told: list[str] = []
        """Why Redis is away, as told after each renewal."""
        self.lost: list[str] = []
        """One entry for each time that Redis was found to have lost data."""
        self.newer = False
        """Whether another scheduler says that it leads."""
        self.leadership = Leadership(
            lease, self.told.append, lambda: self.lost.append("lost"), self.newer_leader_exists
        )

    async def newer_leader_exists(self) -> bool:
        """Report whether another scheduler leads."""
        return self.newer

    async def confirmed(self, error: Exception | None) -> bool:
        """Return whether the leader may answer, once the renewal that it begins ends like this."""
        leads = asyncio.ensure_future(self.leadership.confirm())
        async with asyncio.timeout(10):
            answer = await self.asked.get()
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(error)
            return await leads


async def test_a_leader_answers_nothing_before_its_first_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader may have been paused, and replaced, while it read the state: it asks before its first answer."""
    s = Stood(monkeypatch)

    assert await s.confirmed(Deposed("a newer scheduler leads")) is False


async def test_an_answer_that_is_older_than_the_pause_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal begun before a pause does not confirm the leader: it renews again and learns that it is deposed."""
    s = Stood(monkeypatch)
    first = asyncio.ensure_future(s.leadership._renew_shared())
    before = await s.asked.get()
    s.now += 30.0
    leads = asyncio.ensure_future(s.leadership.confirm())
    before.set_result(None)
    async with asyncio.timeout(10):
        (await s.asked.get()).set_exception(Deposed("a newer scheduler leads"))

    assert await leads is False
    await first


@pytest.mark.parametrize("error", [None, problem("unavailable", "Redis does not answer")])
async def test_one_question_after_the_pause_is_enough_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """One renewal after a pause confirms the leader, even if it is slow or Redis is away; later calls ask nothing."""
    s = Stood(monkeypatch)
    s.now += 30.0
    leads = asyncio.ensure_future(s.leadership.confirm())
    answer = await s.asked.get()
    for _ in range(25):  # the process runs meanwhile
        s.now += 0.2
        s.leadership._record_running()
    if error is None:
        answer.set_result(None)
    else:
        answer.set_exception(error)

    assert await leads is True
    assert await s.leadership.confirm() is True
    assert s.asked.empty()


async def test_a_renewal_tells_why_redis_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Redis that refuses to write, because its disk is full, is not reported as one that does not answer."""
    s = Stood(monkeypatch)
    for error in (problem("storage_unavailable", "Redis refuses: MISCONF No space left on device"), None):
        renewal = asyncio.ensure_future(s.leadership._renew_shared())
        answer = await s.asked.get()
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)
        await renewal

    assert s.told == ["Redis refuses: MISCONF No space left on device", ""]


AWAY = problem("storage_unavailable", "Redis does not answer")


@pytest.mark.parametrize(("silence_s", "newer", "leads"), [(2.0, True, True), (4.0, True, False), (4.0, False, True)])
async def test_a_leader_without_redis_asks_the_others_once_its_lease_has_ended(
    monkeypatch: pytest.MonkeyPatch, silence_s: float, newer: bool, leads: bool
) -> None:
    """While Redis is away, a leader goes on within its lease of 3 s, and after that if no other scheduler leads."""
    s = Stood(monkeypatch)
    s.newer = newer
    s.now += 2.0
    assert await s.confirmed(None) is True
    s.now += silence_s

    assert await s.confirmed(AWAY) is leads


async def test_a_leader_that_finds_data_lost_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal that finds data lost has the state written again; the leader still leads, and Redis is not away."""
    s = Stood(monkeypatch)
    s.now += 30.0

    assert await s.confirmed(RedisDataLost("emptied")) is True
    assert (s.lost, s.told) == (["lost"], [""])


async def test_a_leader_renews_until_another_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader renews its lease again and again; once another leads, it ends with `Deposed` and answers no more."""
    monkeypatch.setattr("paramserver_scheduler.leadership.RENEW_S", 0.0)
    s = Stood(monkeypatch)
    running = asyncio.ensure_future(s.leadership.run())
    async with asyncio.timeout(10):
        for _ in range(3):
            (await s.asked.get()).set_result(None)
        (await s.asked.get()).set_exception(Deposed("a newer scheduler leads"))
        with pytest.raises(ExceptionGroup) as ended:
            await running

    assert ended.group_contains(Deposed)
    assert await s.leadership.confirm() is False


async def test_a_leader_that_is_asked_nothing_for_long_was_not_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader whose process runs answers at once, without asking Redis, however long ago the last request was."""
    monkeypatch.setattr("paramserver_scheduler.leadership.BEAT_S", 0.0)
    s = Stood(monkeypatch)
    running = asyncio.ensure_future(s.leadership.run())
    (await s.asked.get()).set_result(None)
    for _ in range(10):
        s.now += 0.9
        for _ in range(3):
            await asyncio.sleep(0)

    leads = asyncio.ensure_future(s.leadership.confirm())
    await asyncio.sleep(0)
    assert s.asked.empty()
    assert await leads is True
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_requests_after_a_pause_share_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests that come after a pause wait for one and the same renewal."""
    s = Stood(monkeypatch)
    s.now += 30.0
    leads = [asyncio.ensure_future(s.leadership.confirm()) for _ in range(3)]
    (await s.asked.get()).set_result(None)

    assert await asyncio.gather(*leads) == [True, True, True]
    assert s.asked.empty()


async def test_a_pause_while_redis_is_asked_makes_the_answer_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that was paused in the middle of a renewal renews again before it answers."""
    s = Stood(monkeypatch)
    s.now += 30.0
    leads = asyncio.ensure_future(s.leadership.confirm())
    asked = await s.asked.get()
    s.now += 30.0
    asked.set_result(None)
    async with asyncio.timeout(10):
        (await s.asked.get()).set_exception(Deposed("a newer scheduler leads"))

    assert await leads is False


async def test_an_answer_about_a_term_that_the_leader_has_ended_itself_does_not_depose_it() -> None:
    """A renewal may be executed after the leader has begun a new term on an emptied Redis: it is of the term before."""
    redis = connect("redis://127.0.0.1:1/0")  # never asked
    lease = Lease(redis, name="s", place="here", url="http://127.0.0.1:1")
    store = StateStore(redis, lease)

    async def renew(**_: Any) -> tuple[int, bytes, list[bytes]]:
        store.begin_new_term()  # the first time only: the whole state is to be written then
        return 0, b"", []

    lease._renew_script = cast(Any, renew)
    await lease.renew()
    with pytest.raises(Deposed):
        await lease.renew()


async def test_a_scheduler_that_cannot_lead_says_why() -> None:
    """Without its Redis a scheduler does not lead, and the answers to requests name that, not a standby to wait for."""
    redis, stop = connect("redis://127.0.0.1:1/0"), asyncio.Event()
    lease, forwarder = Lease(redis, name="s1", place="here", url="http://127.0.0.1:1"), Forwarder(Credentials(), stop)
    waiting = asyncio.ensure_future(wait_for_lease(lease, stop))
    transport = httpx.ASGITransport(served(make_app(), lease, forwarder))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://s1") as client, asyncio.timeout(20):
            while "Redis does not answer" not in (answer := await client.get("/status")).json()["detail"]:
                await asyncio.sleep(0.01)
    finally:
        stop.set()
        await waiting
        await forwarder.aclose()
        await redis.aclose()
    assert answer.json()["code"] == "no_leader"
    assert "within seconds" not in answer.json()["detail"]


@pytest.mark.parametrize(("role", "heard"), [("reader", False), ("worker", False), ("node", True), ("admin", True)])
async def test_only_a_node_is_heard_as_a_shard(role: Role, heard: bool) -> None:
    """Requests of readers and workers, whatever they ask for, do not keep the lease of a leader that hears no shard."""
    redis, key = connect("redis://127.0.0.1:1/0"), tokens.new_key().encode()
    lease = Lease(redis, name="s1", place="here", url="http://127.0.0.1:1")
    forwarder = Forwarder(Credentials(), asyncio.Event())
    transport = httpx.ASGITransport(served(make_app(), lease, forwarder, Access([key])))
    headers = {"authorization": f"Bearer {tokens.make(key, role)}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://s1", headers=headers) as client:
        for path in ("/internal/shardsx", "/internal/shards/shard-0"):
            await client.get(path)
    await forwarder.aclose()
    await redis.aclose()

    assert (lease._heard_ago_s() < 60.0) is heard


async def test_a_scheduler_that_reads_its_state_from_a_redis_that_hangs_can_be_stopped(tmp_path: Path) -> None:
    """A scheduler that is told to stop ends at once, although the Redis that it reads its state from does not answer.

    The time limit of the read, which may be of hundreds of MiB, is beyond what systems wait before they kill.
    """
    asked, stop = asyncio.Event(), asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1):
            asked.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    redis, bulk_redis = connect(url, timeout_s=2.0), connect(url, timeout_s=None)
    http = make_app()
    http.state.checkpoints = CheckpointStore(tmp_path)
    lease = Lease(redis, name="s1", place="here", url="http://127.0.0.1:1")
    leading = asyncio.ensure_future(lead(SchedulerSettings(), redis, bulk_redis, http, lease, stop))
    try:
        async with asyncio.timeout(20):
            await asked.wait()
            stop.set()
            with pytest.raises(StopRequested):
                await leading
    finally:
        server.close()
        await redis.aclose()
        await bulk_redis.aclose()


@pytest.mark.parametrize(
    ("emptied", "taken_s"),
    [
        ([True] * 9, 16.0),
        (
            [False, True, True, True, False, *[True] * 9],
            36.0,
        ),  # the leader wrote its state, and Redis was emptied again
    ],
)
async def test_a_standby_leads_once_the_leader_has_not_written_its_state_for_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, emptied: list[bool], taken_s: float
) -> None:
    """While Redis is emptied a standby leaves the lease to the leader, which has the state, for 10 s and no longer.

    Each question takes 4 s; the lists have whether Redis had lost the leader's term, as the answers say.
    """
    now, answers = 0.0, iter(emptied)
    monkeypatch.setattr("paramserver_scheduler.main.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("paramserver_scheduler.main.ACQUIRE_INTERVAL_S", 0.0)

    async def try_acquire(*, even_if_emptied: bool) -> bool:
        nonlocal now
        lease.emptied = next(answers)
        now += 0.0 if even_if_emptied else 4.0
        return even_if_emptied

    lease: Any = SimpleNamespace(try_acquire=try_acquire, emptied=False, leader=None)
    await wait_for_lease(lease, asyncio.Event())

    assert now == taken_s


def test_schedulers_on_machines_of_one_host_name_are_told_apart_by_their_names() -> None:
    """A scheduler does not take another one's lease for its own because both machines have the same host name."""
    redis = connect("redis://127.0.0.1:1/0")  # never asked
    places = [_lease_of(SchedulerSettings(name=name, host="0.0.0.0"), redis).place for name in ("a", "b", "a")]

    assert places[0] == places[2] != places[1]


async def test_a_partition_whose_shard_is_a_scheduler_is_not_called_missing() -> None:
    """What was forwarded to a shard is refused by a scheduler with the reason, under paths, too, that it has not."""
    app, sent = make_app(), list[tuple[str, dict[str, str]]]()

    async def forward(request: Request, urls: list[str], *, headers: dict[str, str]) -> Response:
        sent.append((request.scope["path"], headers))
        return Response()

    async def confirm() -> bool:
        return True

    read = SimpleNamespace(key=str, spec=lambda _: SimpleNamespace(partitions=1), owner=lambda *_: "http://other")
    leading, forwarder = SimpleNamespace(confirm=confirm), cast(Any, SimpleNamespace(forward=forward))
    app.state.service = SimpleNamespace(read=read, leadership=leading, forwarder=forwarder)
    transport = httpx.ASGITransport(served(app, cast(Any, SimpleNamespace(schedulers=())), forwarder))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        await client.get("/internal/models/m/partitions/0")
        ((path, headers),) = sent
        refused = await client.get(path, headers=headers)
    assert (path, refused.status_code) == ("/internal/state/m/0", 503)
    assert refused.json()["detail"] == "the address of a shard leads to a scheduler instead"
