"""A cluster with TLS: every HTTP port requires it, and every client verifies the certificate."""

import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from pyreqwest.client import SyncClientBuilder
from tests.servers import free_port
from tests.unit.scripted_server import Blocking, Peer, Server
from tests.waiting import eventually

import paramserver as ps
from paramserver.errors import Unreachable
from paramserver.net import connection
from paramserver.net.calls import Request, Response
from paramserver.net.credentials import Credentials
from paramserver.net.direct import DirectTransport
from paramserver.net.plain import PlainTransport
from paramserver.net.transport import BlockingTransport
from paramserver.wire import http2 as wire
from paramserver_cli.state_directory import Plan, StateDir

from .cluster import PSCTL, Cluster, cluster

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a private certificate authority (`ca.pem`), and a certificate that it issued for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make certificates: apt install openssl")
    folder = tmp_path_factory.mktemp("authority")

    def openssl(*words: str) -> None:
        new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
        command = ["openssl", "req", "-x509", *new, *words]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=30)

    usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")  # Python 3.13 and later insist on it
    openssl("-subj", "/CN=our authority", "-keyout", "ca.key", "-out", "ca.pem", *usage)
    openssl(
        *("-subj", "/CN=node", "-CA", "ca.pem", "-CAkey", "ca.key", "-keyout", "node.key", "-out", "node.pem"),
        *("-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"),
    )
    return folder


@pytest.fixture(scope="module")
def closed(authority: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of two shards and a worker, with TLS and tokens."""
    with pytest.MonkeyPatch.context() as patch:
        secret = authority / "secret"
        subprocess.run([*PSCTL, "secret", str(secret)], check=True, capture_output=True, timeout=30)
        patch.setenv("PARAMSERVER_SECRET_FILE", str(secret))
        patch.setenv("PARAMSERVER_TLS_CERTIFICATE", str(authority / "node.pem"))
        patch.setenv("PARAMSERVER_TLS_KEY", str(authority / "node.key"))
        patch.setenv("PARAMSERVER_CA", str(authority / "ca.pem"))
        patch.setenv("PARAMSERVER_SHARED_MEMORY", str(authority / "none"))  # shared memory would bypass TLS
        with cluster(tmp_path_factory.mktemp("tls"), args=("--workers", "1")) as running:
            yield running


def nodes(cluster: Cluster) -> list[str]:
    return [cluster.url, *cluster.shards]


def test_every_port_speaks_tls_only(closed: Cluster, authority: Path) -> None:
    """Every node answers HTTPS and not HTTP, sets secure cookies, and is not trusted without the private authority."""
    trusted = ssl.create_default_context(cafile=authority / "ca.pem")
    for url in nodes(closed):
        assert url.startswith("https://127.0.0.1:")
        with httpx.Client(verify=trusted, trust_env=False, timeout=30.0) as http:
            assert http.get(f"{url}/livez").status_code == 200
            assert http.get(f"{url}/models").status_code == 401
            cookie = http.post(f"{url}/login", data={"token": closed.info["token"]}).headers["set-cookie"]
            assert "Secure" in cookie.split("; ")
        with httpx.Client(trust_env=False) as stranger, pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY"):
            stranger.get(f"{url}/livez")
        with httpx.Client(trust_env=False) as plain, pytest.raises(httpx.HTTPError):
            plain.get(f"http://{urlsplit(url).netloc}/livez").raise_for_status()


def test_shards_offer_http2_by_alpn(closed: Cluster, authority: Path) -> None:
    """Shards select HTTP/2 by ALPN if the client offers it, and HTTP/1.1 otherwise."""
    for url in closed.shards:
        context = ssl.create_default_context(cafile=authority / "ca.pem")
        for offered, chosen in ((["h2", "http/1.1"], "h2"), (["http/1.1"], "http/1.1")):
            context.set_alpn_protocols(offered)
            address = (urlsplit(url).hostname or "", urlsplit(url).port or 0)
            with (
                socket.create_connection(address, 10.0) as raw,
                context.wrap_socket(raw, server_hostname=address[0]) as tls,
            ):
                assert tls.selected_alpn_protocol() == chosen
    pem = (authority / "ca.pem").read_bytes()
    with SyncClientBuilder().add_root_certificate_pem(pem).http2_prior_knowledge().no_proxy().build() as http:
        assert http.get(f"{closed.shards[0]}/livez").build().send().status == 200


def test_the_sdk_trains_over_tls(closed: Cluster, authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PARAMSERVER_CA, the SDK trains over HTTPS directly with the shards; without it, it cannot connect."""
    token = closed.info["token"]
    monkeypatch.setenv("PARAMSERVER_CA", str(authority / "ca.pem"))
    with ps.connect(closed.url, token=token) as client:
        model = client.create_model("over-tls", {"w": (300_000,)}, optimizer=ps.SGD(lr=1.0), partitions=4)
        with model.worker() as worker:
            pulled = worker.pushpull({"w": np.ones(300_000, np.float32)})
        assert pulled["w"].tolist() == [-1.0] * 300_000
        model_map = client.run(client.cluster.map_of("over-tls", client.deadline(5.0)))
        ways = {client.cluster.route(model_map, i) for i in range(4)}
        assert ways == set(closed.shards)
        model.set(consistency=ps.Sync())
        with model.worker() as worker:  # the shards report its clocks, over TLS and with a token
            eventually(lambda: worker.step({"w": np.ones(300_000, np.float32)}).released, what="a clock so reported")
    plain = PlainTransport(Credentials.of(token, authority / "ca.pem"))
    answer = plain.send(Request("GET", "/models/over-tls"), closed.url)
    assert isinstance(answer, Response), answer
    assert answer.status == 200
    plain.close()

    monkeypatch.delenv("PARAMSERVER_CA")
    with pytest.raises(Unreachable, match="certificate") as e:
        ps.connect(closed.url, token=token)
    assert "PARAMSERVER_CA" in e.value.hint
    for url in nodes(closed):
        with pytest.raises(Unreachable, match="does not answer") as e:
            ps.connect(url.replace("https:", "http:"), token=token)
        assert e.value.hint == f"connect to {url}"


def test_a_front_that_takes_http1_alone_is_spoken_to_in_it(authority: Path) -> None:
    """A TLS server that ends handshakes which offer HTTP/2 alone, as many fronts do, is asked in HTTP/1.1."""
    port = free_port()
    command = ["openssl", "s_server", "-accept", str(port), "-alpn", "http/1.1", "-www", "-quiet"]
    certificate = ["-cert", str(authority / "node.pem"), "-key", str(authority / "node.key")]
    url = f"https://127.0.0.1:{port}"
    transport = BlockingTransport((url,), Credentials.of(None, authority / "ca.pem"))
    with subprocess.Popen([*command, *certificate], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as front:
        try:
            asked = [Request("GET", "/")]
            eventually(lambda: isinstance(transport.perform(asked)[0], Response), what="an answer in HTTP/1.1")
        finally:
            transport.close()
            front.kill()


def test_a_pool_worker_and_psctl_go_the_same_way(closed: Cluster, authority: Path, tmp_path: Path) -> None:
    """With TLS, the worker that `psctl up` started trains, and psctl can show the status, run `doctor` and save."""
    pytest.importorskip("sklearn", reason="pip install 'paramserver[demo]'")
    from paramserver.examples import digits

    with ps.connect(closed.url, token=closed.info["token"], ca=authority / "ca.pem") as client:
        client.create_model("digits-tls", digits.spec(), optimizer=ps.SGD(lr=0.1))
        run = client.create_run("digits-tls", "paramserver.examples.digits:train", stop={"clocks": 3})
        ended = ("finished", "failed", "stopped")
        eventually(lambda: client.get_run(run["id"])["state"] in ended, within_s=90.0)
        assert client.get_run(run["id"])["state"] == "finished", client.get_run(run["id"])

    def idle() -> bool:
        status = closed.psctl("status")
        assert status.returncode == 0, status.stderr
        return re.search(r"worker-0 +idle", status.stdout) is not None

    eventually(idle, within_s=30.0, what="the heartbeat of a worker that has nothing to do")
    measured = re.compile(r"shard-0 +\S+ +\d+ MiB/s")
    eventually(lambda: measured.search(closed.psctl("doctor").stdout), what="the bandwidth of a shard")
    reader = closed.psctl("token", "reader").stdout.strip()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAMSERVER_TOKEN", reader)
        reading = closed.psctl("doctor")
    saved = closed.psctl("checkpoint", "save", "digits-tls", str(tmp_path / "saved"))

    assert (reading.returncode, "not measured" in reading.stdout) == (0, True), reading.stdout
    assert saved.returncode == 0, saved.stderr


STARTS = """
import asyncio, sys
from paramserver_cli import supervisor

ready = supervisor.Supervisor._until_servers_are_ready

async def ready_or_told(self):
    waiting = asyncio.ensure_future(ready(self))
    while not waiting.done():
        if "not trusted" in self.state.tail("shard-0"):
            raise TimeoutError
        await asyncio.sleep(0.1)
    await waiting

supervisor.Supervisor._until_servers_are_ready = ready_or_told
supervisor.main(sys.argv[1:])
"""
"""A supervisor that waits for its servers until a shard's log has the warning, instead of for three minutes."""


def test_a_start_without_the_authority_says_so(
    authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the nodes do not trust each other's certificate, the failure of the start contains their own warning."""
    monkeypatch.setenv("PARAMSERVER_TLS_CERTIFICATE", str(authority / "node.pem"))
    monkeypatch.setenv("PARAMSERVER_TLS_KEY", str(authority / "node.key"))
    monkeypatch.delenv("PARAMSERVER_CA", raising=False)
    state = StateDir(tmp_path)
    state.logs.mkdir()
    state.write(Plan(shards=1))

    lock = state.lock()
    assert lock is not None
    argv = [sys.executable, "-P", "-c", STARTS, str(tmp_path), str(lock.fileno())]
    with lock:
        subprocess.run(argv, check=True, timeout=200, capture_output=True, pass_fds=[lock.fileno()])

    found = state.supervisor()
    assert found is not None
    assert re.search(r"shard-0: .*not trusted", found.error), found.error


@pytest.mark.parametrize("size", [100, 8_000_000])
@pytest.mark.parametrize("polite", [True, False], ids=["in order", "torn down"])
def test_a_connection_that_ends_between_requests_is_replaced(
    authority: Path, size: int, polite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server ends an idle TLS connection, with or without close_notify, the next request uses a new one."""
    monkeypatch.setattr(connection, "RESTED_S", 0.0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "node.pem", authority / "node.key")
    ended = threading.Event()

    def ending(peer: Peer) -> None:
        assert isinstance(peer.socket, ssl.SSLSocket)
        peer.send(peer.answer(peer.until(wire.HEADERS), b"1"))
        if polite:
            peer.socket.setblocking(False)
            with suppress(OSError):
                peer.socket.unwrap()  # sends close_notify, and does not wait for the client's
        peer.socket.close()
        ended.set()

    def answering(peer: Peer) -> None:
        wide = wire.settings({wire.INITIAL_WINDOW_SIZE: 1 << 24}) + wire.u32_frame(0, wire.WINDOW_UPDATE, 1 << 24)
        peer.send(wide)
        peer.send(peer.answer(peer.until(wire.DATA, wire.END_STREAM), b"2"))

    with Server(Blocking, ending, answering, tls=context) as server:
        server.transport = DirectTransport(Credentials.of(None, authority / "ca.pem"))
        first = server.ask()
        assert isinstance(first, Response), first
        assert ended.wait(20.0)
        second = server.ask(bytes(size))
        assert isinstance(second, Response), second
        assert second.body == b"2"
