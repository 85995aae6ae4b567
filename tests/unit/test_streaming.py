"""Pushes in pieces: which partitions are sent when, and how such a push begins and ends."""

import asyncio
import contextlib
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from tests.waiting import eventually

from paramserver import limits
from paramserver.client.iterations import Iterations
from paramserver.client.pushed import Pushed
from paramserver.client.streaming import BUCKET_BYTES, AsyncPushStream, Pieces, PushStream, Stream
from paramserver.core.layout import Layout
from paramserver.core.spec import ModelSpec
from paramserver.errors import ConflictError, InDoubt, NotFoundError, PsError, RequestError, Unreachable, problem
from paramserver.net.calls import Call, Deadline, Outcome, Request, Response
from paramserver.wire.frame import MEDIA_TYPE, PushReply, encode_header

from .session_node import GRAD, Node, deadline, joined, no, opened
from .sharding import Now, drive


def layout(partitions: int, **sizes: int) -> Layout:
    """Return the layout of a model of one-dimensional parameters."""
    params = {name: {"shape": [size]} for name, size in sizes.items()}
    return Layout(ModelSpec.parse({"name": "m", "params": params, "partitions": partitions}))


def test_a_partition_goes_out_when_all_of_it_is_here() -> None:
    """A partition is sent once every parameter that it overlaps has been put."""
    pieces = Pieces(layout(4, a=60, b=40))  # partition 2, about [48, 75), has the end of a and the beginning of b
    shared = [i for i, names in enumerate(pieces._missing) if names == {"a", "b"}]
    assert len(shared) == 1

    pieces.put("b", np.ones(40))
    first = pieces.take()
    assert first
    assert not first & set(shared)
    assert pieces.names(first) == ["b"]
    assert pieces.rest() == frozenset(shared)
    pieces.put("a", np.ones(60))
    assert pieces.take() == frozenset(range(4)) - first
    assert pieces.take() == pieces.rest() == frozenset()


def test_the_first_layers_overtake_what_waits() -> None:
    """Of all complete partitions the lowest are sent first, one bucket at a time."""
    elements = BUCKET_BYTES // 4
    pieces = Pieces(layout(3, first=elements, second=elements, third=elements))
    for name in ("third", "second"):
        pieces.put(name, None)
    assert pieces.take() == {1}
    pieces.put("first", None)

    assert [pieces.take() for _ in range(3)] == [{0}, {2}, frozenset()]


def test_small_partitions_travel_together() -> None:
    """Small partitions are sent together, in one bucket."""
    pieces = Pieces(layout(16, w=1600))
    pieces.put("w", None)

    assert pieces.take() == frozenset(range(16))


def test_a_wrong_name_and_a_second_gradient_are_refused() -> None:
    """An unknown name, with the nearest known one, and a second gradient are refused and change nothing."""
    pieces = Pieces(layout(2, weight=10, bias=10))
    with pytest.raises(NotFoundError, match="did you mean 'weight'"):
        pieces.put("weigth", None)
    with pytest.raises(NotFoundError, match="no parameter '0'"):
        pieces.put(0, None)  # type: ignore[arg-type]  # a user may take it for an index
    pieces.put("weight", 1)
    with pytest.raises(RequestError, match="already"):
        pieces.put("weight", 2)

    assert pieces.grads == {"weight": 1}


class Late(threading.Thread):
    """A thread that runs only once it is joined."""

    def start(self) -> None:
        """Do nothing yet."""

    def join(self, timeout: float | None = None) -> None:
        """Run now."""
        self.run()


def filled(push: PushStream, gradient: Any) -> Pushed:
    """Push one gradient; return the result of the push."""
    with push:
        push.put("w", gradient)
    return push.result


def test_what_is_put_at_the_end_of_a_block_is_sent() -> None:
    """A gradient put just before the end of a block is sent, even if the sending thread runs only then."""
    node = Node("async")
    push = PushStream(lambda call, _=None: drive(call, node), deadline, opened(node))
    push._thread = Late(target=push._send)

    assert filled(push, GRAD["w"]).state == "applied"
    assert [[p.partition for p in frame.parts] for frame in node.pushes] == [[0]]


async def test_what_is_put_without_giving_the_event_loop_its_turn_is_sent() -> None:
    """The gradients of a block that awaits nothing are sent at its end."""
    node = Node("async")

    async def run(call: Call[Any]) -> Any:
        return drive(call, node)

    async with AsyncPushStream(run, deadline, opened(node)) as push:
        push.put("w", GRAD["w"])

    assert push.result.state == "applied"
    assert len(node.pushes) == 1


async def test_what_another_thread_puts_is_sent_while_the_event_loop_has_nothing_else_to_do() -> None:
    """Gradients may be computed, and put, in a thread: each put wakes the event loop, which sends it."""
    node, sent, me = Node("async"), threading.Event(), threading.get_ident()

    class OfLoop(asyncio.Event):
        def set(self) -> None:
            assert threading.get_ident() == me, "the event loop is not woken"
            super().set()

    async def run(call: Call[Any]) -> Any:
        done = drive(call, node)
        if node.pushes:
            sent.set()
        return done

    def backward() -> bool:
        push.put("w", GRAD["w"])
        return sent.wait(10.0)

    push = AsyncPushStream(run, deadline, opened(node))
    push._more = OfLoop()
    async with push:
        assert await asyncio.to_thread(backward)


def test_who_is_interrupted_at_the_end_of_a_block_can_push_on() -> None:
    """An interrupt at the end of a block leaves no push in doubt, which would block pushes after 64 others."""
    node, now = Node("async"), Now()
    session = opened(node)

    def interrupted() -> None:
        raise KeyboardInterrupt

    push = PushStream(lambda call, _=None: drive(call, node, now), lambda: Deadline.after(30.0, now), session)
    push._thread = Late(target=interrupted)
    with pytest.raises(KeyboardInterrupt):
        filled(push, GRAD["w"])

    for _ in range(limits.WINDOW + 1):
        drive(session.push(GRAD, Deadline.after(30.0, now)), node, now)


@pytest.mark.parametrize("own", [ZeroDivisionError, asyncio.CancelledError])
async def test_what_a_block_raises_itself_is_what_it_ends_with(own: type[BaseException]) -> None:
    """On asyncio a block ends with the error or cancellation raised in it, not with the outcome of its pieces."""
    node = Node("async")

    async def run(call: Call[Any]) -> Any:
        return drive(call, node)

    async def fail() -> None:
        async with AsyncPushStream(run, deadline, opened(node)) as push:
            push.put("w", np.ones(5))
            assert push._task is not None
            await asyncio.wait([push._task])  # the push is refused: 'w' has another shape
            raise own

    with pytest.raises(own):
        await fail()


async def test_who_is_cancelled_waits_for_no_shard() -> None:
    """A cancelled block ends at once: it gives up the piece in flight and waits for no shard."""
    node, silent = Node("async"), asyncio.Event()

    async def run(call: Call[Any]) -> Any:
        if push._task is asyncio.current_task():
            silent.set()
            await asyncio.Event().wait()
        return drive(call, node)

    push = AsyncPushStream(run, deadline, opened(node))

    async def block() -> None:
        async with push:
            push.put("w", GRAD["w"])
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    async with asyncio.timeout(10):
        await silent.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_a_stream_is_one_push() -> None:
    """Gradients before or after the block of a stream are refused, and so is a second block.

    They would be lost, and a second block would never give its number back.
    """
    node = Node("async")
    push = PushStream(lambda call, _=None: drive(call, node), deadline, opened(node))
    with pytest.raises(ConflictError, match="has not begun"):
        push.put("w", GRAD["w"])
    filled(push, GRAD["w"])

    with pytest.raises(ConflictError, match="has ended"):
        push.put("w", GRAD["w"])
    with pytest.raises(ConflictError, match="started already"):
        push.__enter__()
    assert len(node.pushes) == 1


def test_a_stream_that_can_have_no_thread_gives_its_number_back() -> None:
    """A stream whose thread cannot start gives its number back, or 64 others would block the next push."""
    node, now = Node("async"), Now()
    session = opened(node)

    class None_(Late):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    for _ in range(limits.WINDOW + 1):
        push = PushStream(lambda call, _=None: drive(call, node, now), lambda: Deadline.after(30.0, now), session)
        push._thread = None_()
        with pytest.raises(RuntimeError):
            push.__enter__()
    drive(session.push(GRAD, Deadline.after(30.0, now)), node, now)


def test_who_is_interrupted_while_a_stream_begins_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """When an interrupt follows the start of a stream's thread, the thread ends although no block is entered."""
    node = Node("async")
    push = PushStream(lambda call, _=None: drive(call, node), deadline, opened(node))
    start = push._thread.start

    def interrupted() -> None:
        start()
        raise KeyboardInterrupt

    monkeypatch.setattr(push._thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), push:
        pass

    push._thread.join(20.0)
    assert not push._thread.is_alive()


def test_a_stream_that_nobody_ends_is_taken_back_with_its_last_reference() -> None:
    """If an interrupt comes before a block is entered or ended, its thread ends, and the worker takes the push back."""
    node, now = Node("sync"), Now()
    session = opened(node)
    push = PushStream(lambda call, _=None: drive(call, node), deadline, session)
    push.__enter__()
    push.put("w", GRAD["w"])
    thread = push._thread
    eventually(lambda: node.pushes)

    del push
    thread.join(20.0)
    assert not thread.is_alive()
    until = Deadline.after(30.0, now)
    assert drive(Iterations(session).step(GRAD, {}, until, until), node, now).state == "staged"
    assert [frame.epoch for frame in node.pushes] == [1, 2]


class TwoLayers(Node):
    """A node with two parameters, each its own partition; once it has got `after` pushes, others fail with `fails`."""

    def __init__(self, fails: PsError, after: int, mode: str = "async") -> None:
        super().__init__(mode)
        params = {"a": {"shape": [4]}, "b": {"shape": [4]}}
        self.spec = ModelSpec.parse({"name": "m", "params": params, "partitions": 2})
        self.fails, self.after = fails, after

    def __call__(self, request: Request) -> Outcome:
        if request.path == "/push" and len(self.pushes) == self.after:
            return self.fails
        outcome = super().__call__(request)
        if request.path == "/push":
            parts = [(p.partition, 1, 1, 0) for p in self.pushes[-1].parts]
            state = "staged" if self.mode == "sync" else "applied"
            reply = PushReply(state, False, 1, 0, 1, self.timeline, parts)
            return Response(200, {"content-type": MEDIA_TYPE}, encode_header(reply))
        return outcome

    def document(self) -> dict[str, Any]:
        return super().document() | {"partitions": [{"index": i, "shard": "a"} for i in (0, 1)]}


@pytest.mark.parametrize(
    ("code", "after", "raised"),
    [
        ("unreachable", 0, Unreachable),
        ("unreachable", 1, InDoubt),
        ("non_finite", 0, RequestError),
        ("non_finite", 1, InDoubt),
        ("in_doubt", 1, InDoubt),
    ],
)
def test_a_push_of_which_a_piece_was_accepted_is_in_doubt(code: str, after: int, raised: type[PsError]) -> None:
    """Once a piece was accepted a failed push is in doubt, even if the next piece arrived nowhere or was refused.

    Sent in another push, the accepted piece would count twice.
    """
    node = TwoLayers(problem(code, "it says no"), after)
    session = opened(node)
    stream = Stream(session)
    now = Now()
    drive(stream.open(Deadline.after(5.0, now)), node, now)

    def sent(*names: str) -> None:
        for name in names:
            stream.put(name, np.ones(4, np.float32))
            drive(stream.send(Deadline.after(5.0, now)), node, now)

    with pytest.raises(PsError) as met:
        sent("a", "b")

    assert type(met.value) is raised
    assert met.value.members.get("refused") == (code if raised is InDoubt and code == "non_finite" else None)
    assert met.value.members.get("partitions") == ([0] if raised is InDoubt else None)
    assert len(node.pushes) == after


def test_a_push_of_which_a_piece_was_applied_is_not_reported_as_dropped() -> None:
    """If the lease is lost after a piece was applied, the push is in doubt: `dropped` says that none of it counts."""
    node = TwoLayers(problem("fenced", "the lease expired", epoch=1), 1)
    stream = Stream(opened(node))
    drive(stream.open(deadline()), node)
    stream.put("a", np.ones(4, np.float32))
    drive(stream.send(deadline()), node)
    stream.put("b", np.ones(4, np.float32))

    with pytest.raises(InDoubt, match="applied"):
        drive(stream.send(deadline()), node)


@pytest.mark.parametrize(("began", "joins"), [("sync", 1), ("async", 2)])
def test_a_worker_joins_again_only_if_a_piece_of_a_dropped_push_may_be_staged(began: str, joins: int) -> None:
    """What a push had staged in sync is gone with its timeline, so the worker keeps its epoch and its ranges of data.

    If the push began before the model became synchronous, a piece of it may have been carried into the new timeline.
    """
    node = TwoLayers(problem("rolled_back", "the model went back", timeline=1, clock=0), 1, began)
    session = opened(node)
    stream = Stream(session)
    drive(stream.open(deadline()), node)
    node.mode = "sync"
    for name in ("a", "b"):
        stream.put(name, GRAD["w"])
        drive(stream.send(deadline()), node)
    assert stream.close().state == "dropped"

    node.after, node.timeline = 99, 1
    both = {name: GRAD["w"] for name in ("a", "b")}
    assert drive(Iterations(session).step(both, {}, deadline(), None), node).state == "staged"
    assert len(node.bodies("/models/m/workers")) == joins
    assert not session.numbers.any_in_doubt()


def test_a_push_that_a_rollback_drops_leaves_no_number_in_doubt() -> None:
    """A push dropped by a rollback leaves no number in doubt, which would block all pushes after 63 more."""
    node, session = joined("async")
    node.script["/push"] = [no("rolled_back", timeline=1, clock=0)]

    assert filled(PushStream(lambda call, _=None: drive(call, node), deadline, session), GRAD["w"]).state == "dropped"
    for _ in range(limits.WINDOW + 1):
        assert drive(session.push(GRAD, Deadline.after(0.0)), node).state == "applied"


class Foreign:
    """An array of another library, as a torch tensor."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.array, dtype, copy=copy)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", [PushStream, AsyncPushStream])
async def test_a_stream_keeps_no_gradient_beyond_its_block(kind: Any, fails: bool) -> None:
    """What was put is free when the block has ended, even if the stream is referred to until the next one begins."""
    node, gradient = Node("async"), np.ones(4, np.float32)
    held = weakref.ref(gradient)

    async def run(call: Call[Any]) -> Any:
        return drive(call, node)

    push = kind(run if kind is AsyncPushStream else lambda call, _=None: drive(call, node), deadline, opened(node))
    with contextlib.suppress(ZeroDivisionError):
        async with contextlib.AsyncExitStack() as block:
            await block.enter_async_context(push) if kind is AsyncPushStream else block.enter_context(push)
            push.put("w", gradient)
            del gradient
            if fails:
                raise ZeroDivisionError

    if kind is PushStream:
        push._thread.join(20.0)
    assert held() is None


def test_a_gradient_whose_put_the_end_of_the_block_overtakes_is_refused() -> None:
    """A block may end while another thread's gradient is fetched for it: too late to be sent, it is not taken."""
    node = TwoLayers(problem("unreachable", "cannot reach it"), 99)
    push = PushStream(lambda call, _=None: drive(call, node), deadline, opened(node))

    class Slow(Foreign):
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
            push.__exit__(None)
            return super().__array__(dtype, copy)

    push.__enter__()
    push.put("a", GRAD["w"])
    with pytest.raises(ConflictError, match="has ended"):
        push.put("b", Slow(GRAD["w"]))
    assert [p.partition for frame in node.pushes for p in frame.parts] == [0]


@pytest.mark.parametrize("kind", [np.asarray, Foreign])
def test_a_gradient_that_is_not_contiguous_is_copied_once(kind: Any) -> None:
    """A gradient is made contiguous as it is put, not again and again for each piece of it that is sent."""
    node = TwoLayers(problem("unreachable", "cannot reach it"), 99)
    node.spec = ModelSpec.parse({"name": "m", "params": {"w": {"shape": [1024, 2048]}}, "partitions": 2})
    sent: list[Request] = []

    def answer(request: Request) -> Outcome:
        sent.append(request)
        return node(request)

    push = PushStream(lambda call, _=None: drive(call, answer), deadline, opened(node))
    filled(push, kind(np.arange(2 << 20, dtype=np.float32).reshape(2048, 1024).T))

    pieces = [np.frombuffer(piece, np.float32) for request in sent for piece in request.rest]
    assert [p.nbytes for p in pieces] == [BUCKET_BYTES] * 2
    first, second = (p.__array_interface__["data"][0] for p in pieces)
    assert second - first == BUCKET_BYTES


def test_a_gradient_is_checked_as_if_it_were_pushed_whole() -> None:
    """Masked elements and a wrong shape are refused, though an array without dimensions is like one of one element."""
    node, session = joined("async")
    for wrong, said in ((np.ma.masked_equal(np.arange(4.0), 0), "masked"), (np.array(1.0), r"shape \[\]")):
        with pytest.raises(RequestError, match=said):
            filled(PushStream(lambda call, _=None: drive(call, node), deadline, session), wrong)
