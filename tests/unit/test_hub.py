"""The feeds of a scheduler: what each reader gets; they and long polls are bounded."""

import asyncio
import json
from contextlib import ExitStack
from functools import partial

import pytest
from tests.refusals import refused_with

from paramserver.errors import Unavailable, problem
from paramserver.limits import EVENT_STREAMS_MAX, WAITERS_MAX
from paramserver_scheduler import hub as hub_module
from paramserver_scheduler.hub import BACKLOG_MAX, Hub, Published


async def test_a_document_is_encoded_once_for_all_feeds() -> None:
    """All shards get the same bytes of a document, not each its own copy: a model's may take tens of milliseconds."""
    hub = Hub(lambda document: None)
    first, second = hub.subscribe([]), hub.subscribe([])
    hub.publish({"type": "model", "name": "m"})
    hub.publish({"type": "gone", "model": "m", "generation": 1})
    hub.close()

    one = [line async for line in first.lines()]
    other = [line async for line in second.lines()]

    assert [json.loads(line) for line in one] == [
        {"type": "model", "name": "m"},
        {"type": "gone", "model": "m", "generation": 1},
    ]
    assert all(line.endswith(b"\n") for line in one)
    assert [id(line) for line in one] == [id(line) for line in other]


@pytest.mark.parametrize("excess", [0, 1])
async def test_a_reader_that_is_too_slow_is_cut_off_after_what_was_queued(excess: int) -> None:
    """A feed whose queue overflows, or whose hub closes while it is full, ends after what is queued, without a gap."""
    hub = Hub(lambda _: None)
    slow, gone = hub.subscribe([Published({"type": "map"})]), hub.subscribe([])
    hub.unsubscribe(gone)
    for n in range(BACKLOG_MAX + excess):
        hub.publish({"type": "commit", "n": n})
    if not excess:
        hub.close()

    lines = slow.lines()
    got = [json.loads(await anext(lines)) for _ in range(2)]
    hub.publish({"type": "commit", "n": -1})  # although there is room again
    async with asyncio.timeout(20):
        got += [json.loads(line) async for line in lines]

    assert got == [{"type": "map"}, *({"type": "commit", "n": n} for n in range(BACKLOG_MAX))]


async def test_a_feed_with_nothing_to_say_sends_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader hears a `ping` after each second of silence, a document at once, and the end of the hub at once."""
    monkeypatch.setattr(hub_module, "PING_S", 0.01)
    hub = Hub(lambda _: None)
    silent = hub.subscribe([])
    lines = silent.lines()

    assert [json.loads(await anext(lines)) for _ in range(2)] == [{"type": "ping"}] * 2
    hub.publish({"type": "map"})
    assert json.loads(await anext(lines)) == {"type": "map"}
    rest = asyncio.ensure_future(anext(lines, None))
    await asyncio.sleep(0)
    hub.close()
    assert await rest is None


async def test_a_long_poll_is_woken_by_the_next_document_or_the_end() -> None:
    """A long poll waits for a document that is published after it began to wait, or for the hub to close."""
    hub = Hub(lambda _: None)
    publish = partial(hub.publish, {"type": "map"})
    for end in (publish, publish, hub.close):
        poll = asyncio.ensure_future(hub.next_change())
        await asyncio.sleep(0)
        assert not poll.done()
        end()
        async with asyncio.timeout(20):
            await poll


def test_clients_may_open_so_many_event_streams_and_shards_any_number() -> None:
    """While EVENT_STREAMS_MAX streams of clients are open another one is refused; feeds of shards do not count."""
    hub = Hub(lambda _: None)
    feeds = [hub.subscribe([], public=i > 0) for i in range(EVENT_STREAMS_MAX + 1)]
    with refused_with("too_many_requests", Unavailable):
        hub.check_capacity()
    with refused_with("too_many_requests", Unavailable):
        hub.subscribe([], public=True)
    hub.subscribe([])
    hub.unsubscribe(feeds[-1])
    hub.check_capacity()


def test_so_many_long_polls_wait_at_the_same_time() -> None:
    """While WAITERS_MAX long polls wait another one is refused, until one of them ends."""
    hub = Hub(lambda _: None)
    with ExitStack() as stack:
        for _ in range(WAITERS_MAX - 1):
            stack.enter_context(hub.polling())
        with hub.polling():
            with pytest.raises(Unavailable) as refused, hub.polling():
                pass
            assert refused.value.code == "too_many_requests"
        with hub.polling():
            pass


async def test_what_a_node_streams_is_read_until_it_ends_or_the_hub_does() -> None:
    """Reading a node's stream ends when the stream ends, with its error if it fails, or when the hub closes."""

    async def failing() -> None:
        raise problem("malformed", "a line is too long")

    async def endless() -> None:
        await asyncio.Event().wait()

    hub = Hub(lambda _: None)
    with refused_with("malformed"):
        await hub.while_open(failing())
    reading = asyncio.ensure_future(hub.while_open(endless()))
    await asyncio.sleep(0)
    assert not reading.done()
    hub.close()
    async with asyncio.timeout(20):
        await reading
