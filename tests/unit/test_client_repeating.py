"""What an error of the client says about repeating its call: it is `retryable` only if it cannot count twice then."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.refusals import refused_with

import paramserver as ps
from paramserver.client.iterations import Iterations
from paramserver.client.session import Session
from paramserver.client.streaming import Stream
from paramserver.errors import InDoubt, PsError, Unavailable, problem
from paramserver.net.calls import Call, Deadline, Outcome, Request, Response

from .session_node import GRAD, no, opened
from .sharding import Now, Shards, answered, drive, grads, refusal, result
from .test_client_iterations import CLOCK, Shard

LOST = problem("in_doubt", "the connection broke")


@pytest.mark.parametrize("kind", [ps.Client, ps.AsyncClient])
@pytest.mark.parametrize(
    ("call", "repeatable"),
    [
        (lambda client: client.model("m").push(grads(), timeout=0.0), False),
        (lambda client: client.model("m").pushpull(grads(), timeout=0.0), False),
        (lambda client: client.model("m").save(timeout=0.0), False),
        (lambda client: client.model("m").restore(timeout=0.0), False),
        (lambda client: client.create_run("m", "a:b", timeout=0.0), False),
        (lambda client: client.request("POST", "/runs", {}, timeout=0.0), False),
        (lambda client: client.request("POST", CLOCK, {}, timeout=0.0), True),
        (lambda client: client.model("m").add_tasks("train", size=1, timeout=0.0), True),
    ],
)
def test_a_call_whose_answer_was_lost_is_retryable_only_if_it_cannot_count_twice(
    kind: Any, call: Callable[[Any], Any], repeatable: bool, shards: Shards
) -> None:
    """Another push would go out under another number, and another run would be a second one."""

    def answer(request: Request) -> Outcome:
        return shards(request) if request.method == "GET" else LOST

    with pytest.raises(InDoubt) as met:
        result(call(answered(kind, answer)))
    assert met.value.retryable is repeatable


def test_a_push_that_was_not_accepted_is_retryable(shards: Shards) -> None:
    """A push that changed nothing, as no shard could take it, may be made again."""
    shards.trouble = [lambda r: refusal("storage_unavailable") if r.path == "/push" else None] * 2

    with pytest.raises(Unavailable) as met:
        answered(ps.Client, shards).model("m").push(grads(), timeout=0.0)
    assert met.value.retryable


def test_a_push_that_a_node_says_could_count_twice_is_not_sent_again(shards: Shards) -> None:
    """A push of `client.request` without an id is sent once if it was accepted, even though it is not stored yet."""
    told = problem("storage_unavailable", "no Redis", push={"state": "applied"}, retryable=False)
    answers: list[Outcome] = [told]
    client = answered(ps.Client, lambda _: answers.pop())

    with pytest.raises(Unavailable) as met:
        client.request("POST", "/models/m/push", {"grads": {}})
    assert not met.value.retryable


def streamed(session: Session, until: Deadline) -> Call[Any]:
    """Push the gradient in a stream."""
    stream = Stream(session)
    yield from stream.open(until)
    stream.put("w", GRAD["w"])
    yield from stream.send(until)


WAYS: dict[str, Callable[[Session, Deadline], Call[Any]]] = {
    "push": lambda session, until: session.push(GRAD, until),
    "pushpull": lambda session, until: session.pushpull(GRAD, until),
    "step": lambda session, until: Iterations(session).step(GRAD, {}, until, until),
    "exchange": lambda session, until: Iterations(session).exchange(GRAD, {}, until, until),
    "stream": streamed,
}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("way", WAYS)
def test_a_workers_push_whose_answer_was_lost_is_not_retryable(way: str, mode: str) -> None:
    """A worker's next push has another number, too."""
    node, now = Shard(mode), Now()
    session = opened(node)

    with pytest.raises(InDoubt) as met:
        drive(WAYS[way](session, Deadline.after(1.0, now)), lambda r: LOST if "/push" in r.path else node(r), now)
    assert not met.value.retryable


@pytest.mark.parametrize(("way", "mode"), [("pushpull", "sync"), ("exchange", "ssp")])
def test_a_push_that_was_accepted_before_the_values_failed_is_not_retryable(way: str, mode: str) -> None:
    """An error of the pull after an accepted push is about the whole call, which would push once more."""
    node, now = Shard(mode), Now()
    session = opened(node)

    call = WAYS[way](session, Deadline.after(1.0, now))
    with pytest.raises(Unavailable) as met:
        drive(call, lambda r: no("loading") if r.path == "/pull" else node(r), now)
    assert not met.value.retryable


@pytest.mark.parametrize(("way", "code"), [("pushpull", "in_doubt"), ("exchange", "unavailable")])
def test_a_shard_that_is_late_with_a_commit_does_not_hide_that_the_gradient_counts(way: str, code: str) -> None:
    """If a clock is released, but a shard does not have its commit by the deadline, the error says what was pushed."""
    node, now = Shard("sync"), Now()
    session = opened(node)
    node.released = False
    call = WAYS[way](session, Deadline.after(2.0, now))

    with pytest.raises(Unavailable, match=r"push was accepted|Another step would count") as met:
        drive(call, lambda r: no("version_not_reached") if r.path == "/pull" else node(r), now)
    assert (met.value.code, met.value.retryable) == (code, False)
    assert (len(node.pushes), session.clock) == (1, 1 if way == "exchange" else 0)


PAGE = Response(404, {}, b"<html>not here</html>")


@pytest.mark.parametrize("answer", [PAGE, no("unauthorized"), Response(500, {}, b"oops")])
@pytest.mark.parametrize(
    ("way", "mode", "path", "says"),
    [
        ("step", "ssp", CLOCK, "was pushed.*worker.clock"),
        ("exchange", "sync", CLOCK, "was pushed.*worker.clock"),
        ("exchange", "ssp", "/pull", "Another step would count"),
        ("pushpull", "sync", "/pull", "push was accepted"),
    ],
)
def test_whatever_answers_after_an_accepted_push_does_not_hide_that_the_gradient_counts(
    way: str, mode: str, path: str, says: str, answer: Response
) -> None:
    """If a gateway answers for itself after a push, or the token is refused, the error says what was pushed."""
    node, now = Shard(mode), Now()
    session = opened(node)
    node.released = False

    with pytest.raises(PsError, match=says) as met:
        drive(WAYS[way](session, Deadline.after(5.0, now)), lambda r: answer if r.path == path else node(r), now)
    assert (met.value.retryable, len(node.pushes)) == (False, 1)


@pytest.mark.parametrize(("way", "path"), [("step", CLOCK), ("exchange", "/pull"), ("pushpull", "/pull")])
def test_a_push_to_a_model_that_is_gone_since_then_does_not_count(way: str, path: str) -> None:
    """If the model is deleted after a push, the error says only that."""
    node, now = Shard("sync" if way == "pushpull" else "ssp"), Now()
    session, told = opened(node), no("unknown_model")

    with refused_with("unknown_model", match="^refused$"):
        drive(WAYS[way](session, Deadline.after(5.0, now)), lambda r: told if r.path == path else node(r), now)


def test_a_clock_may_be_reported_again_after_a_step_that_may_not_be_repeated() -> None:
    """The error of a step whose push was accepted is not retryable, that of the `clock()` after it is."""
    node, now = Shard("ssp"), Now()
    session = opened(node)
    until = Deadline.after(1.0, now)

    def answer(request: Request) -> Outcome:
        return no("no_leader") if request.path == CLOCK else node(request)

    with pytest.raises(Unavailable, match="was pushed") as stepped:
        drive(Iterations(session).step(GRAD, {}, until, until), answer, now)
    with pytest.raises(Unavailable) as clocked:
        drive(Iterations(session).advance(until, until), answer, now)
    assert (stepped.value.retryable, clocked.value.retryable) == (False, True)
    assert len(node.pushes) == 1
