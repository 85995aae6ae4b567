"""Work that is cancelled when something else ends first: the client disconnects, or the node stops."""

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, TypeVar

from paramserver.errors import problem

if TYPE_CHECKING:  # the supervisor runs without a web framework
    from starlette.types import Receive

T = TypeVar("T")


async def race(work: Awaitable[T], end: Awaitable[object]) -> tuple[T] | None:
    """Return the result of `work` in a tuple, or raise its error; None if `end` is done first, however it ended.

    Both are done when this returns or is cancelled.
    """
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        return (working.result(),) if working.done() else None
    finally:
        working.cancel()
        ending.cancel()
        await asyncio.gather(working, ending, return_exceptions=True)


async def while_there(receive: "Receive", work: Awaitable[T]) -> T:
    """Return the result of `work`; raises Unavailable if the client, whose body has been read, disconnects first."""
    found = await race(work, hung_up(receive))
    if found is None:
        raise problem("unavailable", "the client disconnected")
    return found[0]


async def hung_up(receive: "Receive") -> None:
    """Wait until the client, whose body has been read, disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
