"""Sends a request's parts to the shards that own them, including this one, and merges the answers.

Parts of another shard are forwarded once, as a marked frame.  If an owner has changed (421), the refused parts are sent
once more after the map has been refreshed; then the answer is 503.  An owner that has applied a push may also have lost
its partition while the push waited to be durable: without an id or a key that push is not sent again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar, cast

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from paramserver.codecs.codec import Codec
from paramserver.core.ranges import RangeArray, elements
from paramserver.core.shard.effects import PartVersion, PushDone
from paramserver.core.shard.events import AssignPart, PullReceived, PushPart, PushReceived, SetReceived
from paramserver.errors import PsError, StaleMapError, problem
from paramserver.net.calls import Deadline
from paramserver.net.retry import may_be_done
from paramserver.types import F32, ITEMSIZE, AnyArray, PushState
from paramserver.wire.frame import PullFrame, PullReply, PushFrame, PushReply
from paramserver.wire.frame import PushPart as FramePart
from paramserver.wire.state import SetFrame, SetPart
from paramserver.wire.tensor import slice_crc
from paramserver_shard.buffers import INLINE_BYTES_MAX
from paramserver_shard.directory import Directory, KnownModel
from paramserver_shard.peers import PeerClient
from paramserver_shard.runtime import Runtime

MAP_REFRESH_S: Final = 1.0
"""How long refused parts wait for a newer map before the second attempt."""
_COUNTS_TWICE: Final = "the push was applied and may be lost: look first; sent again without an id it may count twice"
_UNDER_ITS_ID: Final = "under its id or key, send it again; without one look first: it may count twice"


class WantedPart(Struct, frozen=True):
    """What a pull requests of one partition."""

    partition: int
    ranges: RangeArray | None
    """Relative to the partition; None: all of it."""


class GotPart(Struct, frozen=True):
    """The values pulled from one partition."""

    partition: int
    version: int
    incarnation: int
    timeline: int
    """That of the model when they were taken: while a pull waits, another one may begin."""
    pieces: tuple[F32, ...]
    """The requested elements, end to end; read-only by convention."""
    collected: bool = False
    """They came from another shard, and their bytes are in flight (`make_room`)."""


Part = TypeVar("Part", PushPart, WantedPart, AssignPart)
Answer = TypeVar("Answer")


class Exchange:
    """Sends parts of pushes, pulls and assignments to their owners."""

    def __init__(self, directory: Directory, runtime: Runtime, peers: PeerClient) -> None:
        self._directory = directory
        self._runtime = runtime
        self._peers = peers

    async def push(self, known: KnownModel, command: PushReceived) -> PushDone:
        """Apply a checked push on every owner.  Not atomic across shards: see semantics 2."""
        repeatable = command.push_id is not None or command.key is not None

        async def local(now: KnownModel, parts: Sequence[PushPart]) -> PushDone:
            # If this shard loses a partition while it computes, it answers 421 and the parts are sent to the new owner,
            # so their memory must not be consumed here.
            parts = [replace(p, exclusive_buffer=False) for p in parts]
            if repeatable:
                parts = [p if p.crc else with_checksum(p, now.layout.partition_size(p.partition)) for p in parts]
            return await self._runtime.push(replace(command, parts=tuple(parts)))

        async def remote(now: KnownModel, shard: str, parts: Sequence[PushPart]) -> PushDone:
            coding = parts[0].dtype
            encoded, ident = coding not in ITEMSIZE, command.push_id
            frame = PushFrame(
                model=command.model,
                generation=now.key.generation,
                timeline=command.timeline,
                worker=ident.worker if ident else None,
                epoch=ident.epoch if ident else None,
                seq=ident.seq if ident else None,
                key=command.key,
                clock=command.clock,
                parts=[FramePart(p.partition, p.base, p.ranges) for p in parts],
                dtype="float32" if encoded else coding,
                weight=command.weight,
                norm=command.norm,
                ack=command.ack,
                forwarded=True,
                encoding=Codec(coding).text if encoded else None,
                sizes=[(p.data.nbytes, p.data.nbytes) for p in parts] if encoded else (),
            )
            address = self._directory.address(shard)
            return push_done(now, await self._peers.push(address, "/push", frame, [p.data for p in parts]))

        done = await self._spread(known, command.parts, local, remote, _accepted_partitions, repeatable=repeatable)
        return merged_push(known, done)

    async def pull(
        self,
        known: KnownModel,
        wanted: Sequence[WantedPart],
        *,
        timeline: int | None = None,
        min_version: int = 0,
        min_clock: int = 0,
        wait_s: float = 0.0,
        make_room: Callable[[int], None] = lambda _: None,
    ) -> dict[int, GotPart]:
        """Return the current values of these partitions, by partition index.

        Both attempts together wait at most `wait_s`.  `make_room` is called with the bytes of those of other shards,
        shard by shard, before they take memory; it may refuse them.
        """
        waiting = Deadline.after(wait_s, asyncio.get_running_loop().time)

        async def local(now: KnownModel, parts: Sequence[WantedPart]) -> list[GotPart]:
            indices = tuple(p.partition for p in parts)
            done = await self._runtime.pull(
                PullReceived(
                    now.key.name,
                    indices,
                    generation=now.key.generation,
                    timeline=timeline,
                    min_version=min_version,
                    min_clock=min_clock,
                    wait_s=waiting.left_s(),
                ),
                [p.ranges for p in parts],
            )
            return [
                GotPart(of.partition, of.version, of.incarnation, done.timeline, slices(of.state.values, want.ranges))
                for want, of in zip(parts, done.parts, strict=True)
            ]

        async def remote(now: KnownModel, shard: str, parts: Sequence[WantedPart]) -> list[GotPart]:
            frame = PullFrame(
                model=now.key.name,
                parts=[(p.partition, p.ranges) for p in parts],
                generation=now.key.generation,
                timeline=timeline,
                min_version=min_version,
                min_clock=min_clock,
                wait_s=waiting.left_s(),
                forwarded=True,
            )
            size = 4 * sum(
                now.layout.partition_size(p.partition) if p.ranges is None else elements(p.ranges) for p in parts
            )
            reply, body = await self._peers.pull(self._directory.address(shard), frame, size, make_room)
            return _got(now, parts, reply, body)

        answers = await self._spread(known, wanted, local, remote)
        return {part.partition: part for answer in answers for part in answer}

    async def assign(self, known: KnownModel, command: SetReceived) -> PushDone:
        """Assign values on every owner."""

        async def local(_: KnownModel, parts: Sequence[AssignPart]) -> PushDone:
            return await self._runtime.push(replace(command, parts=tuple(parts)))

        async def remote(now: KnownModel, shard: str, parts: Sequence[AssignPart]) -> PushDone:
            set_parts = tuple(SetPart(p.partition, p.data.size, p.ranges, p.dtype, expected=p.expected) for p in parts)
            frame = SetFrame(command.model, now.key.generation, set_parts, first=command.first)
            address, path = self._directory.address(shard), f"/internal/set/{command.model}"
            return push_done(now, await self._peers.push(address, path, frame, [p.data for p in parts]))

        done = await self._spread(known, command.parts, local, remote, _accepted_partitions)
        return merged_push(known, done)

    async def _spread(
        self,
        known: KnownModel,
        parts: Sequence[Part],
        local: Callable[[KnownModel, Sequence[Part]], Awaitable[Answer]],
        remote: Callable[[KnownModel, str, Sequence[Part]], Awaitable[Answer]],
        accepted: Callable[[Answer], Sequence[int]] = lambda _: (),
        *,
        repeatable: bool = True,
    ) -> list[Answer]:
        """Collect the answers of all owners; parts refused with 421 are sent once more, by the newer map.

        Unless `repeatable`, those that may have been done are not: the error is `in_doubt`.
        `accepted` returns the partitions that an answer has changed for good; if another owner fails, the error lists
        them.
        """
        answers: list[Answer] = []

        def done() -> list[int]:
            return sorted(p for answer in answers for p in accepted(answer))

        for attempt in (1, 2):
            groups: dict[str, list[Part]] = {}
            for part in parts:
                groups.setdefault(known.owners[part.partition][0], []).append(part)
            results = await asyncio.gather(
                *(
                    local(known, group) if shard == self._directory.shard else remote(known, shard, group)
                    for shard, group in groups.items()
                ),
                return_exceptions=True,
            )
            refused: list[Part] = []
            errors: list[BaseException] = []
            for group, result in zip(groups.values(), results, strict=True):
                if isinstance(result, StaleMapError) and may_be_done(result) and not repeatable:
                    errors.append(problem("in_doubt", result.detail, hint=_COUNTS_TWICE, **result.members))
                elif isinstance(result, StaleMapError):
                    refused += group
                elif isinstance(result, BaseException):
                    errors.append(result)
                else:
                    answers.append(result)
            if errors:
                raise with_partial_progress(most_severe(errors), done())
            if not refused:
                return answers
            parts = refused
            if attempt == 1:
                known = await self._directory.newer(known, MAP_REFRESH_S)
        moving = problem("unavailable", "partitions are moving between shards and have no reachable owner yet")
        raise with_partial_progress(moving, done())


def most_severe(errors: Sequence[BaseException]) -> BaseException:
    """Pick the error to report: unexpected ones first, then in doubt, then not retryable, then the rest."""

    def order(error: BaseException) -> int:
        if not isinstance(error, PsError):
            return 0
        if may_be_done(error):
            return 1
        return 3 if error.retryable else 2

    return min(errors, key=order)


def with_partial_progress(error: BaseException, accepted: Sequence[int]) -> BaseException:
    """Add to an error the partitions that have already applied or staged their part.

    A retryable error becomes `in_doubt` then: the request may be sent again only under its id.
    """
    if not accepted or not isinstance(error, PsError):
        return error
    code, hint = error.code, error.hint
    if error.retryable:
        code, hint = "in_doubt", hint if hint == _COUNTS_TWICE else _UNDER_ITS_ID
    detail = f"{error.detail}; partitions {list(accepted)} have already applied or staged it"
    members = {**error.members, "partitions": list(accepted)}
    return problem(code, detail, hint=hint, errors=error.errors, **members)


def _accepted_partitions(done: PushDone) -> Sequence[int]:
    return [p.partition for p in done.parts]


def with_checksum(part: PushPart, size: int) -> PushPart:
    """Return the part with the checksum of its slice, which shows whether a repeated push id is the same push."""
    ranges = ((0, size),) if part.ranges is None else part.ranges
    return replace(part, crc=slice_crc(part.dtype, ranges, part.data))


def push_done(known: KnownModel, reply: PushReply) -> PushDone:
    """Convert another shard's reply into an outcome."""
    return PushDone(
        known.key,
        reply.timeline,
        cast(PushState, reply.state),
        reply.duplicate,
        tuple(PartVersion(*part) for part in reply.parts),
        reply.late,
    )


def merged_push(known: KnownModel, done: Sequence[PushDone]) -> PushDone:
    """Merge the outcomes of all owners into one for the whole push."""
    if len(done) == 1:
        return done[0]
    return PushDone(
        known.key,
        max(d.timeline for d in done),
        next((d.state for d in done if d.state != "applied"), "applied"),
        all(d.duplicate for d in done),
        tuple(part for d in done for part in d.parts),
        any(d.late for d in done),
    )


def slices(values: F32, ranges: RangeArray | None) -> tuple[F32, ...]:
    """Return the elements of the ranges, end to end: views, or a copy of little; None is one range of all elements."""
    if ranges is None:
        return (values,)
    if len(ranges) > 1 and (count := elements(ranges)) * values.itemsize <= INLINE_BYTES_MAX:
        sizes = ranges[:, 1] - ranges[:, 0]
        return (values.take(np.arange(count) + (ranges[:, 0] - sizes.cumsum() + sizes).repeat(sizes)),)
    return tuple([values[a:b] for a, b in ranges.tolist()])


def _got(known: KnownModel, parts: Sequence[WantedPart], reply: PullReply, body: AnyArray) -> list[GotPart]:
    values = body.view(np.float32)
    out: list[GotPart] = []
    at = 0
    for want, (partition, version, incarnation) in zip(parts, reply.parts, strict=True):
        size = known.layout.partition_size(partition) if want.ranges is None else elements(want.ranges)
        out.append(GotPart(partition, version, incarnation, reply.timeline, (values[at : at + size],), True))
        at += size
    return out
