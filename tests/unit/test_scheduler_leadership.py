"""A leader that was paused renews its lease before it answers; the test moves the clock."""

import asyncio
from typing import Any

import pytest

from paramserver.errors import problem
from paramserver_scheduler.leadership import Leadership
from paramserver_scheduler.lease import Deposed


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
        self.leadership = Leadership(lease, self.told.append, lambda: None, self.nobody)

    async def nobody(self) -> bool:
        """Report that no other scheduler leads."""
        return False


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
