"""A worker's pushes that only some shards may have, and what else a session refuses or survives; without I/O."""

import logging
from typing import Any

import pytest
from tests.refusals import refused_with

from paramserver.client.iterations import Iterations
from paramserver.client.session import Session
from paramserver.core.spec import ModelSpec
from paramserver.errors import ConflictError, InDoubt, PsError, RequestError, Unavailable, problem
from paramserver.net.calls import Deadline, Outcome, Request, Response
from paramserver.wire.frame import MEDIA_TYPE, PushReply, encode_header

from .session_node import BEAT, GRAD, Node, deadline, joined, no, opened
from .sharding import Now, drive
from .test_client_iterations import CLOCK, sharded

LOST = problem("in_doubt", "the answer was lost")


def in_doubt(node: Node, session: Session) -> None:
    """Push; no answer arrives before the deadline."""
    now = Now()
    node.script["/push"] = [LOST] * 1000
    with pytest.raises(InDoubt):
        drive(session.push(GRAD, Deadline.after(5.0, now)), node, now)
    node.script["/push"] = []


def joins(node: Node) -> int:
    """Return how often the worker has joined."""
    return len(node.bodies("/models/m/workers"))


@pytest.mark.parametrize("by", ["push", "step"])
def test_a_push_in_doubt_is_taken_back_before_the_next(by: str) -> None:
    """In sync, a worker whose push may have reached some shards only joins again and pushes the same clock anew."""
    node, session = joined()
    drive(session.pull(deadline()), node)
    in_doubt(node, session)
    assert joins(node) == 1

    call: Any = session.push(GRAD, deadline()) if by == "push" else Iterations(session).step(GRAD, {}, deadline(), None)
    assert drive(call, node).state == "staged"

    assert joins(node) == 2
    assert [(f.epoch, f.clock) for f in node.pushes] == [(2, 0)]
    assert drive(session.push(GRAD, deadline()), node).state == "staged"
    assert joins(node) == 2


def test_a_push_in_doubt_is_the_servers_business_where_pushes_count_one_by_one() -> None:
    """In async, a worker goes on under its epoch after a push in doubt: parts that arrived have been applied."""
    node, session = joined("async")
    in_doubt(node, session)
    assert drive(session.push(GRAD, deadline()), node).state == "applied"

    assert (joins(node), node.pushes[-1].epoch) == (1, 1)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, GeneratorExit])
def test_an_interrupted_push_is_taken_back(interrupt: type[BaseException]) -> None:
    """In sync, a worker whose push was interrupted in flight joins again: some shards may have received it."""
    node, session = joined()
    pushing = session.push(GRAD, deadline())
    next(pushing)
    with pytest.raises(interrupt):
        pushing.throw(interrupt())
    drive(session.push(GRAD, deadline()), node)

    assert (joins(node), node.pushes[-1].epoch) == (2, 2)


@pytest.mark.parametrize(
    ("refusal", "taken_back"),
    [(no("conflict"), False), (no("conflict", partitions=[3]), True), (no("internal"), False)],
)
def test_a_refused_push_is_taken_back_if_some_shards_have_it(refusal: Response, taken_back: bool) -> None:
    """In sync, a worker joins again after a refusal that names partitions which took the push, not after another."""
    node, session = joined()
    node.script["/push"] = [refusal]
    with pytest.raises(PsError):
        drive(session.push(GRAD, deadline()), node)
    drive(session.push(GRAD, deadline()), node)

    assert (joins(node) == 2) == taken_back


def test_an_iteration_with_a_push_taken_back_starts_again() -> None:
    """A worker that ends an iteration whose push is in doubt reports nothing: it goes on with the same clock."""
    node, session = joined()
    in_doubt(node, session)

    assert drive(Iterations(session).advance(deadline(), None), node) == 0
    assert node.bodies("/models/m/clock") == []
    drive(session.push(GRAD, deadline()), node)
    assert drive(Iterations(session).advance(deadline(), None), node) == 1


def test_a_push_in_doubt_is_taken_back_whatever_answers_for_the_scheduler() -> None:
    """In sync, a worker whose push is in doubt joins again, also if a gateway's own page is all that it is told."""
    (node, session), now = joined(), Now()
    node.script["/push"], node.script["/models/m"] = [LOST] * 1000, [Response(404, {}, b"<html>")] * 1000
    with pytest.raises(InDoubt):
        drive(session.push(GRAD, Deadline.after(5.0, now)), node, now)
    node.script.clear()
    drive(session.push(GRAD, deadline()), node)

    assert (joins(node), node.pushes[-1].epoch) == (2, 2)


def became_sync() -> tuple[Node, Session]:
    """Return a synchronous node, and the session of a worker there that knows the timeline, but not the mode yet."""
    node, session = joined("async")
    node.mode, node.timeline = "sync", 1
    node.script[BEAT] = [no("rolled_back", timeline=1, clock=0)]
    drive(session.beat(deadline()), node)
    assert (session.mode, session.timeline) == ("async", 1)
    return node, session


@pytest.mark.parametrize("how", ["in doubt", "interrupted"])
def test_a_push_is_taken_back_by_a_worker_that_learns_of_sync_after_it(how: str) -> None:
    """A push that only some shards may have staged is taken back once its worker knows that the model is in sync."""
    node, session = became_sync()
    if how == "in doubt":
        in_doubt(node, session)
    else:
        pushing = session.push(GRAD, deadline())
        next(pushing)
        with pytest.raises(KeyboardInterrupt):
            pushing.throw(KeyboardInterrupt())
    drive(session.refresh_mode(deadline()), node)
    drive(session.push(GRAD, deadline()), node)

    assert (joins(node), node.pushes[-1].epoch) == (2, 2)


def test_a_step_that_is_taken_back_with_a_push_before_it_is_dropped() -> None:
    """A step says `dropped` if it has shown that the model is in sync, and what its epoch had staged is taken back."""
    node, session = became_sync()
    in_doubt(node, session)
    step = Iterations(session).step

    assert drive(step(GRAD, {}, deadline(), None), node).state == "dropped"
    assert (joins(node), session.clock) == (2, 0)
    assert drive(step(GRAD, {}, deadline(), None), node).state == "staged"
    assert (joins(node), session.clock) == (2, 1)


@pytest.mark.parametrize(
    ("committed", "taken_back", "state"),
    [(True, False, "staged"), (False, False, "dropped"), (True, True, "dropped")],
)
def test_a_step_whose_report_was_lost_with_its_lease_is_dropped_only_if_it_cannot_count(
    committed: bool, taken_back: bool, state: str
) -> None:
    """A step that has shown that the model is in sync may count once its clock was reported and has been committed.

    It does not count if its worker joined again before it reported the clock, whoever else has ended that.
    """
    node, session = became_sync()
    node.script[CLOCK] = [LOST, no("fenced", epoch=1)]

    def answer(request: Request) -> Outcome:
        outcome = node(request)
        if node.pushes and committed:
            node.clock = 1
        return outcome

    if taken_back:
        in_doubt(node, session)
    assert drive(Iterations(session).step(GRAD, {}, deadline(), None), answer).state == state
    assert (joins(node), session.clock, len(node.bodies(CLOCK))) == (2, int(committed), 0 if taken_back else 2)


@pytest.mark.parametrize("moved", ["clock", "timeline"])
def test_a_gradient_whose_clock_has_passed_while_it_was_in_doubt_is_dropped(moved: str) -> None:
    """If the model went on before the worker joined again, a gradient of the values it had is dropped."""
    node, session = joined()
    drive(session.pull(deadline()), node)
    in_doubt(node, session)
    setattr(node, moved, 1)

    assert drive(session.push(GRAD, deadline()), node).state == "dropped"
    assert node.pushes == []
    assert (session.clock, session.timeline) == (node.clock, node.timeline)


def test_nothing_is_pushed_while_the_iteration_is_being_ended() -> None:
    """In sync, another call's push while the iteration is being ended is refused and not sent; in async it is made."""
    for mode, refused in (("sync", True), ("async", False)):
        node, session = joined(mode)
        with session.ending_iteration():
            if refused:
                with pytest.raises(ConflictError, match="another call of this worker"):
                    drive(session.push(GRAD, deadline()), node)
            else:
                drive(session.push(GRAD, deadline()), node)
        assert len(node.pushes) == (not refused)
        drive(session.push(GRAD, deadline()), node)
        assert len(node.pushes) == 1 + (not refused)


def test_an_iteration_without_a_push_is_not_the_one_before() -> None:
    """After an iteration that pushed, one without a push is reported all the same, even if the worker joined again."""
    node, session = joined()
    drive(session.push(GRAD, deadline()), node)
    assert drive(Iterations(session).advance(deadline(), None), node) == 1
    node.clock = 1
    drive(session.join(deadline()), node)

    assert drive(Iterations(session).advance(deadline(), None), node) == 2
    assert [body["clock"] for body in node.bodies("/models/m/clock")] == [1, 2]


def test_nothing_is_added_to_an_iteration_whose_commit_came_with_its_push() -> None:
    """After a step whose commit came but whose run is paused, nothing more is pushed for that clock."""
    node, now = Node(), Now()
    session = opened(node)
    session.status = "paused"
    reply = PushReply("staged", False, 1, 0, 1, 0, [(0, 1, 1, 0)], released=True)
    node.script["/push"] = [Response(200, {"content-type": MEDIA_TYPE}, encode_header(reply))]
    with pytest.raises(Unavailable):
        drive(Iterations(session).step(GRAD, {}, *[Deadline.after(5.0, now)] * 2), node, now)

    with pytest.raises(ConflictError, match="iteration 0 of this worker has been reported finished"):
        drive(session.push(GRAD, deadline()), node)


@pytest.mark.parametrize("mode", ["sync", "ssp", "async", "buffered"])
@pytest.mark.parametrize(("clock", "pushed", "since"), [(1, False, 1), (1, True, 0), (2, True, 2)])
def test_a_worker_that_skips_clocks_counts_from_there(mode: str, clock: int, pushed: bool, since: int) -> None:
    """A worker that waited for data counts from the clock that comes with it; what it had pushed before that counts.

    If it said that it has left none out, a mean would be divided by a contribution that was never pushed.
    """
    node, session = joined(mode)
    if pushed:
        drive(session.push(GRAD, deadline()), node)
    session.catch_up(clock, 1, 0)

    assert (session.clock, session.since) == (clock, since)
    session.catch_up(clock - 1, 1, 0)
    session.catch_up(9, 2, 0)
    session.catch_up(9, 1, 1)
    assert session.clock == clock
    session.catch_up(clock + 1, 1, 0)
    assert session.since == clock + 1


@pytest.mark.parametrize(("mode", "clock"), [("async", 9), ("buffered", 9), ("ssp", 7), ("sync", 7)])
def test_a_heartbeat_tells_the_clock_where_reports_have_no_answer(mode: str, clock: int) -> None:
    """In async and buffered, where a worker asks nobody for the next clock, it takes a higher one from a heartbeat."""
    node = Node(mode)
    node.clock = 7
    session = opened(node)
    node.clock = 9

    drive(session.beat(deadline()), node)

    assert (session.clock, session.since) == (clock, clock)


@pytest.mark.parametrize(("mode", "asks"), [("sync", [7, 9, 3]), ("async", [0, 0, 0])])
def test_a_worker_that_begins_at_a_clock_pulls_the_values_of_that_clock(mode: str, asks: list[int]) -> None:
    """In sync a worker that joins, catches up or follows a rollback asks for the commits before its clock.

    They are decided, but some shards may not have applied them yet.
    """
    node = Node(mode)
    node.clock = 7
    session = opened(node)

    drive(session.pull(deadline()), node)
    session.catch_up(9, 1, 0)
    drive(session.pull(deadline()), node)
    node.timeline, node.script[BEAT] = 1, [no("rolled_back", timeline=1, clock=3)]
    drive(session.beat(deadline()), node)
    drive(session.pull(deadline()), node)

    assert [f.min_clock for f in node.pulls] == asks


def test_a_stream_is_not_clipped_by_a_norm_that_is_not_known() -> None:
    """A streamed push to a model that clips by the norm of the whole gradient is refused before anything is sent."""
    node = Node("async")
    node.spec = ModelSpec.parse({**node.spec.document(), "optimizer": {"name": "sgd", "clip_norm": 1.0}})
    session = opened(node)

    with pytest.raises(RequestError, match="'m' clips by the norm of the whole gradient") as refused:
        drive(session.begin(deadline(), streamed=True), node)
    assert (refused.value.code, refused.value.hint) == ("invalid_field", "push it whole: worker.push(grads)")
    assert drive(session.begin(deadline()), node)[1] is not None


@pytest.mark.parametrize(
    ("answer", "code"), [(no("unavailable"), "unavailable"), (Response(404, {}, b"<html>"), "not_found")]
)
def test_a_mode_that_cannot_be_asked_for_is_no_failure_of_a_push(
    answer: Outcome, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A push that shows that the mode has changed succeeds although nobody tells the new mode; the next push asks."""
    caplog.set_level(logging.INFO, "paramserver")
    node, now = Node("async"), Now()
    session = opened(node)
    node.mode = "sync"
    node.script["/models/m"] = [answer] * 1000

    assert drive(session.push(GRAD, Deadline.after(5.0, now)), node, now).state == "staged"
    assert session.mode == "async"
    assert f"worker.mode_unknown worker=m/w0 error={code}" in caplog.text
    node.script["/models/m"] = []
    drive(session.push(GRAD, deadline()), node)
    assert session.mode == "sync"


def fail_pulls(node: Node) -> Any:
    """Return the node's answers, except that pulls are refused for a while."""
    return lambda request: no("unavailable") if request.path == "/pull" else node(request)


def test_a_pull_that_fails_after_a_workers_push_leaves_it_in_doubt() -> None:
    """A worker's pushpull raises InDoubt if its push was accepted and the pull fails, as the push must not be repeated.

    If the push was dropped, the error of the pull is raised as it is.
    """
    node, now = Node("sync"), Now()
    session = opened(node)
    assert drive(session.pushpull(GRAD, deadline()), node).flat.tolist() == [0.0] * 4
    with pytest.raises(InDoubt, match="the push was accepted, the pull after it failed"):
        drive(session.pushpull(GRAD, Deadline.after(5.0, now)), fail_pulls(node), now)
    node.script["/push"] = [no("reserved_worker")]
    with refused_with("unavailable"):
        drive(session.pushpull(GRAD, Deadline.after(5.0, now)), fail_pulls(node), now)


@pytest.mark.parametrize("way", ["step", "exchange"])
def test_an_iteration_ends_in_the_timeline_that_its_push_was_for(way: str) -> None:
    """A push that begins after its worker, which has pulled nothing, followed a new timeline ends that one's clock."""
    node, session, loop = sharded()
    session.cluster.forget("m")  # as when it looks again for addresses

    def answer(request: Request) -> Outcome:
        if request.path == "/models/m" and not node.timeline:  # the step's own; meanwhile the heartbeat follows
            node.timeline = node.clock = 9
            node.script[BEAT] = [no("rolled_back", timeline=9, clock=9)]
            drive(session.beat(deadline()), node)
        return node(request)

    drive(getattr(loop, way)(GRAD, {}, deadline(), None), answer)

    assert (node.pushes[-1].timeline, node.pushes[-1].clock) == (9, 9)
    assert session.clock == 10
