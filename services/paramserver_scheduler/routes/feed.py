"""/map and /events: notification of changes, by long poll or server-sent events."""

import asyncio

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from paramserver import limits
from paramserver.core.scheduler import io
from paramserver_node import negotiate
from paramserver_node.queries import takes_query
from paramserver_node.race import while_there
from paramserver_node.roles import role
from paramserver_scheduler import answers
from paramserver_scheduler.hub import PING, Feed, Published
from paramserver_scheduler.requests import number_of, respond, response_doc, service
from paramserver_scheduler.runtime import Answer, Runtime

router = APIRouter(tags=["feed"])


@router.get("/map", responses=response_doc(200, "The map", answers.Map))
@role("reader")
@takes_query("since", "wait_s")
async def get_map(request: Request) -> Response:
    """Return the shards with their addresses, and the map epoch.

    With `?since=EPOCH` the answer waits until the map is newer than that epoch, at most `?wait_s=` seconds (default
    30); after that it is the current map.
    """
    negotiate.check_accept(request)
    s = service(request)
    since = number_of(request, "since", 0)
    wait_s = number_of(request, "wait_s", 30, 0, int(limits.WAIT_S_MAX))
    if "since" in request.query_params:

        async def newer() -> None:
            while s.read.map()["map_epoch"] <= since and not s.runtime.hub.closed:
                await s.runtime.hub.next_change()

        try:
            with s.runtime.hub.polling():
                async with asyncio.timeout(wait_s):
                    await while_there(request.receive, newer())
        except TimeoutError:
            pass
    return respond(request, s.read.map())


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses=response_doc(200, "Server-sent events: map, model, roster, commit, gone"),
)
@role("reader")
async def events(request: Request) -> StreamingResponse:
    """Stream the whole state once, then each change, as server-sent events.

    Event types are `map`, `model`, `roster`, `commit` and `gone` (a deleted model). Events are level-triggered: a
    client that reconnects, at any time, gets the whole state again and has missed nothing.
    """
    runtime = service(request).runtime
    runtime.hub.check_capacity()  # before the whole state is collected for it
    feed = await open_feed(runtime, public=True)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(feed.events(), media_type="text/event-stream", headers=headers)


async def open_feed(
    runtime: Runtime, shard: str | None = None, epoch: int | None = None, *, public: bool = False
) -> Feed:
    """Open a feed that begins with the whole state and misses no change.

    Raises FencedError if the shard is dead, Unavailable (`too_many_requests`) if too many `public` ones are open.
    """
    state, read = runtime.hub.state, runtime.core.read
    # All shards ask at once when leaders change.  (A new term, which a shard demands, need not have been published.)
    if state is not None and state[0].document["term"] == read.term:
        if shard is not None:
            read.check_shard(shard, epoch or 0)
        return runtime.hub.subscribe(state, public=public)
    opened: list[Feed] = []

    def subscribe(answer: Answer) -> None:
        assert answer.body is not None
        # The ping marks the end of the initial state.
        first = [*map(Published, answer.body["documents"]), PING]
        opened.append(runtime.hub.subscribe(first, public=public))

    await runtime.ask(lambda n: io.OpenFeed(n, shard, epoch), on_reply=subscribe)
    return opened[0]
