"""`/push`, `/pull` and `/pushpull` by frame, which the SDK sends directly to the owner of each partition.

Values are sent in chunks of at most one HTTP/2 frame, directly from the immutable version, so a pull never blocks a
push.  A client on this machine names a shared-memory slot instead of sending a body, and gets a lease instead of
values.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from paramserver.core.ranges import RangeArray, elements
from paramserver.core.shard.effects import PartVersion, PullDone, PulledPart, PushDone
from paramserver.core.shard.events import PullReceived, PushReceived
from paramserver.errors import PsError, StaleMapError, problem
from paramserver.limits import BODY_BYTES_MAX, WAIT_S_MAX
from paramserver.types import F32, ITEMSIZE, ModelKey
from paramserver.wire.frame import Lease, PullFrame, PullReply, PullSpec, PushFrame, PushReply, encode_header
from paramserver.wire.tensor import from_f32
from paramserver_node.http2 import FRAME_BYTES
from paramserver_shard.arriving import Arriving, check_sizes, may_forward
from paramserver_shard.buffers import SMALL_BYTES
from paramserver_shard.clocks import ClockReports
from paramserver_shard.directory import Directory, KnownModel
from paramserver_shard.exchange import Exchange, GotPart, WantedPart, slices
from paramserver_shard.lending import Lending
from paramserver_shard.models import Models
from paramserver_shard.names import after_push
from paramserver_shard.receiving import Body
from paramserver_shard.runtime import Runtime


class FrameService:
    """Pushes and pulls whose client names partitions, or ranges of them."""

    def __init__(
        self,
        directory: Directory,
        models: Models,
        runtime: Runtime,
        exchange: Exchange,
        clocks: ClockReports,
        lending: Lending | None,
    ) -> None:
        self._directory = directory
        self._models = models
        self._runtime = runtime
        self._exchange = exchange
        self._clocks = clocks
        self._lending = lending

    async def prepare_push(self, frame: PushFrame) -> tuple[Arriving, Body]:
        """Return the push that a header announces, and where its body is received.  Raises PsError."""
        self._release(frame)
        known = await self._models.find(frame.model, frame.generation)
        sizes = self._part_bytes(known, frame)  # first: checks that the partitions exist
        all_local = self._all_local(known, [p.partition for p in frame.parts])
        arriving = Arriving(known, frame, all_local, sizes, self._runtime)
        return arriving, Body(arriving.sizes if frame.slot is None else (), arriving.check, arriving.unpacked_bytes)

    def _release(self, frame: PushFrame | PullFrame) -> None:
        """End the leases that a client says are over: first of all, because it says so once, even if it is refused."""
        if self._lending is not None:
            self._lending.release(frame.release)

    def _part_bytes(self, known: KnownModel, frame: PushFrame) -> list[int]:
        """Return the transmitted bytes of each part.  Raises RequestError if one does not fit the model."""
        counts = [self._elements(known, p.partition, p.ranges) for p in frame.parts]
        codec = frame.codec
        if codec is not None:
            check_sizes(codec, frame.sizes, counts)
            return [stored for stored, _ in frame.sizes]
        return [count * ITEMSIZE[frame.dtype] for count in counts]

    async def push(self, arriving: Arriving, accepted: Callable[[PushDone], None]) -> tuple[PushDone, PullDone | None]:
        """Apply a push whose body is complete, or in its slot, and call `accepted` with the outcome.

        Also returns the commit's values, if the push ended its worker's iteration and the worker may go on; else None.
        """
        frame = arriving.frame
        if frame.slot is None:
            return await self._push_and_wait(arriving, accepted)
        if self._lending is None:
            raise problem("slot_gone", "this shard lends no shared memory", hint="send a body instead")
        slot = self._lending.begin_push(frame.slot, arriving.size)
        reusable = False
        try:
            arriving.take(slot)
            done, commit_values = await self._push_and_wait(arriving, accepted)
            reusable = done.state == "applied" or commit_values is not None
        except PsError as error:
            # The client may reuse the slot only if the push was refused for good, not if it is pending or accepted.
            reusable = error.status < 500 and "push" not in error.members
            raise
        finally:
            self._lending.finish_push(frame.slot, reusable=reusable, mapped=frame.slot_mapped)
        return done, commit_values

    async def _push_and_wait(
        self, arriving: Arriving, accepted: Callable[[PushDone], None]
    ) -> tuple[PushDone, PullDone | None]:
        """Push; if that ends an iteration, report the clock in the worker's place and wait for its commit."""
        done = await self._push(arriving)
        accepted(done)
        frame, key = arriving.frame, done.model
        push_id, clock, indices = arriving.push_id, frame.clock, tuple([p.partition for p in frame.parts])
        if frame.ends is None or push_id is None or clock is None or done.state != "staged" or not arriving.all_local:
            return done, None
        served = self._runtime.core.find_model(key)
        if served is None or not served.has_staged(indices, push_id.worker, push_id.epoch, clock):
            return done, None
        shards, wait_s = frame.ends
        self._clocks.report(key, push_id, clock + 1, done.timeline, shards)
        try:
            commit_values = await self._runtime.pull(
                PullReceived(
                    key.name,
                    indices,
                    generation=key.generation,
                    timeline=done.timeline,
                    min_clock=clock + 1,
                    wait_s=wait_s,
                )
            )
        except PsError as error:
            if error.code == "version_not_reached":
                return done, None
            raise after_push(error, done) from error
        # The worker has to ask the scheduler if the commit left the push out, if the model is past that commit already,
        # or if the scheduler has something to tell.
        return done, commit_values if served.may_continue(indices, push_id.worker, push_id.epoch, clock) else None

    async def _push(self, arriving: Arriving) -> PushDone:
        known, frame = arriving.known, arriving.frame
        parts = await arriving.parts()
        command = PushReceived(
            frame.model,
            parts,
            generation=known.key.generation,
            timeline=frame.timeline,
            push_id=arriving.push_id,
            key=frame.key,
            clock=frame.clock,
            weight=frame.weight,
            norm=frame.norm,
            ack=frame.ack,
        )
        if not arriving.may_forward:
            return await self._runtime.push(command)
        # Sent by a client without a map to any shard: this one splits it among the owners.
        bad = [p.partition for p in parts if not p.finite]
        if bad:
            raise problem("non_finite", f"the gradient holds NaN or infinity in partition {bad[0]}")
        if frame.slot is not None:
            # Copied, because the client gets the slot back if one owner refuses, while another may still hold its part.
            command = replace(command, parts=tuple([replace(p, data=p.data.copy()) for p in parts]))
        return await self._exchange.push(known, command)

    async def pull(self, frame: PullFrame, make_room: Callable[[int], None]) -> "FrameBody":
        """Return the values that a pull frame asks for.  Raises PsError.

        `make_room` may refuse values of other shards, see `Exchange.pull`.  This shard's own are not copied, but the
        memory of their versions, which pushes may replace meanwhile, is kept until the answer is sent.
        """
        self._release(frame)
        known = await self._models.find(frame.model, frame.generation)
        forward = may_forward(frame)
        self._check_pull(known, frame, forward=forward)
        return await self._pull(known, frame, make_room, timeline=frame.timeline, forward=forward)

    async def pushpull(
        self,
        arriving: Arriving,
        check_answer: Callable[[int], None],
        accepted: Callable[[PushDone], None],
        make_room: Callable[[int], None],
    ) -> "FrameBody":
        """Push, then pull what the frame asks for; no values if the awaited commit did not come.

        `check_answer` is called with the bytes of the values, unless they can be lent, and may refuse them: before the
        push, which would have been accepted otherwise.  `accepted` is as in `push`, `make_room` as in `pull`.
        """
        known, frame = arriving.known, arriving.frame
        if frame.pull is None:
            raise problem("malformed", "frame header: a pushpull carries what to pull")
        forward = may_forward(frame)
        values_bytes = self._check_pull(known, frame.pull, forward=forward)
        if frame.ends is not None and {p for p, _ in frame.pull.parts} - {p.partition for p in frame.parts}:
            raise problem(
                "malformed", "frame header: a push that ends an iteration may pull only the partitions it pushes"
            )
        if forward or self._lending is None or not _may_lend(frame.pull) or not self._lending.has_room(values_bytes):
            check_answer(values_bytes)
        done, commit_values = await self.push(arriving, accepted)
        if commit_values is not None:
            answer = self._body(known, frame.pull, commit_values)
        elif frame.ends is not None:
            answer = FrameBody(known, frame.pull.dtype, done.timeline, ())
        else:
            try:
                answer = await self._pull(known, frame.pull, make_room, timeline=frame.timeline, forward=forward)
            except PsError as error:
                raise after_push(error, done) from error
        answer.push = push_reply(done, commit_values)
        return answer

    async def _pull(
        self,
        known: KnownModel,
        spec: PullSpec,
        make_room: Callable[[int], None],
        *,
        timeline: int | None,
        forward: bool,
    ) -> "FrameBody":
        """Pull what `spec` asks for; `forward`: from its owners, if it is other shards'."""
        indices = tuple([p for p, _ in spec.parts])
        wait_s = min(max(spec.wait_s, 0.0), WAIT_S_MAX)
        if not forward or self._all_local(known, indices):
            event = PullReceived(
                known.key.name,
                indices,
                generation=known.key.generation,
                timeline=timeline,
                min_version=spec.min_version,
                min_clock=spec.min_clock,
                wait_s=wait_s,
            )
            clock = asyncio.get_running_loop().time
            began_s = clock()
            try:
                return self._body(known, spec, await self._runtime.pull(event, [ranges for _, ranges in spec.parts]))
            except StaleMapError:  # a partition has moved since it was looked up, perhaps while the pull waited
                if not forward:
                    raise
            known = await self._models.find(known.key.name, known.key.generation)
            self._check_pull(known, spec, forward=forward)
            wait_s = max(0.0, wait_s - (clock() - began_s))
        wanted = [WantedPart(p, ranges) for p, ranges in spec.parts]
        fetched = await self._exchange.pull(
            known,
            wanted,
            timeline=timeline,
            min_version=spec.min_version,
            min_clock=spec.min_clock,
            wait_s=wait_s,
            make_room=make_room,
        )
        parts = [fetched[p] for p in indices]
        # The lowest: a gradient computed from these values belongs to no later timeline.
        return FrameBody(known, spec.dtype, min(p.timeline for p in parts), parts)

    def _body(self, known: KnownModel, spec: PullSpec, done: PullDone) -> "FrameBody":
        """Build the answer from these values, lending them if possible."""
        by_index = {p.partition: p for p in done.parts}
        parts = []
        for index, ranges in spec.parts:
            got = by_index[index]
            parts.append(GotPart(index, got.version, got.incarnation, done.timeline, slices(got.state.values, ranges)))
        answer = FrameBody(known, spec.dtype, done.timeline, parts)
        if _may_lend(spec):
            answer.lease = self._lease(known.key, [(p.partition, p.version) for p in parts], answer.pieces)
        return answer

    def lease_after(self, frame: PushFrame, done: PushDone, commit_values: PullDone | None) -> Lease | None:
        """Lease the values that a push has produced, if its client asked for that and they are still current."""
        if not frame.mapped or (done.state != "applied" and commit_values is None):
            return None
        return self._lease(done.model, [(p.partition, p.version) for p in (commit_values or done).parts])

    def _lease(
        self, model: ModelKey, parts: Sequence[tuple[int, int]], values: Sequence[F32] | None = None
    ) -> Lease | None:
        """Lease the values of these (partition, version); if superseded, lease `values` or return None."""
        if self._lending is None:
            return None
        current = self._runtime.core.present(model, parts)
        if current is None and values is None:
            return None
        return self._lending.lease(current or values or (), current=current is not None)

    def _check_pull(self, known: KnownModel, spec: PullSpec, *, forward: bool) -> int:
        """Check what `spec` asks for, as `_pull` takes it, and return its bytes.  Raises RequestError."""
        counts = [(p, self._elements(known, p, ranges)) for p, ranges in spec.parts]
        if not spec.parts:
            raise problem("malformed", "frame header: the pull names no partition")
        if forward:
            others = ITEMSIZE["float32"] * sum([n for p, n in counts if known.owners[p][0] != self._directory.shard])
            if others > BODY_BYTES_MAX:
                raise problem(
                    "too_large",
                    f"{others} bytes of it are other shards', of which this one collects at most {BODY_BYTES_MAX}",
                    hint="ask their owners, or ask for fewer partitions at once",
                )
        return ITEMSIZE[spec.dtype] * sum([n for _, n in counts])

    def _elements(self, known: KnownModel, partition: int, ranges: RangeArray | None) -> int:
        """Return the elements of a part.  Raises RequestError (`invalid_range`) if it is not within the model."""
        if not 0 <= partition < known.spec.partitions:
            raise problem("invalid_range", f"model '{known.key.name}' has no partition {partition}")
        size = known.layout.partition_size(partition)
        if ranges is None:
            return size
        if ranges[-1, 1] > size:  # the frame decoder made sure they are sorted and disjoint
            outside = tuple(ranges[-1].tolist())
            raise problem("invalid_range", f"partition {partition} has {size} elements; {outside} lies outside")
        return elements(ranges)

    def _all_local(self, known: KnownModel, partitions: Iterable[int]) -> bool:
        return all([known.owners[p][0] == self._directory.shard for p in partitions])


def _may_lend(spec: PullSpec) -> bool:
    """Return whether the values may be lent instead of sent."""
    return spec.mapped and spec.dtype == "float32" and all(ranges is None for _, ranges in spec.parts)


def push_reply(done: PushDone, commit_values: PullDone | None = None, lease: Lease | None = None) -> PushReply:
    """Build the answer to a push; `commit_values` is what its commit produced, if it waited for one."""
    now = commit_values or done
    parts: Sequence[PulledPart | PartVersion] = now.parts
    pairs = zip(parts, done.parts, strict=True)  # `commit_values` was pulled in the order of the push
    return PushReply(
        state=done.state,
        duplicate=done.duplicate,
        version=now.version,
        durable_version=done.durable_version,
        incarnation=now.incarnation,
        timeline=done.timeline,
        parts=tuple([(p.partition, p.version, p.incarnation, pushed.durable_version) for p, pushed in pairs]),
        late=done.late,
        lease=lease,
        released=commit_values is not None,
    )


class FrameBody:
    """A pull's answer: its header, and its values in chunks."""

    def __init__(self, known: KnownModel, dtype: str, timeline: int, parts: Sequence[GotPart]) -> None:
        self.push: PushReply | None = None
        self._known = known
        self._dtype = dtype
        self._timeline = timeline
        self.parts = parts
        self.pieces = [piece for part in parts for piece in part.pieces]
        """The values of all parts, in order."""
        self.values_bytes: Final = ITEMSIZE[dtype] * sum([piece.size for piece in self.pieces])
        """Bytes of the values, sent or lent."""
        self.lease: Lease | None = None
        """If set, the values are lent instead of sent."""

    @property
    def model(self) -> ModelKey:
        """The model whose values these are."""
        return self._known.key

    def header(self) -> bytes:
        """Encode the frame up to its body."""
        reply = PullReply(
            model=self._known.key.name,
            generation=self._known.key.generation,
            timeline=self._timeline,
            version=min([p.version for p in self.parts], default=0),
            incarnation=max([p.incarnation for p in self.parts], default=0),
            dtype=self._dtype,
            parts=tuple([(p.partition, p.version, p.incarnation) for p in self.parts]),
            push=self.push,
            lease=self.lease,
        )
        return encode_header(reply)

    def take(self) -> bytes:
        """Return the whole frame, and forget the values, so that this keeps no version of them in memory."""
        whole = b"".join(self.chunks(self.header()))
        self.parts, self.pieces = (), []
        return whole

    @property
    def zero_copy(self) -> bool:
        """Whether the chunks are views of the stored values, without conversion."""
        return self._dtype == "float32"

    @property
    def body_bytes(self) -> int:
        """Bytes of the body; 0 if the values are lent."""
        return 0 if self.lease is not None else self.values_bytes

    def chunks(self, first: bytes) -> Iterator[bytes | memoryview]:
        """Yield `first` and the body in chunks of at most one frame: views of the values, small ones joined."""
        waiting: list[bytes | memoryview] = [first]
        size = len(first)
        step = FRAME_BYTES // ITEMSIZE[self._dtype]
        for piece in () if self.lease is not None else self.pieces:
            for at in range(0, piece.size, step):
                data = _bytes(piece[at : at + step], self._dtype)
                if size and (size >= SMALL_BYTES or len(data) >= SMALL_BYTES):
                    yield b"".join(waiting)
                    waiting, size = [], 0
                if len(data) >= SMALL_BYTES:
                    yield data
                else:
                    waiting.append(data)
                    size += len(data)
        if size:
            yield b"".join(waiting)


def _bytes(values: F32, dtype: str) -> memoryview:
    return from_f32(values, dtype).data.cast("B")
