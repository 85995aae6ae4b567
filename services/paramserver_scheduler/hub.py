"""Hands every published document to every open feed, and lets long polls wait for the next one.

Documents are level-triggered: a reader that is too slow is cut off and hears everything again when it reconnects.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Final

from paramserver_node.race import race

BACKLOG_MAX: Final = 4096
"""Documents a feed may lie behind."""
PING_S: Final = 1.0


class Feed:
    """One reader's documents, in order, none left out."""

    def __init__(self, first: list[Mapping[str, Any]]) -> None:
        self._first = first
        self._queue: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue(BACKLOG_MAX)
        self.open = True

    def put(self, document: Mapping[str, Any]) -> None:
        """Add a document; a reader that lies too far behind is cut off."""
        try:
            self._queue.put_nowait(document)
        except asyncio.QueueFull:
            self.open = False

    def end(self) -> None:
        """No more documents come; the reader sees the end."""
        self.open = False
        if not self._queue.full():
            self._queue.put_nowait(None)

    async def documents(self) -> AsyncIterator[Mapping[str, Any]]:
        """What was there at first, then what is published, and a `ping` after each second of silence."""
        for document in self._first:
            yield document
        while self.open or not self._queue.empty():
            try:
                async with asyncio.timeout(PING_S):
                    published = await self._queue.get()
            except TimeoutError:
                published = {"type": "ping"}
            if published is None:
                return
            yield published


class Hub:
    """All open feeds of this scheduler."""

    def __init__(self, note: Callable[[Mapping[str, Any]], None]) -> None:
        self._note = note
        self._feeds: set[Feed] = set()
        self._changed = asyncio.Event()
        self._end = asyncio.Event()

    def publish(self, document: Mapping[str, Any]) -> None:
        """Give the document to every open feed."""
        self._note(document)
        for feed in self._feeds:
            feed.put(document)
        self._feeds = {f for f in self._feeds if f.open}
        self._changed.set()
        self._changed = asyncio.Event()

    def subscribe(self, first: list[Mapping[str, Any]]) -> Feed:
        """A new feed that begins with these documents and goes on with the next one published."""
        feed = Feed(first)
        if self.closed:
            feed.end()
        else:
            self._feeds.add(feed)
        return feed

    def unsubscribe(self, feed: Feed) -> None:
        """The reader has gone."""
        feed.open = False
        self._feeds.discard(feed)

    async def next_change(self) -> None:
        """Returns when the next document is published or the hub closes."""
        if not self.closed:
            await self._changed.wait()

    async def while_open(self, work: Coroutine[Any, Any, None]) -> None:
        """Does that work to its end or until the hub closes; raises what it raises."""
        await race(work, self._end.wait())

    @property
    def closed(self) -> bool:
        """Whether this scheduler is stopping."""
        return self._end.is_set()

    def close(self) -> None:
        """End every feed and every wait."""
        self._end.set()
        for feed in self._feeds:
            feed.end()
        self._feeds.clear()
        self._changed.set()
