"""Reports to the scheduler which workers have ended their iteration, if their push said so (`ends`).

They go to the leader in one request without an end, or, while only a standby can be reached, through that in a request
for each batch.  Reports that may be lost are sent again, and the leader ignores those that it has had.  After `WAIT_S`
they are dropped: the worker waits at the shard only that long, then reports to the scheduler itself.
"""

import asyncio
import json
import logging
from collections import deque
from typing import Final, NoReturn

from paramserver.errors import PsError
from paramserver.limits import QUEUED_REQUESTS_MAX
from paramserver.net.calls import POLL_S
from paramserver.types import ModelKey, PushId
from paramserver_node.race import race
from paramserver_shard.link import RETRY_S, SchedulerLink
from paramserver_shard.streaming_request import StreamingRequest

log = logging.getLogger("paramserver.shard")

WAIT_S: Final = POLL_S
"""How long workers wait at most."""


class ClockReports:
    """The queue of reports and its sender.  Used only by the event loop's thread."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=QUEUED_REQUESTS_MAX)
        """One JSON line per push; when full, the oldest is dropped and its worker reports to the scheduler itself."""
        self._recent: deque[tuple[float, bytes]] = deque()
        """(when, lines) taken from the queue within the last `WAIT_S`."""
        self._wake = asyncio.Event()
        self._switched = False
        """Whether another scheduler may be in use since the stream was begun, or the connections to this one lost."""

    def report(self, model: ModelKey, push_id: PushId, clock: int, timeline: int, shards: int) -> None:
        """Queue a report: this push, accepted here and sent to `shards` shards in all, ended its worker's iteration."""
        name, epoch, seq = push_id.worker, push_id.epoch, push_id.seq
        fields = (model.name, model.generation, name, epoch, seq, clock, timeline, shards)
        self._lines.append(json.dumps(fields, separators=(",", ":")).encode() + b"\n")
        self._wake.set()

    async def run(self, link: SchedulerLink, path: str) -> None:
        """Send reports to `path` of the scheduler in use, until cancelled."""
        self._lines.clear()  # those of an earlier membership are void
        self._recent.clear()
        link.on_switch = self._switch
        while True:
            await self._wake.wait()
            self._switched, url = False, link.url
            try:
                stream = await link.open_stream(url, path, self._wake.set)
            except OSError as error:
                log.debug("clocks are not reported to %s: %s", url, error)
                link.switch_from(url)
            else:
                try:
                    await self._send(stream)
                finally:
                    stream.close()
                link.learn(url, stream.schedulers)
                if stream.status == 503:  # a standby; perhaps the leader cannot be reached from here
                    await race(self._send_through(link, path), link.turn_to_leader(url, path))
                else:
                    log.info("clocks.interrupted scheduler=%s status=%d", url, stream.status)
            self._wake.clear()
            await asyncio.sleep(RETRY_S)
            self._take()
            if self._recent:
                self._wake.set()

    def _switch(self) -> None:
        self._switched = True
        self._wake.set()

    async def _send(self, stream: StreamingRequest) -> None:
        """Send reports until the request has ended, or the link has switched, be it to the only scheduler again.

        A stalled scheduler keeps its connection open, and a network may have lost it like that of another request, so
        the first condition is not enough.
        """
        self._take()
        for _, lines in self._recent:
            stream.send(lines)
        while not (stream.ended or self._switched):
            self._wake.clear()
            if self._lines:
                stream.send(self._take())
            await self._wake.wait()

    async def _send_through(self, link: SchedulerLink, path: str) -> NoReturn:
        """Send reports in requests that end, which a standby passes on to the leader, until cancelled."""
        resend = True
        while True:
            self._wake.clear()
            lines = self._take()
            if resend:
                lines = b"".join(sent for _, sent in self._recent)
            if lines:
                try:
                    await link.post_lines(path, lines)
                except PsError as error:
                    log.debug("clocks are not passed on: %s", error)
                    resend = True
                    await asyncio.sleep(RETRY_S)
                    continue
            resend = False
            await self._wake.wait()

    def _take(self) -> bytes:
        """Empty the queue and return its lines, which are kept while their workers wait."""
        now, lines = asyncio.get_running_loop().time(), b"".join(self._lines)
        if lines:
            self._lines.clear()
            self._recent.append((now, lines))
        while self._recent and self._recent[0][0] <= now - WAIT_S:
            self._recent.popleft()
        return lines
