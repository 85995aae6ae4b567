"""Processes that fork while they have a client: parent and child share no slots, leases or locks."""

import asyncio
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter

import numpy as np
import pytest
from tests.waiting import eventually

import paramserver as ps
from paramserver.client.model import Model

from .machine import ON_LINUX, SIZE, made
from .processes import Nodes

pytestmark = [*ON_LINUX, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]


@pytest.fixture
def model(rest_cluster: Nodes) -> Iterator[Model]:
    """A model with a learning rate of 1 and a client of its own."""
    with ps.connect(rest_cluster.url) as client:
        yield made(client)


def forked(body: Callable[[], bool]) -> int:
    """Fork a child that exits with 0 if `body` returns true there, and is killed after 30 s; return its id."""
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        fine = False
        try:
            fine = body()
        finally:
            os._exit(0 if fine else 1)
    return pid


def ended(pid: int) -> int:
    """Wait for a child and return its exit code; below zero it is the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def slots(model: Model) -> set[str]:
    """The files of the client's idle slots."""
    return {slot.path for shard in model._client.cluster.same_host._shards.values() for slot in shard.slots}


def test_a_forked_child_writes_into_slots_of_its_own(model: Model) -> None:
    """A forked child's gradients use other slots than those of its parent, which may be writing."""
    model.push(np.full(SIZE, -1.0, np.float32))
    parents = slots(model)

    def push() -> bool:
        model.push(np.full(SIZE, -10.0, np.float32))
        return bool(slots(model)) and not slots(model) & parents

    assert ended(forked(push)) == 0
    assert slots(model) == parents
    model.push(np.full(SIZE, -1.0, np.float32))
    assert (model.pull().flat == 12.0).all()


def test_what_a_forked_child_has_pulled_stays_as_it_was(model: Model) -> None:
    """Read-only values pulled in a forked child do not change when its parent releases the same values."""
    model.push(np.full(SIZE, -1.0, np.float32))
    model.pull()
    pulled, pushed = os.pipe(), os.pipe()

    def look() -> bool:
        values = model.pull(copy=False)
        before = values.flat.copy()
        os.write(pulled[1], b".")
        os.read(pushed[0], 1)
        return values.version == 1 and bool((values.flat == before).all())

    child = forked(look)
    os.read(pulled[0], 1)
    for _ in range(12):
        model.push(np.full(SIZE, -1.0, np.float32))
        model.pull()
    os.write(pushed[1], b".")
    for end in (*pulled, *pushed):
        os.close(end)
    assert ended(child) == 0


def test_what_a_forked_child_shares_between_its_threads_is_its_own(model: Model) -> None:
    """A forked child pulls arrays of its own instead of sharing the parent's, which the parent may release."""
    model.push(np.full(SIZE, -1.0, np.float32))
    parents = model.pull(copy=False, min_version=1)

    def pull() -> bool:
        mine = model.pull(copy=False, min_version=1)
        return mine is not parents and bool((mine.flat == 1.0).all())

    assert ended(forked(pull)) == 0
    assert model.pull(copy=False, min_version=1) is parents


@pytest.mark.parametrize(
    "lock",
    [
        "_lock",
        "shared._lock",
        "cluster.lease_cache._lock",
        "cluster.same_host._lock",
        "cluster.same_host._mappings._lock",
        "transport._http1._idle._lock",
        "transport._http2._idle._lock",
    ],
)
def test_a_forked_child_does_not_wait_for_its_parents_threads(model: Model, lock: str) -> None:
    """A lock that a thread of the parent held during the fork is free in the child."""
    model.push(np.full(SIZE, -1.0, np.float32))
    model.pull(copy=False, min_version=1)

    def go_on() -> bool:
        model.push(np.full(SIZE, -1.0, np.float32))
        return bool((model.pull(copy=False, min_version=2).flat == 2.0).all())

    with attrgetter(lock)(model._client):  # held as if by another thread: locks do not know their holder
        child = forked(go_on)
    assert ended(child) == 0


def test_a_worker_on_asyncio_belongs_to_the_process_that_opened_it(rest_cluster: Nodes, model: Model) -> None:
    """A forked child can neither push as its parent's asyncio worker, nor in its stream, nor make it leave."""

    async def main() -> None:
        async with ps.AsyncClient(rest_cluster.url) as client:
            worker = client.model(model.name).worker()

            def child() -> bool:
                with pytest.raises(ps.ConflictError, match="belongs to the process that opened it"):
                    asyncio.run(worker.push(np.ones(SIZE, np.float32)))
                with pytest.raises(ps.ConflictError, match="belongs to the process that opened it"):
                    push.put("a", np.ones(SIZE // 3, np.float32))
                asyncio.run(push.__aexit__(None))
                asyncio.run(worker.__aexit__())
                return True

            async with worker:
                async with worker.stream() as push:
                    assert ended(forked(child)) == 0
                    push.put("a", np.ones(SIZE // 3, np.float32))
                assert push.result.state == "applied"
                assert [w["worker"] for w in model.workers()] == [worker.name]
                assert (await worker.push(np.ones(SIZE, np.float32))).state == "applied"

    asyncio.run(main())


@pytest.mark.parametrize("error", [None, SystemExit()])
def test_a_stream_goes_on_in_the_process_that_began_it(cluster: Nodes, error: BaseException | None) -> None:
    """A child forked while a streamed push is sent can neither add to it nor end it, and leaves its block at once."""
    with ps.connect(cluster.url) as client, made(client).worker() as worker:
        push = worker.stream()
        push.__enter__()

        def leave() -> bool:
            with pytest.raises(ps.ConflictError, match="belongs to the process that opened it"):
                push.put("b", np.ones((2, SIZE // 3), np.float32))
            push.__exit__(None if error is None else type(error), error, None)
            return push.result.state == "dropped"

        with cluster.paused(*cluster.shard_ports):
            push.put("a", np.full(SIZE // 3, -1.0, np.float32))
            eventually(lambda: push._reading._users, what="the sending of a part")
            child = ended(forked(leave))
        push.put("b", np.full((2, SIZE // 3), -1.0, np.float32))
        push.__exit__(None, None, None)
        assert child == 0
        assert push.result.state == "applied"
        assert (worker.pull().flat == 1.0).all()


def test_a_client_that_a_forked_child_closes_is_closed_there_alone(model: Model) -> None:
    """A forked child that closes the client, even before any other call, leaves the parent's open."""

    def child() -> bool:
        model._client.close()
        with pytest.raises(ps.ConflictError, match="this client is closed"):
            model.info()
        return True

    assert ended(forked(child)) == 0
    assert model.info()["name"] == model.name


def test_a_client_on_asyncio_is_used_and_closed_in_a_forked_child_alone(rest_cluster: Nodes, model: Model) -> None:
    """A forked child makes requests with its parent's asyncio client and closes it; the parent's stays open."""

    async def main() -> None:
        async with ps.AsyncClient(rest_cluster.url) as client:

            async def use() -> None:
                assert await client.models() == names
                await client.close()
                with pytest.raises(ps.ConflictError, match="this client is closed"):
                    await client.models()

            def child() -> bool:
                asyncio.run(use())
                return True

            client.transport._protocols._http1[client.urls[0]] = math.inf  # HTTP/1.1, which has threads
            names, *_ = await asyncio.gather(*(client.models() for _ in range(4)))
            assert await client.models() == names  # so that some of the threads are idle
            assert ended(forked(child)) == 0
            assert await client.models() == names

    asyncio.run(main())


def test_a_process_with_a_client_ends_without_a_word(rest_cluster: Nodes) -> None:
    """A process that exits with an open client prints nothing.

    At exit a module is cleared before the client that it keeps alive.
    """
    program = f"""
import paramserver as ps
client = ps.connect({rest_cluster.url!r})
def late(): return client  # with it the client lives for as long as its module
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("", "")
