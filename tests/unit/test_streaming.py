"""Which parts of a push in pieces go out when."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from paramserver import limits
from paramserver.client.calls import Call, Deadline, Outcome, Request, Response
from paramserver.client.pushed import Pushed
from paramserver.client.streaming import BUCKET_BYTES, AsyncPushStream, Pieces, PushStream, Stream
from paramserver.core.layout import Layout
from paramserver.core.spec import ModelSpec
from paramserver.errors import ConflictError, InDoubt, NotFoundError, PsError, RequestError, Unreachable, problem
from paramserver.wire.frame import MEDIA_TYPE, PushReply, encode_header

from .sharding import Now, drive
from .test_client_session import GRAD, Node, deadline, no, opened


def layout(partitions: int, **sizes: int) -> Layout:
    """Of one-dimensional parameters."""
    params = {name: {"shape": [size]} for name, size in sizes.items()}
    return Layout(ModelSpec.parse({"name": "m", "params": params, "partitions": partitions}))


def test_a_partition_goes_out_when_all_of_it_is_here() -> None:
    """One that two parameters share waits for both; what lies whole in one parameter does not."""
    pieces = Pieces(layout(4, a=60, b=40))  # partition 2 is [48, 75) or so: the end of a and the beginning of b
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
    """Of all that is whole the lowest partitions are sent first, a bucket at a time."""
    elements = BUCKET_BYTES // 4
    pieces = Pieces(layout(3, first=elements, second=elements, third=elements))
    for name in ("third", "second"):
        pieces.put(name, None)
    assert pieces.take() == {1}
    pieces.put("first", None)

    assert [pieces.take() for _ in range(3)] == [{0}, {2}, frozenset()]


def test_small_partitions_travel_together() -> None:
    """Many of them make one bucket."""
    pieces = Pieces(layout(16, w=1600))
    pieces.put("w", None)

    assert pieces.take() == frozenset(range(16))


def test_a_wrong_name_and_a_second_gradient_are_refused() -> None:
    """With the nearest name there is; nothing is changed by it."""
    pieces = Pieces(layout(2, weight=10, bias=10))
    with pytest.raises(NotFoundError, match="did you mean 'weight'"):
        pieces.put("weigth", None)
    pieces.put("weight", 1)
    with pytest.raises(RequestError, match="already"):
        pieces.put("weight", 2)

    assert pieces.grads == {"weight": 1}


class Late(threading.Thread):
    """A thread that gets no time before somebody waits for it."""

    def start(self) -> None:
        """Later."""

    def join(self, timeout: float | None = None) -> None:
        """Now."""
        self.run()


def filled(push: PushStream, gradient: Any) -> Pushed:
    """What became of a push of one gradient."""
    with push:
        push.put("w", gradient)
    return push.result


def test_what_is_put_at_the_end_of_a_block_is_sent() -> None:
    """However late the thread that sends comes to it."""
    node = Node("async")
    push = PushStream(lambda call, _=None: drive(call, node), deadline, opened(node))
    push._thread = Late(target=push._send)

    assert filled(push, GRAD["w"]).state == "applied"
    assert [[p.partition for p in frame.parts] for frame in node.pushes] == [[0]]


@pytest.mark.asyncio
async def test_what_is_put_without_giving_the_event_loop_its_turn_is_sent() -> None:
    """A block that awaits nothing has all of it sent at its end."""
    node = Node("async")

    async def run(call: Call[Any]) -> Any:
        return drive(call, node)

    async with AsyncPushStream(run, deadline, opened(node)) as push:
        push.put("w", GRAD["w"])

    assert push.result.state == "applied"
    assert len(node.pushes) == 1


def test_who_is_interrupted_at_the_end_of_a_block_can_push_on() -> None:
    """The number of the push does not stay in doubt: after 64 others there would be no next one."""
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


@pytest.mark.asyncio
@pytest.mark.parametrize("own", [ZeroDivisionError, asyncio.CancelledError])
async def test_what_a_block_raises_itself_is_what_it_ends_with(own: type[BaseException]) -> None:
    """On asyncio as in threads: not what became of the pieces; a task that is cancelled is cancelled."""
    node = Node("async")

    async def run(call: Call[Any]) -> Any:
        return drive(call, node)

    async def fail() -> None:
        async with AsyncPushStream(run, deadline, opened(node)) as push:
            push.put("w", np.ones(5))
            assert push._task is not None
            await asyncio.wait([push._task])  # it is refused: 'w' has another shape
            raise own

    with pytest.raises(own):
        await fail()


@pytest.mark.asyncio
async def test_who_is_cancelled_waits_for_no_shard() -> None:
    """The piece under way is given up, as the block's other gradients are."""
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
    """What is put before its block or after it would be lost; a second block would never give its number back."""
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
    """After 64 others there would be no next push."""
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


def test_who_is_interrupted_while_a_stream_begins_leaves_no_thread() -> None:
    """The one that has just started ends, though no block follows."""
    node = Node("async")
    push = PushStream(lambda call, _=None: drive(call, node), deadline, opened(node))

    class Interrupted(threading.Thread):
        def start(self) -> None:
            super().start()
            raise KeyboardInterrupt

    push._thread = Interrupted(target=push._send, daemon=True)
    with pytest.raises(KeyboardInterrupt), push:
        pass

    push._thread.join(20.0)
    assert not push._thread.is_alive()


class TwoLayers(Node):
    """One of two parameters, each a partition of its own; what was pushed when `fails` came is never answered."""

    def __init__(self, fails: PsError, after: int) -> None:
        super().__init__("async")
        params = {"a": {"shape": [4]}, "b": {"shape": [4]}}
        self.spec = ModelSpec.parse({"name": "m", "params": params, "partitions": 2})
        self.fails, self.after = fails, after

    def __call__(self, request: Request) -> Outcome:
        if request.path == "/push" and len(self.pushes) == self.after:
            return self.fails
        outcome = super().__call__(request)
        if request.path == "/push":
            parts = [(p.partition, 1, 1, 0) for p in self.pushes[-1].parts]
            reply = PushReply("applied", False, 1, 0, 1, self.timeline, parts)
            return Response(200, {"content-type": MEDIA_TYPE}, encode_header(reply))
        return outcome

    def document(self) -> dict[str, Any]:
        return super().document() | {"partitions": [{"index": i, "shard": "a"} for i in (0, 1)]}


@pytest.mark.parametrize(("after", "raised"), [(0, Unreachable), (1, InDoubt)])
def test_a_push_of_which_a_piece_was_accepted_is_in_doubt(after: int, raised: type[PsError]) -> None:
    """Though it is certain that the next piece arrived nowhere: in another push the first one would count twice."""
    node = TwoLayers(problem("unreachable", "cannot reach it"), after)
    session = opened(node)
    stream = Stream(session, {})
    now = Now()
    drive(stream.open(Deadline.after(5.0, now)), node, now)

    def sent(*names: str) -> None:
        for name in names:
            stream.put(name, np.ones(4, np.float32))
            drive(stream.send(Deadline.after(5.0, now)), node, now)

    with pytest.raises(PsError) as met:
        sent("a", "b")

    assert type(met.value) is raised
    assert len(node.pushes) == after


def test_a_push_that_a_rollback_drops_leaves_no_number_in_doubt() -> None:
    """Or the worker could push nothing any more, 63 pushes later."""
    node = Node("async")
    session = opened(node)
    node.script["/push"] = [no("rolled_back", timeline=1, clock=0)]

    assert filled(PushStream(lambda call, _=None: drive(call, node), deadline, session), GRAD["w"]).state == "dropped"
    for _ in range(limits.WINDOW + 1):
        assert drive(session.push(GRAD, Deadline.after(0.0)), node).state == "applied"
