"""A worker's iterations, without I/O: what one round trip does, and when the worker asks the scheduler."""

import contextlib
import json
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from tests.refusals import refused_with

from paramserver import limits
from paramserver.client.encoding import Encoded
from paramserver.client.iterations import Iterations
from paramserver.client.session import Session
from paramserver.codecs.codec import Codec
from paramserver.core.selection import select
from paramserver.errors import ConflictError, RequestError, Unavailable
from paramserver.net.calls import Call, Deadline, Outcome, Request, Response
from paramserver.wire.frame import MEDIA_TYPE, PullReply, PushFrame, PushReply, decode_header, encode_header

from .session_node import BEAT, GRAD, Node, deadline, no, ok, opened
from .sharding import Now, drive

CLOCK = "/models/m/clock"


class Shard(Node):
    """A node whose shard answers the last push of an iteration after the commit if `released`, else without it."""

    def __init__(self, mode: str = "sync") -> None:
        super().__init__(mode)
        self.released = True
        self.lost: list[Outcome] = []
        """Outcomes of the next pushpulls in place of the usual ones; they are executed all the same."""

    def __call__(self, request: Request) -> Outcome:
        if request.path not in ("/push", "/pushpull") or self.script.get(request.path):
            return super().__call__(request)
        frame, _ = decode_header(bytes(request.body or b""), PushFrame)
        self.pushes.append(frame)
        released = self.released and frame.ends is not None
        self.version += released or self.mode != "sync"
        state = "staged" if self.mode == "sync" else "applied"
        push = PushReply(state, False, self.version, 0, 1, self.timeline, [(0, self.version, 1, 0)], released=released)
        if request.path == "/push":
            return Response(200, {"content-type": MEDIA_TYPE}, encode_header(push))
        whole = released or self.mode != "sync"
        parts = [(0, self.version, 1)] if whole else []
        values = PullReply("m", 1, self.timeline, self.version, 1, "float32", parts, push)
        assert request.sink is not None
        request.sink.begin()
        body = np.full(4 if whole else 0, self.version, "<f4").tobytes()
        request.sink.feed(memoryview(encode_header(values) + body))
        request.sink.end()
        return self.lost.pop(0) if self.lost else Response(200, {})


def iterations(node: Node) -> tuple[Session, Iterations]:
    session = opened(node)
    return session, Iterations(session)


def sharded(mode: str = "sync") -> tuple[Shard, Session, Iterations]:
    node = Shard(mode)
    return node, *iterations(node)


@pytest.mark.parametrize("mode", ["async", "ssp", "buffered"])
def test_a_pushpull_takes_one_request_outside_sync(mode: str) -> None:
    """Outside sync, a worker's pushpull is one request, and the next gradient is based on the values it returned."""
    node, session, _ = sharded(mode)

    values = drive(session.pushpull(GRAD, deadline()), node)

    assert (len(node.pushes), node.pulls, values.flat.tolist()) == (1, [], [1.0] * 4)
    drive(session.push(GRAD, deadline()), node)
    assert node.pushes[-1].parts[0].base == (1, 1)


@pytest.mark.parametrize("way", ["step", "exchange"])
def test_the_loss_of_a_refused_gradient_is_reported(way: str) -> None:
    """If a gradient is refused because it is not finite, the next heartbeat reports the loss that came with it."""
    node = Node("async")
    session, made = iterations(node)
    bad, metrics = {"w": np.full(4, np.nan, np.float32)}, {"loss": float("nan")}
    node.script["/push"] = node.script["/pushpull"] = [no("non_finite")]

    with pytest.raises(RequestError, match="NaN"):
        drive(getattr(made, way)(bad, metrics, deadline(), None), node)
    drive(session.beat(deadline()), node)

    assert node.bodies(BEAT)[0]["metrics"] == [[0, {"loss": None}]]


@pytest.mark.parametrize("other", ["push", "step", "advance"])
@pytest.mark.parametrize("first", ["push", "step", "advance"])
def test_an_iteration_ends_only_after_its_pushes(first: str, other: str) -> None:
    """In sync a call that ends the iteration is refused while another call of the worker pushes, and the reverse.

    The commit could take that push on some partitions only.  Two pushes of one iteration may overlap.
    """
    node, session, its = sharded()
    calls: dict[str, Callable[[], Call[Any]]] = {
        "push": lambda: session.push(GRAD, deadline()),
        "step": lambda: its.step(GRAD, {}, deadline(), None),
        "advance": lambda: its.advance(deadline(), None),
    }
    drive(session.pull(deadline()), node)  # fetches the map
    call = calls[first]()
    next(call)

    if first == other == "push":
        assert drive(calls[other](), node).state == "staged"
    else:
        with pytest.raises(ConflictError, match="in the middle of this iteration"):
            drive(calls[other](), node)
    call.close()
    drive(its.advance(deadline(), None), node)  # it may have been reported
    drive(calls[other](), node)
    session.mode = "async"
    call = calls[first]()
    with contextlib.suppress(StopIteration):  # async: a clock asks nobody
        next(call)
    drive(calls[other](), node)


def test_a_released_step_asks_nobody_else() -> None:
    """A step that the shard releases takes one push, which says on how many shards it ends its clock.

    The worker sends no clock request, because the shards report the clock to the scheduler.
    """
    node, session, its = sharded()

    for _ in range(3):
        assert drive(its.step(GRAD, {}, deadline(), None), node).released

    assert [(f.clock, f.ends and f.ends[0]) for f in node.pushes] == [(0, 1), (1, 1), (2, 1)]
    assert node.bodies(CLOCK) == []
    assert session.clock == 3


def test_an_exchange_brings_the_values_of_its_commit() -> None:
    """A released exchange returns its commit's values with no pull or clock request; they are the next push's base."""
    node, session, its = sharded()

    first = drive(its.exchange(GRAD, {}, deadline(), None), node)
    second = drive(its.exchange(GRAD, {}, deadline(), None, out=first), node)

    assert second is first
    assert (second.version, second.flat.tolist()) == (2, [2.0] * 4)
    assert (node.pulls, node.bodies(CLOCK)) == ([], [])
    assert [p.base for p in node.pushes[1].parts] == [(1, 1)]
    assert session.clock == 2


def test_a_clock_that_is_not_released_in_time_is_reported_and_waited_for() -> None:
    """A clock not released in time is reported to the scheduler, without another push, and the values are pulled."""
    node, session, its = sharded()
    node.released = False

    drive(its.exchange(GRAD, {}, deadline(), None), node)
    drive(its.step(GRAD, {}, deadline(), None), node)

    assert [b["clock"] for b in node.bodies(CLOCK)] == [1, 2]
    assert [f.min_clock for f in node.pulls] == [1]
    assert [f.push_id.seq for f in node.pushes if f.push_id] == [1, 2]
    assert session.clock == 2


def test_a_worker_says_since_when_it_has_left_no_clock_out() -> None:
    """Clock reports and heartbeats name in `since` the clock from which on the worker has skipped none."""
    node, session, its = sharded()
    node.released = False
    node.script[CLOCK] = [ok({"released": True, "clock": c, "version": 0, "state": "active"}) for c in (1, 5, 6)]

    for _ in range(3):
        drive(its.step(GRAD, {}, deadline(), None), node)
    drive(session.beat(deadline()), node)

    assert [(b["clock"], b["since"]) for b in node.bodies(CLOCK)] == [(1, 0), (2, 0), (6, 5)]
    assert [(b["clock"], b["since"]) for b in node.bodies(BEAT)] == [(6, 5)]


@pytest.mark.parametrize("what", ["rolled_back", "fenced"])
def test_a_clock_is_not_told_whose_push_was_lost_before(what: str) -> None:
    """A clock is not reported if a heartbeat met a rollback or joined again after its push: the iteration starts over.

    If it were reported, the mean of that clock would be divided by a gradient that no shard has.
    """
    node, session, its = sharded()
    drive(session.push(GRAD, deadline()), node)
    node.timeline += what == "rolled_back"
    node.script[BEAT] = [no(what, timeline=node.timeline, clock=0, epoch=session.numbers.epoch)]
    drive(session.beat(deadline()), node)

    assert drive(its.advance(deadline(), None), node) == 0
    assert node.bodies(CLOCK) == []

    drive(session.pull(deadline()), node)
    drive(session.push(GRAD, deadline()), node)
    assert drive(its.advance(deadline(), None), node) == 1
    assert [b["clock"] for b in node.bodies(CLOCK)] == [1]


def test_a_clock_is_not_told_whose_push_was_dropped() -> None:
    """A clock is not reported if its push was dropped because a rollback had made its values obsolete."""
    node, session, its = sharded()
    drive(session.pull(deadline()), node)
    node.timeline = 1
    node.script[BEAT] = [no("rolled_back", timeline=1, clock=0)]
    drive(session.beat(deadline()), node)

    assert drive(session.push(GRAD, deadline()), node).state == "dropped"
    assert drive(its.advance(deadline(), None), node) == 0
    assert (node.pushes, node.bodies(CLOCK)) == ([], [])


def test_a_codec_that_there_is_not_takes_no_number() -> None:
    """Exchanges refused for an unknown codec, however many, leave no push id in doubt, so that later pushes go on."""
    node, session, its = sharded()

    def exchange() -> None:
        unknown = session.encoding.of_call(codec="no-such-codec")
        drive(its.exchange(GRAD, {}, deadline(), None, encoding=unknown), node)

    for _ in range(limits.WINDOW + 1):
        with pytest.raises(RequestError):
            exchange()

    drive(its.exchange(GRAD, {}, Deadline.after(0.2), None), node)
    assert len(node.pushes) == 1


def test_only_a_first_attempt_ends_an_iteration() -> None:
    """Only the first attempt of a push ends an iteration at the shards; after a retry the worker reports the clock.

    If parts are sent again, the shards cannot tell between them when the push is complete.
    """
    node, session, its = sharded()
    node.lost = [no("unavailable")]

    drive(its.exchange(GRAD, {}, deadline(), None), node)

    assert [f.ends is not None for f in node.pushes] == [True, False]
    assert [b["clock"] for b in node.bodies(CLOCK)] == [1]
    assert session.clock == 1


def test_a_gradient_of_some_partitions_ends_nothing() -> None:
    """A push of only some parameters does not end its iteration at the shards: the worker reports the clock.

    Otherwise a pull could overtake the commit on shards whose partitions the push does not touch.
    """
    node, _, its = sharded()
    two = {"name": "m", "params": {"v": {"shape": [4]}, "w": {"shape": [4]}}, "partitions": 1}
    node.spec = type(node.spec).parse(two | {"consistency": {"mode": "sync"}})
    _, its = iterations(node)

    drive(its.step(GRAD, {}, deadline(), None), node)

    assert [f.ends for f in node.pushes] == [None]
    assert len(node.bodies(CLOCK)) == 1


@pytest.mark.parametrize("mode", ["async", "buffered"])
def test_without_clocks_an_exchange_is_a_pushpull(mode: str) -> None:
    """In async and buffered mode an exchange is one pushpull that ends no clock, without a clock request."""
    node, session, its = sharded(mode)

    values = drive(its.exchange(GRAD, {}, deadline(), None), node)

    assert values.flat.tolist() == [1.0] * 4
    assert ([f.ends for f in node.pushes], node.bodies(CLOCK)) == ([None], [])
    assert session.clock == 1


def test_in_ssp_the_values_are_pulled_after_the_clock() -> None:
    """In ssp an exchange pulls after its clock is released, so that it sees what others pushed while it waited."""
    node, _, its = sharded("ssp")

    drive(its.exchange(GRAD, {}, deadline(), None), node)

    paths = [p for _, p, _ in node.sent if p in (CLOCK, "/pull")]
    assert paths == [CLOCK, "/pull"]


@pytest.mark.parametrize("mode", ["async", "ssp", "sync"])
@pytest.mark.parametrize("way", ["exchange", "pushpull"])
def test_out_is_looked_at_before_the_push(way: str, mode: str) -> None:
    """An `out` that cannot take the values is refused before the gradient is pushed."""
    node, session, its = sharded(mode)
    wrong = drive(session.pull(deadline()), node).frozen()

    exchange = its.exchange(GRAD, {}, deadline(), None, out=wrong)
    with pytest.raises(RequestError, match="out cannot take"):
        drive(exchange if way == "exchange" else session.pushpull(GRAD, deadline(), out=wrong), node)

    assert not node.pushes


def test_a_rollback_while_waiting_for_the_commit_drops_the_gradient() -> None:
    """An exchange answered with rolled_back drops its gradient and returns the values of the earlier clock."""
    node, session, its = sharded()
    drive(its.exchange(GRAD, {}, deadline(), None), node)
    node.timeline, node.version = 4, 0
    node.script["/pushpull"] = [no("rolled_back", timeline=4, clock=0)]

    values = drive(its.exchange(GRAD, {}, deadline(), None), node)

    assert (session.clock, session.timeline, values.version) == (0, 4, 0)
    assert node.bodies(CLOCK) == []


@pytest.mark.parametrize("way", ["step", "exchange"])
def test_who_does_not_wait_any_longer_is_told_that_the_gradient_is_pushed(way: str) -> None:
    """A step or exchange that times out waiting says that its gradient was pushed and names `clock`.

    `clock` then waits on without another push; another step would count the gradient twice.
    """
    node, session, its = sharded()
    node.released = False
    node.script[CLOCK] = [ok({"released": False, "clock": 0, "waiting_for": ["m/w7"], "state": "active"})]

    with pytest.raises(Unavailable, match=r"m/w7.*was pushed.*worker\.clock\(\)") as e:
        drive(getattr(its, way)(GRAD, {}, *[Deadline.after(0.0)] * 2), node)
    drive(its.advance(deadline(), None), node)

    assert e.value.code == "unavailable"
    assert (len(node.pushes), session.clock) == (1, 1)


@pytest.mark.parametrize("ended", ["in time", "interrupted"])
@pytest.mark.parametrize("reported", ["step", "exchange", "advance"])
@pytest.mark.parametrize("way", ["push", "step", "exchange", "stream"])
def test_a_reported_iteration_takes_no_further_push(way: str, reported: str, ended: str) -> None:
    """In sync a push is refused once its iteration is reported, until `clock` has waited for the iteration's end.

    The commit may be decided at any moment, and would take the push on some partitions only.
    """
    node, session, its = sharded()
    node.released = False
    node.script[CLOCK] = [ok({"released": False, "clock": 0, "waiting_for": ["m/w7"], "state": "active"})]
    pushes: dict[str, Callable[[], Call[Any]]] = {
        "push": lambda: session.push(GRAD, deadline()),
        "step": lambda: its.step(GRAD, {}, deadline(), None),
        "exchange": lambda: its.exchange(GRAD, {}, deadline(), None),
        "stream": lambda: session.begin(deadline(), streamed=True),
    }
    reports: dict[str, Callable[[float], Call[Any]]] = {
        "step": lambda s: its.step(GRAD, {}, *[Deadline.after(s)] * 2),
        "exchange": lambda s: its.exchange(GRAD, {}, *[Deadline.after(s)] * 2),
        "advance": lambda s: its.advance(*[Deadline.after(s)] * 2),
    }

    if ended == "in time":
        with pytest.raises(Unavailable):
            drive(reports[reported](0.0), node)
    else:
        call = reports[reported](30.0)
        requests = cast("list[Request]", next(call))
        while requests[0].path != CLOCK:
            requests = cast("list[Request]", call.send([node(r) for r in requests]))
        call.close()
    sent = len(node.pushes)
    with pytest.raises(ConflictError, match=r"reported.*worker\.clock\(\)"):
        drive(pushes[way](), node)
    assert len(node.pushes) == sent
    drive(its.advance(deadline(), None), node)
    drive(pushes[way](), node)


@pytest.mark.parametrize("way", ["step", "exchange"])
def test_an_encoder_with_a_memory_hears_that_its_push_was_accepted(way: str) -> None:
    """An encoder's `kept` is called if its push is accepted, even if the clock then fails, but not if it is dropped."""
    node, heard = Shard(), list[tuple[Any, ...]]()
    session, its = iterations(node)
    model_map = drive(session.cluster.map_of("m", deadline()), node)

    def encoded(name: str) -> Encoded:
        codec, whole = Codec.parse("int8"), select(model_map.layout)
        return Encoded(
            whole, codec, {0: (np.zeros(8, np.uint8), 8)}, 0.0, 1, lambda parts: heard.append((name, *parts))
        )

    def go(name: str) -> Any:
        drive(getattr(its, way)(encoded(name), {}, deadline(), None), node)

    go("released")
    node.script["/push" if way == "step" else "/pushpull"] = [no("rolled_back", timeline=1, clock=0)]
    node.timeline = 1
    go("dropped")
    node.released = False
    node.script[CLOCK] = [no("invalid_field")]
    with pytest.raises(RequestError):
        go("not released")

    assert heard == [("released", 0), ("not released", 0)]


def test_a_scheduler_that_falls_silent_after_the_push_does_not_hide_that_it_is_pushed() -> None:
    """If no scheduler answers after the push, the error keeps its code, and its hint says that the push was made."""
    node, session, its = sharded()
    session.silence_s = 0.0
    node.released = False
    node.script[CLOCK] = [no("no_leader")]

    with refused_with("no_leader", Unavailable, match=r"was pushed.*worker\.clock\(\)"):
        drive(its.step(GRAD, {}, *[Deadline.after(0.0)] * 2), node)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("way", ["step", "exchange"])
def test_a_paused_worker_waits_for_no_longer_than_its_caller_would(way: str, mode: str) -> None:
    """A paused worker's step or exchange times out; after the pause `clock` ends the iteration without another push."""
    node, now = Shard(mode), Now()
    session, its = iterations(node)
    node.script[BEAT] = [ok({"state": "paused"}), ok({"state": "active"})]
    node.script[CLOCK] = [ok({"released": True, "clock": 1, "state": "paused"})]
    drive(session.beat(deadline()), node)

    with pytest.raises(Unavailable, match=r"paused.*was pushed"):
        drive(getattr(its, way)(GRAD, {}, *[Deadline.after(2.0, now)] * 2), node, now)
    with pytest.raises(Unavailable, match="paused"):
        drive(its.advance(*[Deadline.after(2.0, now)] * 2), node, now)
    drive(session.beat(deadline()), node)
    drive(its.advance(deadline(), None), node)

    assert 104.0 <= now.s < 105.0
    assert (len(node.pushes), session.clock) == (1, 1)


@pytest.mark.parametrize("wrong", [{"loss": "high"}, {"loss": np.ones(2)}, {"x" * 65: 1.0}])
@pytest.mark.parametrize("way", ["step", "exchange"])
def test_metrics_that_cannot_be_reported_are_refused_before_the_push(way: str, wrong: dict[str, Any]) -> None:
    """A step or exchange with invalid metrics is refused before its push, so that it can be repeated."""
    node, session, its = sharded()

    with refused_with("invalid_field", RequestError):
        drive(getattr(its, way)(GRAD, wrong, deadline(), None), node)
    assert (node.pushes, session.clock) == ([], 0)


def test_it_waits_at_the_shard_for_no_longer_than_its_caller_would() -> None:
    """A step waits at the shard for half its timeout at most, or for 2 s if it has none.

    The other half is left for the scheduler to say which workers the step waits for.
    """
    node, _, its = sharded()

    drive(its.step(GRAD, {}, *[Deadline.after(1.0)] * 2), node)
    drive(its.step(GRAD, {}, deadline(), None), node)

    waits: list[Any] = [f.ends and f.ends[1] for f in node.pushes]
    assert 0.0 < waits[0] <= 0.5
    assert waits[1] == 2.0


@pytest.mark.parametrize("way", ["step", "exchange"])
def test_what_it_waited_at_the_shard_is_part_of_its_time(way: str) -> None:
    """The time that a step or exchange waits at the shard counts towards its timeout.

    Here the shard answers without the commit after half of the 5 s; the scheduler gets the other half.
    """
    now = Now()

    class Late(Shard):
        def __call__(self, request: Request) -> Outcome:
            now.s += 2.5 if request.path in ("/push", "/pushpull") else 0.0
            if request.path == CLOCK:
                self.sent.append((request.method, CLOCK, json.loads(bytes(request.body or b""))))
                now.s += self.bodies(CLOCK)[-1]["wait_s"]
                return ok({"released": False, "clock": 0, "waiting_for": ["m/w7"], "state": "active"})
            return super().__call__(request)

    node = Late()
    node.released = False
    _, its = iterations(node)
    began_s = now.s

    with pytest.raises(Unavailable, match="not released in 5 s"):
        drive(getattr(its, way)(GRAD, {}, *[Deadline.after(5.0, now)] * 2), node, now)
    assert now.s - began_s == pytest.approx(5.0)


class Slow(Shard):
    """A node whose clock requests take 40 s; it records the timeout of each pull."""

    def __init__(self, mode: str, now: Now) -> None:
        super().__init__(mode)
        self.released, self._now = False, now
        self.pulls_have_s: list[float] = []

    def __call__(self, request: Request) -> Outcome:
        if request.path == CLOCK:
            self._now.s += 40.0
        if request.path == "/pull":
            self.pulls_have_s.append(request.timeout_s)
        return super().__call__(request)


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_waiting_for_the_others_takes_nothing_from_the_pull_that_follows(mode: str) -> None:
    """If an exchange has no timeout, waiting for its clock takes no time from the pull that follows."""
    now = Now()
    node = Slow(mode, now)
    session, its = iterations(node)

    drive(its.exchange(GRAD, {}, Deadline.after(30.0, now), None), node, now)

    assert node.pulls_have_s == [30.0]
    assert session.clock == 1


@pytest.mark.parametrize(("polls", "told"), [(1, []), (4, ["waited_s=30 for=m/w7"])])
def test_a_long_wait_for_other_workers_is_told_once(
    polls: int, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """After 30 s of waiting without a timeout, one warning names the workers that are waited for."""
    now = Now()

    class Waiting(Shard):
        def __call__(self, request: Request) -> Outcome:
            now.s += 20.0 if request.path == CLOCK else 0.0
            return super().__call__(request)

    node = Waiting()
    session, its = iterations(node)
    node.script[CLOCK] = [ok({"released": False, "clock": 0, "waiting_for": ["m/w7"], "state": "active"})] * polls

    drive(its.advance(Deadline.after(30.0, now), None), node, now)

    assert [part for r in caplog.records for part in told if part in r.getMessage()] == told
    assert (len(caplog.records), session.clock) == (len(told), 1)


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_values_that_cannot_be_had_leave_no_doubt_that_the_gradient_counts(mode: str) -> None:
    """If the pull at the end of an exchange fails, the hint warns that another step would count the gradient twice."""
    now = Now()
    node = Slow(mode, now)
    session, its = iterations(node)
    node.script["/pull"] = [no("unavailable") for _ in range(1000)]

    with pytest.raises(Unavailable) as raised:
        drive(its.exchange(GRAD, {}, Deadline.after(30.0, now), None), node, now)

    assert "Another step would count" in (raised.value.hint or "")
    assert session.clock == 1


def test_a_pull_may_be_read_only() -> None:
    """A worker's pull with `view` returns read-only values, and is refused together with `out`."""
    node, session, _ = sharded("async")

    values = drive(session.pull(deadline(), view=True), node)
    assert not values["w"].flags.writeable
    with pytest.raises(RequestError, match="exclude each other"):
        drive(session.pull(deadline(), view=True, out=values), node)


def test_values_that_are_not_copied_cannot_be_written_to() -> None:
    """Values of an exchange with `view` are read-only, and `view` together with `out` is refused before the push."""
    node, _, its = sharded("async")

    values = drive(its.exchange(GRAD, {}, deadline(), None, view=True), node)

    assert not values["w"].flags.writeable
    with pytest.raises(RequestError, match="exclude"):
        drive(its.exchange(GRAD, {}, deadline(), None, view=True, out=values), node)
    assert len(node.pushes) == 1


@pytest.mark.parametrize("ended", [False, True], ids=["while it is reported", "after the wait was given up"])
def test_a_push_that_was_about_to_be_sent_when_its_iteration_was_reported_is_refused(ended: bool) -> None:
    """In sync, a push that is still looking up the owners when its clock is reported is refused, not sent."""
    node = Node()
    session, made = iterations(node)
    session.cluster.forget("m")
    pushing = session.push(GRAD, deadline())
    (owners,) = cast("list[Request]", next(pushing))
    reporting = made.advance(deadline(), None)
    assert cast("list[Request]", next(reporting))[0].path == CLOCK
    if ended:
        reporting.close()

    with pytest.raises(ConflictError):
        pushing.send([node(owners)])
    assert node.pushes == []
    assert not session.numbers.any_in_doubt()
