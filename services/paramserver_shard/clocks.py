"""Tells the scheduler which workers have ended their iteration, where it was their push that said so.

What cannot be told is let go: its worker waits at the shard for a short time only, then it asks the scheduler itself.
"""

import asyncio
import json
import logging
from collections import deque

from paramserver.limits import QUEUED_REQUESTS_MAX
from paramserver.types import ModelKey, PushId
from paramserver_shard.link import RETRY_S, SchedulerLink
from paramserver_shard.upload import Upload

log = logging.getLogger("paramserver.shard")


class ClockReports:
    """What is to be told.  Used by the event loop's thread alone."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=QUEUED_REQUESTS_MAX)
        """One for each push that waits here; more is let go, the oldest first, and such a worker asks the scheduler."""
        self._news = asyncio.Event()

    def report(self, model: ModelKey, push_id: PushId, clock: int, timeline: int, shards: int) -> None:
        """That push, of which this shard has its part, ended its worker's iteration on so many shards."""
        name, epoch, seq = push_id.worker, push_id.epoch, push_id.seq
        told = (model.name, model.generation, name, epoch, seq, clock, timeline, shards)
        self._lines.append(json.dumps(told, separators=(",", ":")).encode() + b"\n")
        self._news.set()

    async def tell(self, link: SchedulerLink, path: str) -> None:
        """Sends what comes to that path of the scheduler in use, until cancelled."""
        self._lines.clear()  # what an earlier membership had is not this one's
        link.turned = self._news.set
        while True:
            await self._news.wait()
            url = link.url
            try:
                upload = await link.upload(url, path, self._news.set)
            except OSError as error:
                log.debug("clocks are not reported to %s: %s", url, error)
                link.turn(url)
            else:
                try:
                    await self._send(upload, link, url)
                finally:
                    upload.close()
                log.info("clocks.unreported scheduler=%s status=%d: workers report their own", url, upload.status)
                link.heed(url, upload)
            self._lines.clear()
            self._news.clear()
            await asyncio.sleep(RETRY_S)

    async def _send(self, upload: Upload, link: SchedulerLink, url: str) -> None:
        """Sends what comes until the request is over, or another scheduler than that one is in use.

        One that stands still keeps its connection for as long as it does.
        """
        while not upload.over and link.url == url:
            self._news.clear()
            if self._lines:
                upload.send(b"".join(self._lines))
                self._lines.clear()
            await self._news.wait()
