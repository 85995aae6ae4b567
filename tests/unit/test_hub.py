"""The scheduler's feeds: what each reader gets of the documents that are published."""

import json

import pytest

from paramserver_scheduler.hub import Hub


@pytest.mark.asyncio
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
