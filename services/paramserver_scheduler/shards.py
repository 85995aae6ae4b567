"""The scheduler's requests to shards: read whole partitions for a checkpoint, set them for a restore or from files."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from time import monotonic
from typing import Final, TypeVar

import httpx
from msgspec.structs import replace

from paramserver.core.partition_state import PartitionState
from paramserver.errors import ConflictError, PsError, StaleMapError, Unavailable, first_cause, problem
from paramserver.net.credentials import Credentials
from paramserver.types import AnyArray, ModelKey
from paramserver.wire.frame import MEDIA_TYPE, chunks, decode_header, encode_header
from paramserver.wire.state import SetFrame, StateFrame, restore_frame
from paramserver_scheduler.http_client import check, http_client

PATIENCE_S: Final = 30.0
"""How long requests are retried for a partition whose owner is being replaced."""
RETRY_S: Final = 0.5
PARALLEL: Final = 4
"""Partitions in flight at once."""

T = TypeVar("T")

Owner = Callable[[int], str]
"""Returns the base URL of a partition's current owner; raises Unavailable while there is none."""
Place = Callable[[int], tuple[int, int]]
"""Returns (the model's timeline, a partition's owner token or 0): what is set there is gone once these change."""


class ShardClient:
    """Transfers whole partitions from and to their current owners."""

    def __init__(self, credentials: Credentials, term: Callable[[], int]) -> None:
        """`term` returns the leader term, without which nothing is set: shards refuse what a deposed leader sends."""
        self._http = http_client(credentials)
        self._term = term

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def states(
        self, model: ModelKey, partitions: int, owner: Owner, cut: int | None
    ) -> list[tuple[StateFrame, PartitionState]]:
        """Return the state of every partition by index: that of the cut at clock `cut`, or the current one if None.

        Raises the PsError of a shard, or Unavailable if an owner does not answer for `PATIENCE_S`.
        """
        params = {} if cut is None else {"cut": cut}

        async def fetch(index: int) -> tuple[StateFrame, PartitionState]:
            url = f"{owner(index)}/internal/state/{model.name}/{index}"
            response = await self._http.get(url, params=params)
            check(response)
            frame, offset = decode_header(response.content, StateFrame)
            if (frame.generation, frame.partition) != (model.generation, index):
                raise problem("model_replaced", f"model '{model.name}' was deleted and created again")
            return frame, frame.read(memoryview(response.content)[offset:])

        return await _each(range(partitions), fetch)

    async def restore(
        self,
        model: ModelKey,
        states: Sequence[tuple[PartitionState, int]],
        names: tuple[str, ...],
        owner: Owner,
        place: Place,
    ) -> Mapping[int, tuple[int, int]]:
        """Set each partition to its state, at its version or above; staged and buffered contributions are dropped.

        `names`: of the optimizer's arrays in the states.

        A shard refuses the state if it knows of a newer leader or another timeline.  What a death undoes meanwhile is
        set again: in sync it sets all partitions back.  Returns each partition's place when it was set.  Raises like
        `states`; some partitions may then have been set.
        """
        sent: dict[int, tuple[int, int]] = {}

        async def send(index: int) -> None:
            at = place(index)
            state, version = states[index]
            frame, arrays = restore_frame(model.name, model.generation, index, state, names, version, at[0])
            await self._set(owner(index), frame, arrays)
            sent[index] = at

        left, deadline = list(range(len(states))), monotonic() + PATIENCE_S
        while left:
            await _each(left, send)
            left = [i for i in sent if sent[i] != place(i)]
            if left and monotonic() > deadline:
                raise problem("unavailable", f"owners of model '{model.name}' are lost again and again")
        return sent

    async def assign(self, frames: Mapping[int, tuple[SetFrame, Sequence[AnyArray]]], owner: Owner) -> None:
        """Send each assignment to the owner of its partition; raises like `states`."""

        async def send(index: int) -> None:
            await self._set(owner(index), *frames[index])

        await _each(frames, send)

    async def _set(self, url: str, frame: SetFrame, arrays: Sequence[AnyArray]) -> None:
        prefix = encode_header(replace(frame, term=self._term()))
        size = len(prefix) + sum(a.nbytes for a in arrays)
        headers = {"content-type": MEDIA_TYPE, "content-length": str(size)}
        response = await self._http.post(
            f"{url}/internal/set/{frame.model}", content=_chunks(prefix, arrays), headers=headers
        )
        check(response)


async def _each(indices: Iterable[int], work: Callable[[int], Awaitable[T]]) -> list[T]:
    """Return the results of `work` for each index; a few run at once, each retried while its owner is replaced."""
    gate = asyncio.Semaphore(PARALLEL)

    async def one(index: int) -> T:
        async with gate:
            deadline = monotonic() + PATIENCE_S
            while True:
                try:
                    return await work(index)
                except (httpx.HTTPError, httpx.InvalidURL, Unavailable, StaleMapError) as e:
                    if monotonic() > deadline:
                        raise _as_problem(e) from e
                except ConflictError as e:
                    if e.code != "rolled_back" or monotonic() > deadline:
                        raise
                await asyncio.sleep(RETRY_S)

    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(i)) for i in indices]
    except* PsError as errors:
        raise first_cause(errors) from None
    return [t.result() for t in tasks]


def _as_problem(error: Exception) -> PsError:
    if isinstance(error, PsError) and not isinstance(error, StaleMapError):
        return error
    return problem("unavailable", f"a shard does not answer: {str(error) or type(error).__name__}")


async def _chunks(prefix: bytes, arrays: Sequence[AnyArray]) -> AsyncIterator[bytes]:
    for chunk in chunks(prefix, arrays):
        yield chunk
