"""Requests as binary frames, and the sinks that their answers are read into.

One request to a shard covers all the partitions it owns that the call touches.  A push's body is sent in place from the
caller's arrays, or copied once, straight from them; a pull's body goes chunk by chunk into the caller's vector.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from paramserver.client.cluster import ModelMap
from paramserver.client.encoding import Content, Encoded
from paramserver.client.gradients import Gradient, Scan
from paramserver.client.same_host import SLOT_BYTES_MIN, Leased, SameHost, Slot, is_same_host
from paramserver.core.layout import Layout
from paramserver.core.selection import Part
from paramserver.errors import PsError, problem
from paramserver.net.calls import Request, Response, foreign
from paramserver.types import ITEMSIZE, AnyArray, DType, PushId
from paramserver.wire.frame import (
    FRAME_HEADERS,
    MEDIA_TYPE,
    PullFrame,
    PullReply,
    PullSpec,
    PushFrame,
    PushPart,
    PushReply,
    decode_header,
    encode_header,
)
from paramserver.wire.incoming_pull import IncomingPull
from paramserver.wire.tensor import bf16_bits_to_f32


class OwnBase(dict[int, tuple[int, int]]):
    """The base that a session keeps of its pulls; a type of its own, because a caller's dict is none."""


class PushTerms(Struct, frozen=True):
    """Parameters of a push besides its values; the same for every shard and attempt, but see `Outgoing.go_on_in`."""

    push_id: PushId
    clock: int | None = None
    weight: float = 1.0
    ack: str | None = None
    timeline: int | None = None
    base: Any = None
    """partition -> (version, incarnation) of the values that the gradient was computed from, or None."""
    commit_wait_s: float | None = None
    """sync: seconds that the shards wait for the commit, if the push ends its worker's iteration; None: it does not."""
    generation: int | None = None
    """Which creation of the model the worker has joined; None: the sender has not joined."""


class PullTerms(Struct, frozen=True):
    """Parameters of a pull besides the partitions."""

    dtype: DType
    """Wire dtype of the values."""
    min_version: int
    timeline: int | None
    whole: bool
    """Whether the whole model is pulled; shards on this machine may then lend the values instead of sending them."""
    min_clock: int
    """sync: number of commits that the values must include."""


class Outgoing:
    """The frames of one push, one per route; the norm is known once all have been written."""

    def __init__(
        self, gradient: Content, terms: PushTerms, same_host: SameHost, *, mapped: bool = False, piece: bool = False
    ) -> None:
        """`mapped`: ask shards on this machine to lend the values that the push makes, as they will be pulled next.

        `piece`: the gradient is only a part of what is pushed, so its norm is not sent.
        """
        self._mapped = mapped
        self._commit_wait_s = terms.commit_wait_s
        self._gradient, self._terms, self._same_host = gradient, terms, same_host
        self._piece = piece
        self._norm = gradient.norm if isinstance(gradient, Encoded) else None
        self._is_finite = isinstance(gradient, Encoded)
        """Whether all of the gradient is known to be finite."""
        self.selection: Final = gradient.selection
        self.memory: Final = gradient.memory if isinstance(gradient, Gradient) else None
        """The gradient's memory, if slots can be mapped over it; else None."""

    def slot_bytes(self, to: str | None, parts: Sequence[Part]) -> int:
        """Return the size of the slot to write these parts into; 0 if they are to be sent over the connection."""
        size = self._gradient.body_bytes(parts) if is_same_host(to) else 0
        return size if SLOT_BYTES_MIN <= size else 0

    def slot_holding(self, to: str, parts: Sequence[Part]) -> Slot | None:
        """Return the slot of that shard in which these parts already are, if any."""
        return None if self.memory is None else self.memory.slot(to, parts)

    def requests(
        self,
        model_map: ModelMap,
        groups: Sequence[tuple[str | None, Sequence[Part]]],
        slots: Mapping[str | None, Slot],
        pull: DType | None,
        *,
        more: bool = False,
    ) -> list[Request]:
        """Return one request for each (address, parts); raises RequestError (`non_finite`) before any is sent.

        `more`: other parts follow once these are done; then the push does not end the iteration, as no shard would know
        when it has all of it.
        With `pull`, a wire dtype, they are pushpulls of the whole model, whose sinks are added later.
        A gradient for a single shard is not always scanned, because that shard refuses NaN as a whole: see `explain`.
        """
        clips = self._clips(model_map)
        alone = len(groups) == 1 and not more
        scan = Scan(exact=clips, scan_unconverted=clips or not alone)
        drafts: list[tuple[str | None, PushFrame, bytes, AnyArray | None, Sequence[memoryview]]] = []
        # Only one complete attempt may end the iteration: parts of two attempts cannot be added up to one push.
        commit_wait_s, self._commit_wait_s = self._commit_wait_s, None
        # Nor does a part that one shard forwards to another, while the others would wait for its report.
        forwarded = len(groups) > 1 and any([to is None for to, _ in groups])
        ends = None if commit_wait_s is None or forwarded or more else (len(groups), commit_wait_s)
        for to, parts in groups:
            slot = slots.get(to)
            header = self._frame(model_map, to, parts, pull, ends, slot)
            size = self._gradient.body_bytes(parts)
            if slot is not None:
                # A gradient already in its slot is only scanned, or written onto itself where `views` cannot scan it.
                if not slot.mapped or (scan.scan_unconverted and self._gradient.views(parts, scan) is None):
                    self._gradient.write(parts, slot.memory[:size].data, scan)
            prefix, body = encode_header(header), None
            views = None if slot is not None else self._gradient.views(parts, scan)
            if slot is None and views is None:
                body = np.empty(len(prefix) + size, np.uint8)
                self._gradient.write(parts, body.data[len(prefix) :], scan)
            drafts.append((to, header, prefix, body, views or ()))
        scan.raise_for_bad()
        if (clips and self._norm is None) or (more and not self._is_finite):
            self._scan_others([part.partition for _, parts in groups for part in parts], scan)
            scan.raise_for_bad()
            self._is_finite = True
            if clips:
                self._norm = scan.norm
        path = "/pushpull" if pull is not None else "/push"
        out: list[Request] = []
        for to, header, prefix, body, rest in drafts:
            if clips:
                prefix, placeholder = encode_header(replace(header, norm=self._norm)), prefix
                assert len(prefix) == len(placeholder), "a float has the same length whatever its value"
            if body is not None:
                body[: len(prefix)] = np.frombuffer(prefix, np.uint8)
            out.append(Request("POST", path, prefix if body is None else body.data, FRAME_HEADERS, to, rest=rest))
        return out

    def _clips(self, model_map: ModelMap) -> bool:
        return model_map.spec.optimizer.clip_norm is not None and not self._piece

    def _scan_others(self, sent: Sequence[int], scan: Scan) -> None:
        """Scan all parts except those partitions: what other shards have accepted already, or what is sent later."""
        for part in self._gradient.selection.parts:
            if part.partition not in sent:
                self._gradient.write([part], np.empty(self._gradient.body_bytes([part]), np.uint8).data, scan)

    def go_on_in(self, rolled_back: PsError) -> None:
        """Send what is not accepted yet under the timeline and for the clock that this error names."""
        members = rolled_back.members
        self._terms = replace(self._terms, timeline=int(members["timeline"]), clock=int(members["clock"]))

    def may_add_norm(self, refused: PsError) -> bool:
        """Whether a shard lacks the norm because the map is older than the model's `clip_norm`."""
        return lacks_norm(refused) and not self._piece

    def explain(self, refused: PsError) -> None:
        """If a shard refused the push for NaN or infinity, raise RequestError (`non_finite`) naming the parameters."""
        if refused.code == "non_finite" and isinstance(self._gradient, Gradient):
            scan = Scan()
            self._gradient.find_bad(scan)
            scan.raise_for_bad()

    def _frame(
        self,
        model_map: ModelMap,
        to: str | None,
        parts: Sequence[Part],
        pull: DType | None,
        ends: tuple[int, float] | None,
        slot: Slot | None,
    ) -> PushFrame:
        base, ident = self._terms.base or {}, self._terms.push_id
        return PushFrame(
            model=model_map.name,
            generation=model_map.generation,
            map_epoch=model_map.map_epoch if to is not None else None,
            timeline=self._terms.timeline,
            worker=ident.worker,
            epoch=ident.epoch,
            seq=ident.seq,
            clock=self._terms.clock,
            parts=[PushPart(p.partition, base.get(p.partition), p.ranges) for p in parts],
            dtype=self._gradient.dtype,
            weight=self._terms.weight,
            norm=0.0 if self._clips(model_map) else None,  # placeholder until the norm is known
            ack=self._terms.ack,
            pull=None
            if pull is None
            else PullSpec([(p.partition, p.ranges) for p in parts], dtype=pull, mapped=_mapped(to, pull)),
            encoding=self._gradient.codec.text if isinstance(self._gradient, Encoded) else None,
            sizes=self._gradient.sizes(parts) if isinstance(self._gradient, Encoded) else (),
            release=self._same_host.take_ended(to),
            slot=None if slot is None else slot.file,
            slot_mapped=slot is not None and slot.mapped,
            mapped=self._mapped and is_same_host(to),
            ends=ends,
        )


def lacks_norm(refused: PsError) -> bool:
    """Whether a shard has refused a push because the model clips by norm and the push carries none."""
    return refused.code == "invalid_field" and refused.members.get("where") == "norm"


def _mapped(to: str | None, dtype: DType) -> bool:
    """Whether that shard may lend the values of the whole model instead of sending them."""
    return dtype == "float32" and is_same_host(to)


def pull_request(
    model_map: ModelMap,
    to: str | None,
    parts: Sequence[Part],
    terms: PullTerms,
    wait_s: float,
    sink: "Incoming",
    same_host: SameHost,
) -> Request:
    """Return one pull request, to one shard or, if `to` is None, to the URLs the client was given."""
    frame = PullFrame(
        model=model_map.name,
        generation=model_map.generation,
        map_epoch=model_map.map_epoch if to is not None else None,
        timeline=terms.timeline,
        parts=[(p.partition, p.ranges) for p in parts],
        min_version=terms.min_version,
        min_clock=terms.min_clock,
        wait_s=wait_s,
        dtype=terms.dtype,
        mapped=terms.whole and _mapped(to, terms.dtype),
        release=same_host.take_ended(to),
    )
    return Request("POST", "/pull", encode_header(frame), FRAME_HEADERS, to, sink)


def push_reply(response: Response) -> PushReply:
    """Return the reply in a 2xx response to a push; raises PsError if it is something else."""
    try:
        if MEDIA_TYPE in response.headers.get("content-type", ""):
            return decode_header(response.body, PushReply)[0]
    except PsError as e:
        raise foreign(response) from e
    raise foreign(response)


def in_sink(response: Response) -> None:
    """Read nothing of a 2xx response whose body is in a sink; raises PsError unless it is 200: sinks take no other."""
    if response.status != 200:
        raise foreign(response)


def leased_by(reply: PushReply | PullReply | None, to: str | None, layout: Layout) -> Leased | None:
    """Return the lease (whole partitions, float32) that came with an answer of the shard at `to`, if any."""
    if reply is None or reply.lease is None or to is None or len(reply.lease[1]) != len(reply.parts):
        return None
    number, files = reply.lease
    partitions = [p for p, *_ in reply.parts]
    sizes = [ITEMSIZE["float32"] * layout.partition_size(p) for p in partitions]
    return Leased(to, number, tuple(zip(partitions, files, sizes, strict=True)))


class Incoming(IncomingPull):
    """The sink of one pull: the body goes into the caller's packed vector."""

    def __init__(self, parts: Sequence[Part], flat: AnyArray, dtype: DType) -> None:
        self._parts = {p.partition: p for p in parts}
        self._flat, self._dtype = flat, dtype
        super().__init__()

    def begin(self) -> None:
        """Discard an earlier attempt."""
        super().begin()
        self._wide: list[tuple[AnyArray, AnyArray]] = []

    def end(self) -> None:
        """Check that the answer is complete; widen bfloat16."""
        super().end()
        for bits, out in self._wide:
            bf16_bits_to_f32(bits, out)

    def _places_for(self, reply: PullReply) -> list[memoryview]:
        if not reply.parts and reply.push is not None:
            return []  # the commit did not come in time: the push is accepted, and the values are pulled later
        if reply.dtype != self._dtype or sorted([p[0] for p in reply.parts]) != sorted(self._parts):
            raise problem("in_doubt", "the answer to a pull is not what was requested")
        if reply.lease is not None:
            if len(reply.lease[1]) != len(reply.parts):
                raise problem("in_doubt", "the answer to a pull leases something other than what was requested")
            return []
        places: list[memoryview] = []
        for partition, _version, _incarnation in reply.parts:
            part = self._parts[partition]
            out = self._flat[part.start : part.stop]
            if self._dtype == "bfloat16":
                bits = np.empty(out.size, np.uint16)
                self._wide.append((bits, out))
                out = bits
            if out.size:
                places.append(out.data.cast("B"))
        assert ITEMSIZE[self._dtype] * sum(p.stop - p.start for p in self._parts.values()) == sum(map(len, places))
        return places
