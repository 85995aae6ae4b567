"""The feeds of a scheduler: what each reader gets; they and long polls are bounded."""

import json
from contextlib import ExitStack

import pytest
from tests.refusals import refused_with

from paramserver.errors import Unavailable
from paramserver.limits import EVENT_STREAMS_MAX, WAITERS_MAX
from paramserver_scheduler.hub import Hub


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
        {"type": "gone", "model": "m", "name": "m", "generation": 1},
    ]
    assert all(line.endswith(b"\n") for line in one)
    assert [id(line) for line in one] == [id(line) for line in other]


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
