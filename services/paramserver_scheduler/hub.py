"""Distributes published documents to all open feeds, and lets long polls wait for the next one.

Documents are level-triggered: a reader that is too slow is cut off and gets the whole state when it reconnects.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Final

from paramserver.errors import problem
from paramserver.limits import EVENT_STREAMS_MAX, WAITERS_MAX
from paramserver_node.race import race

BACKLOG_MAX: Final = 4096
"""Documents that may be queued in one feed."""
PING_S: Final = 1.0


class Published:
    """A document that is published; the feeds of all shards send the same bytes of it, and so do those of clients."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document

    @cached_property
    def line(self) -> bytes:
        """The document as one line of JSON, encoded when first asked for."""
        return json.dumps(self.document, separators=(",", ":")).encode() + b"\n"

    @cached_property
    def event(self) -> bytes:
        """The document as a server-sent event, without the token that permits one client to upload initial values."""
        if self.document["type"] == "ping":
            return b": ping\n\n"
        public = {k: v for k, v in self.document.items() if k != "upload"}
        return f"event: {public['type']}\ndata: {json.dumps(public, separators=(',', ':'))}\n\n".encode()


PING: Final = Published({"type": "ping"})


class Feed:
    """The documents for one reader, in order and without gaps."""

    def __init__(self, first: Sequence[Published], left: Callable[["Feed"], None], *, public: bool) -> None:
        """`left` is called once its reader is gone."""
        self._first, self._left = first, left
        self.public = public
        """Whether it is a client's, not a shard's."""
        self._queue: asyncio.Queue[Published | None] = asyncio.Queue(BACKLOG_MAX)
        self.open = True

    def put(self, published: Published) -> None:
        """Queue a document; a full queue ends the feed."""
        try:
            self._queue.put_nowait(published)
        except asyncio.QueueFull:
            self.open = False

    def end(self) -> None:
        """End the feed; the reader still gets what is queued."""
        self.open = False
        if not self._queue.full():
            self._queue.put_nowait(None)

    def lines(self) -> AsyncIterator[bytes]:
        """Yield the initial documents, then the published ones, and a `ping` after each second of silence, as JSON."""
        return self._stream(lambda published: published.line)

    def events(self) -> AsyncIterator[bytes]:
        """Yield the same as server-sent events."""
        return self._stream(lambda published: published.event)

    async def _stream(self, form: Callable[[Published], bytes]) -> AsyncIterator[bytes]:
        try:
            for first in self._first:
                yield form(first)
            self._first = ()
            while self.open or not self._queue.empty():
                try:
                    async with asyncio.timeout(PING_S):
                        published = await self._queue.get()
                except TimeoutError:
                    published = PING
                if published is None:
                    return
                yield form(published)
        finally:
            self._left(self)


class Hub:
    """All open feeds of this scheduler."""

    def __init__(self, note: Callable[[Mapping[str, Any]], None]) -> None:
        self._note = note
        self._feeds: set[Feed] = set()
        self.state: Sequence[Published] | None = None
        """What the newest feed began with, while it holds and feeds are open: another one begins with the same."""
        self._changed = asyncio.Event()
        self._end = asyncio.Event()
        self._polls = 0

    def publish(self, document: Mapping[str, Any]) -> None:
        """Pass the document to every open feed, and wake the long polls."""
        self._note(document)
        self.state = None
        published = Published(document)
        for feed in self._feeds:
            feed.put(published)
        self._feeds = {f for f in self._feeds if f.open}
        self._changed.set()
        self._changed = asyncio.Event()

    def subscribe(self, first: Sequence[Published], *, public: bool = False) -> Feed:
        """Return a new feed that begins with these documents and continues with the next one published.

        Raises like `check_capacity` if it is `public`.
        """
        if public:
            self.check_capacity()
        self.state = first
        feed = Feed(first, self.unsubscribe, public=public)
        self._feeds.add(feed)
        return feed

    def unsubscribe(self, feed: Feed) -> None:
        """Remove a feed whose reader is gone."""
        self._feeds.discard(feed)
        if not self._feeds:
            self.state = None

    def check_capacity(self) -> None:
        """Raise Unavailable (`too_many_requests`) if the maximum number of public feeds is open."""
        if sum([feed.public for feed in self._feeds]) >= EVENT_STREAMS_MAX:
            raise problem("too_many_requests", f"the limit of {EVENT_STREAMS_MAX} open event streams is reached")

    @contextmanager
    def polling(self) -> Iterator[None]:
        """Count a long poll while it waits; raises Unavailable (`too_many_requests`) above the limit."""
        if self._polls >= WAITERS_MAX:
            raise problem("too_many_requests", f"{WAITERS_MAX} requests are already waiting")
        self._polls += 1
        try:
            yield
        finally:
            self._polls -= 1

    async def next_change(self) -> None:
        """Wait until the next document is published or the hub closes."""
        await self._changed.wait()

    async def while_open(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until it ends or the hub closes; raises what `work` raises."""
        await race(work, self._end.wait())

    @property
    def closed(self) -> bool:
        """Whether the hub is closed, because this scheduler stops or no longer leads."""
        return self._end.is_set()

    def close(self) -> None:
        """End every feed and every wait."""
        self._end.set()
        self.state = None
        for feed in self._feeds:
            feed.end()
        self._feeds.clear()
        self._changed.set()
