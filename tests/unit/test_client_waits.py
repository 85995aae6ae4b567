"""How long a worker's calls last, and what calls that overlap leave behind."""

import os
import socket
import threading
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from tests.refusals import refused_with
from tests.waiting import eventually

import paramserver as ps
from paramserver.client import control, transfer
from paramserver.client import worker as worker_module
from paramserver.client.cluster import Cluster
from paramserver.client.iterations import Iterations
from paramserver.client.task_requests import TaskRequests
from paramserver.errors import problem
from paramserver.net.calls import Call, Deadline, Outcome, Pause, Request, TakenTooSlowly
from paramserver.net.retry import FIRST_S, LONGEST_S, Backoff

from .session_node import BEAT, GRAD, Node, deadline, no, ok, opened
from .sharding import A, Now, Shards, drive, expected, grads, refusal, terms
from .test_client_iterations import Shard
from .test_client_tasks import LEASE

CLOCK = "/models/m/clock"


def test_a_last_try_that_was_cut_off_does_not_hide_why_those_before_it_failed(now: Now) -> None:
    """If the deadline ends the last attempt while its body is sent, the error says what was answered before."""
    until = now.s + 10.0

    def busy(request: Request) -> Outcome:
        now.s = min(now.s + 3.0, until)
        return TakenTooSlowly("unavailable", "slow", hint="timeout=") if now.s >= until else refusal("loading")

    with refused_with("unavailable", match=r"^said the shard; tried for 10 s, the last time for only [\d.]+ s"):
        drive(control.send("PATCH", "/models/m", {}, Deadline(until, now)), busy, now)


def test_bodies_that_several_shards_did_not_take_in_time_are_no_answers(now: Now) -> None:
    """If the deadline ends the last attempt at several shards, the error says what one had answered, and its hint."""
    slow = [TakenTooSlowly("unavailable", f"{to} is slow", hint="timeout=", retry_after_s=0.0) for to in "ab"]
    backoff = Backoff(Deadline.after(10.0, now))
    backoff.pause(problem("unavailable", "one is loading"))
    now.s += 10.0

    with refused_with("unavailable", match="^one is loading; tried for 10 s, at last a is slow; b is slow .timeout=.$"):
        backoff.pause(*slow)


def test_bodies_that_several_shards_did_not_take_in_what_was_left_tell_what_was_spent(now: Now) -> None:
    """If a call had little of its timeout for its only attempt, at several shards, the error says so."""
    until = Deadline.after(10.0, now)
    now.s += 9.0
    backoff = Backoff(until)
    until.attempt_s()
    now.s += 1.0

    with refused_with("unavailable", match="^a is slow; b is slow; 9 s of the call's timeout of 10 s had passed"):
        backoff.pause(*[TakenTooSlowly("unavailable", f"{to} is slow", retry_after_s=0.0) for to in "ab"])


@pytest.mark.parametrize("silent", [True, False])
def test_a_timeout_of_the_call_counts_where_the_scheduler_is_away(silent: bool) -> None:
    """A step with a timeout of its own asks for a scheduler for as long, however short the default is."""
    node, now = Node("ssp"), Now()
    session = opened(node)

    def answer(request: Request) -> Outcome:
        if request.path != CLOCK:
            return node(request)
        now.s += (request.timeout_s or 0.0) if silent else 0.1
        return problem("in_doubt", "no answer") if silent else no("no_leader")

    began_s, until = now(), Deadline.after(300.0, now)
    with pytest.raises(ps.Unavailable):
        drive(Iterations(session).step(GRAD, {}, until, until), answer, now)
    assert 290.0 < now() - began_s < 305.0


@pytest.mark.parametrize("way", ["step", "exchange"])
def test_of_overlapping_iterations_each_counts(way: str) -> None:
    """Where threads may share a worker, a slow iteration does not set back the clock that quicker ones have reached."""
    node = Shard("async")
    session = opened(node)
    iterate = getattr(Iterations(session), way)
    drive(session.pull(deadline()), node)

    slow: Call[Any] = iterate(GRAD, {}, deadline(), None)
    effect = next(slow)
    for _ in range(3):
        drive(iterate(GRAD, {}, deadline(), None), node)
    with suppress(StopIteration):
        while True:
            effect = slow.send([] if isinstance(effect, Pause) else [node(r) for r in effect])

    assert session.clock == 4


@pytest.mark.parametrize("way", ["advance", "step"])
def test_a_clock_that_other_threads_have_raised_during_a_pause_does_not_fall(way: str) -> None:
    """Outside sync and ssp each thread of a worker ends one more iteration, however long a pause held it up."""
    node = Node("async")
    session = opened(node)
    its = Iterations(session)
    session.status = "paused"
    paused = its.advance(deadline(), None) if way == "advance" else its.step(GRAD, {}, deadline(), None)
    effect: Any = next(paused)
    while not isinstance(effect, Pause):
        effect = paused.send([node(request) for request in effect])
    session.status = "active"
    for _ in range(3):
        drive(its.advance(deadline(), None), node)

    with pytest.raises(StopIteration):
        paused.send([])
    assert session.clock == 4


def test_a_join_that_is_interrupted_does_not_happen_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C during a join its thread gives up: joined later, it would hold others up, and fence a new worker."""
    monkeypatch.setattr(worker_module, "LEAVE_S", 0.1)
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = ps.Client(f"http://127.0.0.1:{silent.getsockname()[1]}")

        def interrupted(_: Future[None]) -> None:
            stack.enter_context(silent.accept()[0])  # the request is under way
            raise KeyboardInterrupt

        monkeypatch.setattr(Future, "result", interrupted)
        worker = client.model("m").worker("anna")
        with pytest.raises(KeyboardInterrupt):
            worker.__enter__()
        eventually(lambda: not [t for t in threading.enumerate() if t.name == "worker of m"], within_s=10.0)
        client.close()


def test_a_timeout_that_is_no_number_is_refused_when_the_worker_is_made() -> None:
    """`worker(timeout=)` is checked as that of the client is."""
    with ps.Client("http://127.0.0.1:9") as client, refused_with("invalid_field", match="timeout"):
        client.model("m").worker(timeout="5")  # type: ignore[arg-type]


def test_a_call_may_be_tried_for_hours() -> None:
    """However often a call has been tried, the pause before the next attempt is a bounded one."""
    now = Now()
    backoff = Backoff(Deadline.after(1e6, now))
    assert all(backoff.pause(problem("unreachable", "nobody is there")).seconds <= LONGEST_S for _ in range(2000))


def test_a_node_that_cannot_be_reached_is_tried_again_soon() -> None:
    """A shard that restarts is found within half a second, and its first refusal counts as the first."""
    backoff = Backoff(Deadline.after(1e6, Now()))
    pauses = [backoff.pause(problem("unreachable", "nobody is there")).seconds for _ in range(500)]
    assert 0.4 < max(pauses) <= 0.5
    loading = problem("loading", "in a moment", retry_after_s=0.0)
    assert backoff.pause(loading).seconds <= FIRST_S
    assert 1.5 < max(backoff.pause(loading).seconds for _ in range(500)) <= LONGEST_S


@pytest.mark.parametrize("code", ["in_doubt", "unreachable"])
def test_time_that_a_call_spent_before_its_request_is_told(code: str) -> None:
    """If a push was encoded for most of its timeout, its error tells that besides the little time for an answer."""
    now = Now()
    backoff = Backoff(limit := Deadline.after(10.0, now))
    now.s += 9.5
    sent = limit.bound(Request("POST", "/push"))
    now.s += sent.timeout_s
    error = backoff.final(problem(code, f"no answer within {sent.timeout_s:.3g} s"))
    assert (error.code, "timeout=" in error.hint) == (code, True)
    assert error.detail == "no answer within 0.5 s; 9.5 s of the call's timeout of 10 s had passed before"


def test_what_a_node_has_told_to_do_outlives_its_silence() -> None:
    """The hint of a node that has answered says more than one about its address, once that cannot be reached."""
    now, outcomes = Now(), [no("storage_unavailable", hint="free room in Redis")]
    gone = problem("unreachable", "cannot reach it", hint="does a node listen there?")

    call = control.send("GET", "/models/m", None, Deadline.after(10.0, now))
    with pytest.raises(ps.Unavailable) as e:
        drive(call, lambda _: outcomes.pop() if outcomes else gone, now)
    assert e.value.hint == "free room in Redis"


@pytest.mark.parametrize(
    "outcome",
    [problem("unreachable", "connection refused"), refusal("unavailable", "it has not joined", retry_after_s=0.2)],
)
def test_while_a_shard_serves_nobody_the_map_is_asked_for_once_a_second(outcome: Outcome) -> None:
    """All workers miss a dead shard at the same time: the scheduler is not asked for each of their attempts."""
    shards, now = Shards(), Now()
    cluster, died = Cluster(("http://given:1",)), now()

    def answer(request: Request) -> Outcome:
        if request.to == A and request.path == "/push" and now() < died + 4.0:
            attempts.append(now())
            return outcome
        return shards(request)

    attempts: list[float] = []
    drive(transfer.push(cluster, "m", Deadline.after(60.0, now), grads(), terms()), answer, now)
    maps = [path for _, path in shards.log if path == "/models/m"]
    assert shards.flat.tolist() == expected().tolist()
    assert len(attempts) >= 4
    assert len(maps) <= 6  # one before the first attempt, one after it, and one in each second that follows


@pytest.mark.parametrize(
    "refusal", [no("unknown_model"), problem("conflict", "this client is closed"), no("forbidden")]
)
def test_a_pause_ends_when_no_heartbeat_can_end_it(refusal: Outcome) -> None:
    """A call that waits while its run is paused goes on, and fails, once a heartbeat is refused.

    The model was deleted meanwhile, the client closed, or the token revoked.
    """
    node = Node()
    session = opened(node)
    node.script[BEAT] = [ok({"state": "paused"}), no("no_leader"), refusal]
    node.script[LEASE] = [refusal]
    drive(session.beat(deadline()), node)
    lease = TaskRequests(session).lease("train")
    assert isinstance(next(lease), Pause)

    with pytest.raises(ps.Unavailable):
        drive(session.beat(Deadline.after(0.0)), node)
    assert isinstance(next(lease), Pause)
    with pytest.raises(ps.PsError):
        drive(session.beat(deadline()), node)
    effect = next(lease)
    assert not isinstance(effect, Pause)
    with pytest.raises((ps.RequestError, ps.AuthError)):
        lease.send([node(r) for r in effect])


def test_a_worker_that_was_told_to_stop_is_not_told_to_pause() -> None:
    """A leader that cannot store says `paused` of a run whose end it may not repeat: a worker that knows, knows."""
    node = Shard("async")
    session = opened(node)
    node.script[BEAT] = [ok({"state": "stop"}), ok({"state": "paused"}), ok({"state": "active"})]

    told = [(drive(session.beat(deadline()), node), session.status)[1] for _ in range(3)]

    assert told == ["stop", "stop", "active"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children_do_not_pause_alike() -> None:
    """The jitter of a forked child is its own: children that fail together must not all come back together."""
    ours, theirs = os.pipe()
    for _ in range(2):
        pid = os.fork()
        if not pid:
            try:
                pause = Backoff(deadline()).pause(problem("unreachable", "nobody"))
                os.write(theirs, f"{pause.seconds!r}\n".encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
    os.close(theirs)
    with open(ours) as told:
        first, second = told
    assert first != second
