"""A client whose process may open no more files: it says so, and does not take its shards for lost."""

import errno
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.unit.scripted_server import Kind, OnLoop, Peer, Server, both_clients
from tests.unit.sharding import Now, drive
from tests.unit.test_client_slots import GRAD, Lenders, lenders, pulled, pytestmark, terms

from paramserver.client import transfer
from paramserver.client.cluster import Cluster
from paramserver.errors import PsError, Unavailable
from paramserver.net.calls import Deadline, Outcome, Request, Response
from paramserver.net.direct import unreachable_by
from paramserver.net.transport import Protocols
from paramserver.wire import http2 as wire

if sys.platform == "win32":
    pytest.skip("no limit on open files", allow_module_level=True)
import resource

__all__ = ["lenders", "pytestmark"]


@contextmanager
def no_more_files() -> Iterator[None]:
    """Let this process open no file meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@both_clients
def test_too_many_open_files_are_not_the_shards_fault(kind: Kind, tmp_path: Path) -> None:
    """Where no socket can be opened, the error names this process and its limit, and a later request is answered."""

    def script(peer: Peer) -> None:
        peer.send(peer.answer(peer.until(wire.HEADERS), b"ok"))

    with Server(kind, script) as server, closing(kind()) as transport:
        if isinstance(transport, OnLoop):
            transport.runner.get_loop()  # which takes files itself
        named = server.url.replace("127.0.0.1", "localhost")
        transport.send(Request("GET", "/livez"), "http://localhost:1")  # the first look-up loads modules, from files
        for address in (server.url, named, f"unix://{tmp_path}/requests"):
            with no_more_files():
                outcome = transport.send(Request("GET", "/livez", to=address), address)
            assert isinstance(outcome, PsError)
            assert outcome.code == "unavailable"
            assert str(outcome).startswith("this process has too many open files (raise its limit, which ulimit -n")
        assert isinstance(server.ask(), Response)


def test_a_machine_with_too_many_open_files_is_named() -> None:
    """If all processes together have too many open files, it is the machine's limit."""
    error = unreachable_by(OSError(errno.ENFILE, "too many"), "http://127.0.0.1:1")
    assert (error.code, error.detail) == ("unavailable", "this machine has too many open files")


def test_a_probe_that_cannot_be_sent_tells_nothing() -> None:
    """A probe for which there is no file does not make a URL one of HTTP/1.1."""
    protocols, outcome = Protocols(), unreachable_by(OSError(errno.EMFILE, "too many"), "http://a")
    assert protocols.learn("http://a", outcome, in_time=True) is outcome
    assert protocols.of("http://a") is None


class Short:
    """Shards whose client can open no file when it is to map what they have lent, for the first few answers."""

    def __init__(self, lenders: Lenders, times: int) -> None:
        self.lenders, self.left = lenders, times
        self.soft, self.hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def __call__(self, request: Request) -> Outcome:
        """Answer, and leave no file to open until the next request."""
        self.over()
        outcome = self.lenders(request)
        shard, path = self.lenders.sent[-1] if self.lenders.sent else ("", "")
        if (shard, path) in {("b", "/pull"), ("b", "/pushpull")} and self.left:
            self.left -= 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, self.hard))
        return outcome

    def over(self) -> None:
        """Let files be opened."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.soft, self.hard))


def test_memory_that_could_not_be_mapped_for_want_of_a_file_is_mapped_later(
    lenders: Lenders, now: Now, cluster: Cluster
) -> None:
    """A pull for whose leased values no file can be opened is made again, in shared memory, as are later ones."""
    node = Short(lenders, 1)
    try:
        values = drive(transfer.pull(cluster, "m", Deadline.after(30, now)), node, now)
    finally:
        node.over()

    assert values.flat.tolist() == [1.0] * len(GRAD)
    assert [path for _, path in lenders.sent] == ["/pull"] * 4
    cluster.lease_cache.drop()
    assert pulled(cluster, lenders, now) == (1.0, 1.0, ["/pull"] * 2)


def test_a_shard_that_no_socket_could_be_opened_for_is_asked_again(
    lenders: Lenders, now: Now, cluster: Cluster
) -> None:
    """A shard on this machine is not reached by another address because there was no file for a connection."""
    lenders.script["a", "/pull"] = [unreachable_by(OSError(errno.EMFILE, "too many"), lenders.near["a"], shard=True)]

    assert pulled(cluster, lenders, now) == (1.0, 1.0, ["/pull"] * 3)


def test_a_pushpull_that_lacks_a_file_has_pushed_once(lenders: Lenders, now: Now, cluster: Cluster) -> None:
    """A pushpull for whose leased values no file can be opened has pushed, and pulls the values a moment later."""
    node = Short(lenders, 2)
    call = transfer.pushpull(cluster, "m", Deadline.after(30, now), {"w": GRAD}, terms())
    try:
        done, values = drive(call, node, now)
    finally:
        node.over()

    assert (done.state, values.flat.tolist()) == ("applied", [1.0] * len(GRAD))
    assert [path for _, path in lenders.sent] == ["/slots"] * 2 + ["/pushpull"] * 2 + ["/pull"] * 4


def test_a_pull_that_lacks_files_until_its_deadline_says_so(lenders: Lenders, now: Now, cluster: Cluster) -> None:
    """A pull for whose values no file can be opened in time raises Unavailable, which names the limit."""
    node = Short(lenders, 10_000)
    try:
        with pytest.raises(Unavailable, match=r"too many open files \(raise its limit, which ulimit -n"):
            drive(transfer.pull(cluster, "m", Deadline.after(30, now)), node, now)
    finally:
        node.over()
    assert pulled(cluster, lenders, now) == (1.0, 1.0, ["/pull"] * 2)
