"""A shard's clock reports, sent to schedulers on real sockets."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.types import Message, Receive, Scope, Send
from tests.chaos.proxy import Link
from tests.servers import free_port

from paramserver.net.credentials import Credentials
from paramserver.types import ModelKey, PushId
from paramserver_node.forward import Forwarder
from paramserver_node.redis import connect
from paramserver_node.server import serve_tcp
from paramserver_scheduler.app import make_app, served
from paramserver_scheduler.lease import Lease
from paramserver_shard import clocks, streaming_request
from paramserver_shard.clocks import ClockReports
from paramserver_shard.link import SchedulerLink

WITHIN_S = 20.0


class Scheduler:
    """A scheduler that reads everything and never answers, like a stalled one."""

    def __init__(self) -> None:
        self.url = ""
        self.came = b""
        self.connected = 0

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one connection to its end."""
        self.connected += 1
        try:
            while data := await reader.read(1 << 16):
                self.came += data
        except ConnectionError:
            pass
        finally:
            self.connected -= 1
            writer.close()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["Scheduler"]:
        """Listen on a free port."""
        server = await asyncio.start_server(self.take, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()


async def test_reports_follow_the_scheduler_in_use() -> None:
    """After a switch to another scheduler only that one gets the clock reports.

    A stalled scheduler keeps its connection open forever, so the end of the connection cannot be the signal.
    """
    reports, sent = ClockReports(), 0

    async def report_until_told(scheduler: Scheduler) -> None:
        nonlocal sent
        while b'"m/w0",1,' not in scheduler.came:
            sent += 1
            reports.report(ModelKey("m", 1), PushId("m/w0", 1, sent), sent, 0, 1)
            await asyncio.sleep(0.02)

    async with asyncio.timeout(WITHIN_S), Scheduler().listening() as still, Scheduler().listening() as other:
        link = SchedulerLink([still.url, other.url], Credentials())
        telling = asyncio.create_task(reports.run(link, "/clocks"))
        await report_until_told(still)
        link.switch_from(still.url)
        while still.connected:
            await asyncio.sleep(0.01)
        before = still.came
        await report_until_told(other)
        telling.cancel()
        await asyncio.wait({telling})
        await link.aclose()

    assert still.came == before


async def test_reports_go_on_though_the_only_scheduler_stays_in_use() -> None:
    """After a request that failed, reports go over a new connection: that of the reports may be as lost as its own."""
    reports = ClockReports()
    async with asyncio.timeout(WITHIN_S), Scheduler().listening() as only:
        link = SchedulerLink([only.url], Credentials())
        telling = asyncio.create_task(reports.run(link, "/clocks"))
        await asyncio.sleep(0)  # it has begun: what was reported before is void
        for seq in (1, 2):
            reports.report(ModelKey("m", 1), PushId("m/w0", 1, seq), seq, 0, 1)
            while only.came.count(b"POST /clocks") < seq or b'"m/w0",1,%d,' % seq not in only.came:
                await asyncio.sleep(0.01)
            link.switch_from(only.url)
        telling.cancel()
        await asyncio.wait({telling})
        await link.aclose()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a packet filter of Linux")
async def test_a_connection_that_was_lost_without_a_word_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that the scheduler's system does not acknowledge goes over a new connection, although nobody hung up."""
    monkeypatch.setattr(streaming_request, "LOST_S", 0.2)
    monkeypatch.setattr(clocks, "WAIT_S", WITHIN_S)
    reports = ClockReports()
    async with asyncio.timeout(WITHIN_S), Scheduler().listening() as scheduler:
        way = Link("shard>scheduler", int(scheduler.url.rsplit(":", 1)[1]))
        await way.start()
        link = SchedulerLink([f"http://127.0.0.1:{way.port}"], Credentials())
        telling = asyncio.create_task(reports.run(link, "/clocks"))
        await asyncio.sleep(0)  # it has begun: what was reported before is void
        for seq in (1, 2):
            reports.report(ModelKey("m", 1), PushId("m/w0", 1, seq), seq, 0, 1)
            while b'"m/w0",1,%d,' % seq not in scheduler.came:
                await asyncio.sleep(0.01)
            way.lose()
        telling.cancel()
        await asyncio.wait({telling})
        await link.aclose()
        await way.stop()
    assert scheduler.came.count(b"POST /clocks") == 2


async def test_a_report_that_a_connection_has_lost_is_sent_again() -> None:
    """If the connection ends with a report on its way, the next one carries it again: its worker is waiting for it."""
    came: list[bytes] = []

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b""
        while b"m/w0" not in data and (more := await reader.read(1 << 16)):
            data += more
        came.append(data)
        writer.close()

    reports, server = ClockReports(), await asyncio.start_server(cut, "127.0.0.1", 0)
    async with asyncio.timeout(WITHIN_S), server:
        link = SchedulerLink([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"], Credentials())
        telling = asyncio.create_task(reports.run(link, "/clocks"))
        await asyncio.sleep(0)  # it has begun: what was reported before is void
        reports.report(ModelKey("m", 1), PushId("m/w0", 1, 1), 1, 0, 1)
        while len(came) < 2:
            await asyncio.sleep(0.01)
        telling.cancel()
        await asyncio.wait({telling})
        await link.aclose()

    assert all(b'["m",1,"m/w0",1,1,1,0,1]' in data for data in came)


async def test_reports_go_through_a_standby_while_the_leader_cannot_be_reached() -> None:
    """A standby that refuses the endless request is sent requests that end; it is left once the leader answers."""
    came: dict[str, bytes] = {"standby": b"", "leader": b""}
    healed = asyncio.Event()

    async def answer(send: Send, status: int) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def read(receive: Receive, who: str) -> None:
        while (message := await receive())["type"] == "http.request":
            came[who] += message["body"]
            if not message["more_body"]:
                return

    async def standby(scope: Scope, receive: Receive, send: Send) -> None:
        if b"content-length" not in dict(scope["headers"]):
            await answer(send, 503)
        else:
            await read(receive, "standby")
            await answer(send, 204)

    async def leader(scope: Scope, receive: Receive, send: Send) -> None:
        await healed.wait()
        if scope["method"] == "POST":
            await read(receive, "leader")
        else:
            await answer(send, 405)

    async def report(seq: int, to: str) -> None:
        reports.report(ModelKey("m", 1), PushId("m/w0", 1, seq), seq, 0, 1)
        while b'"m/w0",1,%d,' % seq not in came[to]:
            await asyncio.sleep(0.01)

    reports, stop, ports = ClockReports(), asyncio.Event(), (free_port(), free_port())
    link = SchedulerLink([f"http://127.0.0.1:{port}" for port in ports], Credentials())
    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as nodes:
        for app, port in zip((standby, leader), ports, strict=True):
            nodes.create_task(serve_tcp(app, "127.0.0.1", port, stop, grace_s=0.0))
        telling = nodes.create_task(reports.run(link, "/clocks?epoch=1"))
        await asyncio.sleep(0)  # it has begun: what was reported before is void
        await report(1, "standby")
        await report(2, "standby")
        healed.set()
        while not link.url.endswith(f":{ports[1]}"):
            await asyncio.sleep(0.01)
        await report(3, "leader")
        telling.cancel()
        await asyncio.wait({telling})
        await link.aclose()
        stop.set()


async def test_a_standby_refuses_reports_without_waiting_for_their_end() -> None:
    """A scheduler that does not lead answers 503 before it has read anything, so that the shard turns to the leader."""
    answers: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("a body that does not end is waited for")

    async def send(message: Message) -> None:
        answers.append(message)

    redis = connect("redis://127.0.0.1:1/0")  # never asked
    forwarder = Forwarder(Credentials(), asyncio.Event())
    lease = Lease(redis, name="s1", place="here", url="http://127.0.0.1:1")
    scope = {"type": "http", "method": "POST", "path": "/internal/shards/shard-0/clocks", "query_string": b"epoch=1"}
    headers = [(b"transfer-encoding", b"chunked")]
    await served(make_app(), lease, forwarder)({**scope, "headers": headers, "http_version": "1.1"}, receive, send)
    await forwarder.aclose()
    assert answers[0]["status"] == 503
