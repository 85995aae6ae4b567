"""Work that is cancelled when something else ends first."""

import asyncio

import pytest
from starlette.types import Message

from paramserver.errors import Unavailable
from paramserver_node.race import race, while_there


class Side:
    """One side of a race: returns or raises its value once `may_go` is set, and records how it ended."""

    def __init__(self, value: int | Exception = 0, *, goes: bool = False) -> None:
        self.may_go = asyncio.Event()
        if goes:
            self.may_go.set()
        self.ended = ""
        self._value = value

    async def run(self) -> int:
        try:
            await self.may_go.wait()
            if isinstance(self._value, Exception):
                raise self._value
        except BaseException as e:
            self.ended = type(e).__name__
            raise
        self.ended = "done"
        return self._value


async def test_work_that_is_over_first() -> None:
    """If the work is done first, `race` returns its result and cancels the other side."""
    work, end = Side(7, goes=True), Side()
    assert await race(work.run(), end.run()) == (7,)
    assert (work.ended, end.ended) == ("done", "CancelledError")


async def test_work_that_fails_first() -> None:
    """If the work fails first, `race` raises its error and cancels the other side."""
    work, end = Side(KeyError("work"), goes=True), Side()
    with pytest.raises(KeyError, match="work"):
        await race(work.run(), end.run())
    assert end.ended == "CancelledError"


@pytest.mark.parametrize("value", [0, KeyError("end")])
async def test_an_end_that_is_over_first(value: int | Exception) -> None:
    """If the end is done first, however it ended, `race` returns None and cancels the work."""
    work, end = Side(7), Side(value, goes=True)
    assert await race(work.run(), end.run()) is None
    assert work.ended == "CancelledError"


@pytest.mark.parametrize("value", [0, KeyError("end")])
async def test_of_both_at_once_the_work_counts(value: int | Exception) -> None:
    """If both sides are done at the same time, the result or the error of the work counts."""
    assert await race(Side(7, goes=True).run(), Side(value, goes=True).run()) == (7,)
    with pytest.raises(KeyError, match="work"):
        await race(Side(KeyError("work"), goes=True).run(), Side(value, goes=True).run())


async def test_whoever_is_cancelled_leaves_neither_behind() -> None:
    """If `race` is cancelled, both sides are cancelled and have ended when it returns."""
    work, end = Side(), Side()
    racing = asyncio.ensure_future(race(work.run(), end.run()))
    await asyncio.sleep(0)  # both start
    await asyncio.sleep(0)
    racing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await racing
    assert (work.ended, end.ended) == ("CancelledError", "CancelledError")


async def test_a_client_that_hangs_up_ends_what_it_waits_for() -> None:
    """If the client disconnects, its request is cancelled and `while_there` raises Unavailable."""
    messages: list[Message] = [{"type": "http.request"}, {"type": "http.disconnect"}]

    async def receive() -> Message:
        return messages.pop(0)

    work = Side(7)
    with pytest.raises(Unavailable, match="the client disconnected"):
        await while_there(receive, work.run())
    assert work.ended == "CancelledError"


async def test_a_client_that_stays_gets_what_it_waits_for() -> None:
    """If the client stays, `while_there` returns the result of its request."""

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    assert await while_there(receive, Side(7, goes=True).run()) == 7
