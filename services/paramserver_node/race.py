"""Work that is given up when something else ends first: the client hangs up, the node stops."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from paramserver.errors import problem

T = TypeVar("T")


async def race(work: Coroutine[Any, Any, T], end: Coroutine[Any, Any, object]) -> tuple[T] | None:
    """What `work` gives, alone in a tuple, or raises; None when `end` is over before, however it ended.

    Both are over when this returns, or is cancelled.
    """
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        return (working.result(),) if working.done() else None
    finally:
        working.cancel()
        ending.cancel()
        await asyncio.gather(working, ending, return_exceptions=True)


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives; raises Unavailable when the client, whose body has been read, hangs up before."""
    found = await race(work, hung_up(receive))
    if found is None:
        raise problem("unavailable", "the client has gone")
    return found[0]


async def hung_up(receive: Receive) -> None:
    """Returns when the client, whose body has been read, hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass
