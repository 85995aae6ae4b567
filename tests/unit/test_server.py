"""The server of a node on its event loop, with clients on plain sockets in the same process."""

import asyncio
import json
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.servers import free_port

from paramserver.net.calls import Request, Response
from paramserver.net.credentials import Credentials
from paramserver.net.direct import AsyncDirectTransport
from paramserver.wire import http2 as wire
from paramserver_node import http2, protocol_detector, read_deadline, server
from paramserver_node.middleware import NodeMiddleware
from paramserver_node.server import Tls, serve_tcp

WITHIN_S = 20.0


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """A certificate that signs itself."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate: apt install openssl")
    folder = tmp_path_factory.mktemp("tls")
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1", "-subj", "/CN=node"]
    command = ["openssl", "req", "-x509", *new, "-keyout", "node.key", "-out", "node.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=30)
    return Tls(folder / "node.pem", folder / "node.key")


async def empty(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer without a body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def serving(tls: Tls | None = None, app: ASGIApp = empty) -> AsyncIterator[int]:
    """Yield the port of a server; what is in flight at the end is cut off."""
    port = free_port()
    stop = asyncio.Event()
    running = asyncio.ensure_future(serve_tcp(app, "127.0.0.1", port, stop, tls=tls, grace_s=0.0))
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(WITHIN_S):
            yield port
    finally:
        stop.set()
        await running


def test_a_tls_handshake_that_stalls_is_given_up(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TLS client that sends nothing is disconnected after the time for stalls."""
    monkeypatch.setattr(server, "PATIENCE_S", 0.2)

    async def stalled() -> bytes:
        async with serving(tls) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                return await reader.read()
            finally:
                writer.close()

    assert uvloop.run(stalled()) == b""


def test_a_tls_client_that_does_not_close_in_return_is_disconnected(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that was refused ends after the time for stalls, not after that of TLS, which is half a minute."""
    monkeypatch.setattr(http2, "LINGER_S", 0.1)
    monkeypatch.setattr(read_deadline, "PATIENCE_S", 0.1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    came, gone = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(came, gone)

    async def refused() -> None:
        async with serving(tls) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                done = False
                while not done:
                    with suppress(ssl.SSLWantReadError):
                        client.do_handshake()
                        done = True
                    writer.write(gone.read())
                    came.write(b"" if done else await reader.read(1 << 16))
                client.write(wire.PREFACE + wire.frame(wire.PING, 0, 0, bytes(8)))
                writer.write(gone.read())
                with suppress(ConnectionError):
                    while await reader.read(1 << 16):
                        pass
            finally:
                writer.close()

    uvloop.run(refused())


GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the loopback interface has one address elsewhere")
@pytest.mark.parametrize("begun", [b"", GET, wire.PREFACE], ids=["silent", "HTTP/1.1", "HTTP/2"])
async def test_one_address_leaves_places_to_others(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above its share, connections from one address are closed at once, until one of its others has ended."""
    monkeypatch.setattr(protocol_detector, "CLIENT_CONNECTIONS_MAX", 2)
    monkeypatch.setattr(protocol_detector._Counted, "by_address", {})
    opened: list[asyncio.StreamWriter] = []

    async def connect(port: int, address: str = "127.0.0.1") -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
        opened.append(writer)
        return reader

    async def has_place(port: int, address: str = "127.0.0.1") -> bool:
        reader = await connect(port, address)
        opened[-1].write(GET)
        try:
            return await reader.read(1) != b""
        except ConnectionError:
            return False

    async with serving() as port:
        try:
            for _ in range(2):
                reader = await connect(port)
                opened[-1].write(begun)
                if begun:
                    await reader.read(1)
            assert not await has_place(port)
            assert await has_place(port, "127.0.0.2")
            opened[0].close()
            while not await has_place(port):
                pass
            assert not await has_place(port)
        finally:
            for writer in opened:
                writer.close()


async def test_a_request_that_the_end_of_its_node_cuts_off_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    """What is in flight when the grace time ends is `unavailable` if nothing was done, else `in_doubt`; none is a 500.

    So is a request whose own work was cancelled.
    """
    begun = asyncio.Semaphore(0)

    async def stuck(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        begun.release()
        while message["more_body"]:
            message = await receive()
        work = asyncio.get_running_loop().create_future()
        if scope["path"] == "/cancelled":
            work.cancel()
        await work

    asked = {
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n": "unavailable",
        b"POST /pull HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nx": "unavailable",
        b"POST /push HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nx": "unavailable",
        b"POST /push HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nx": "in_doubt",
        b"PUT /cancelled HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nx": "in_doubt",
    }
    framed = {("GET", "/"): "unavailable", ("POST", "/push"): "in_doubt", ("DELETE", "/m"): "in_doubt"}
    async with serving(app=NodeMiddleware(stuck)) as port:
        url, transport = f"http://127.0.0.1:{port}", AsyncDirectTransport(Credentials())
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in asked]
        for (_, writer), request in zip(opened, asked, strict=True):
            writer.write(request)
        sent = [asyncio.ensure_future(transport.send(Request(*r, timeout_s=WITHIN_S), url)) for r in framed]
        for _ in [*asked, *framed]:
            await begun.acquire()

    answers = [await reader.read() for reader, _ in opened]
    for _, writer in opened:
        writer.close()
    assert [a[:12] for a in answers] == [b"HTTP/1.1 503"] * len(asked)
    assert [json.loads(a.partition(b"\r\n\r\n")[2])["code"] for a in answers] == list(asked.values())
    outcomes = [outcome for outcome in await asyncio.gather(*sent) if isinstance(outcome, Response)]
    assert [json.loads(outcome.body)["code"] for outcome in outcomes] == list(framed.values())
    await transport.close()
    assert "Exception in ASGI application" not in caplog.text
