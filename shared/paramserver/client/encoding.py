"""Gradients encoded with a codec (docs/codecs.md), and error feedback for the lossy ones."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import hypot, isfinite
from typing import Final, TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from paramserver.client.gradients import VIEW_BYTES_MIN, Gradient, Grads, Scan, prepare
from paramserver.client.rows import Rows, ids_of
from paramserver.codecs.codec import Codec
from paramserver.core.layout import Layout
from paramserver.core.selection import Part, Ranges, Selection, listed
from paramserver.errors import problem
from paramserver.types import F32, AnyArray, DType, DTypeLike


class Feedback:
    """Error feedback of a worker: the residual that int8 and topk left out of its pushes so far, for each partition.

    It is added to the next push, which removes it from here (see `Draft`): of several pushes in flight only one sends
    it.  Uses twice the model's size in float32, and more for each concurrent push.  Safe between threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = 0
        self._residuals: dict[int, F32] = {}
        self._buffers: dict[int, F32] = {}

    def take(self, generation: int, partition: int, size: int) -> tuple[F32 | None, F32]:
        """Remove and return (the partition's residual, if any; a buffer for the residual of the new push)."""
        with self._lock:
            if generation > self._generation:
                self._generation, self._residuals, self._buffers = generation, {}, {}
            ours = generation == self._generation
            residual = self._residuals.pop(partition, None) if ours else None
            buffer = self._buffers.pop(partition, None) if ours else None
        return residual, np.empty(size, np.float32) if buffer is None else buffer

    def add(self, generation: int, partition: int, residual: F32, buffer: F32 | None) -> None:
        """Add to the partition's residual; `buffer` is one no longer in use, kept for reuse."""
        with self._lock:
            if generation != self._generation:
                return
            other = self._residuals.setdefault(partition, residual)
            if other is not residual:
                other += residual
                buffer = residual
            if buffer is not None:
                self._buffers[partition] = buffer


class Draft:
    """The residuals that one push has taken from a worker's feedback, and the new ones that it leaves.

    For each partition one of the two goes back to the feedback: the new one if the push was accepted there, the old one
    if it was not, or came too late to be applied.
    """

    def __init__(self, feedback: Feedback) -> None:
        self._feedback = feedback
        self._parts: dict[int, tuple[int, F32 | None, F32]] = {}
        self._encoder_parts: set[int] = set()
        self._kept: Callable[[Collection[int]], None] | None = None

    def __enter__(self) -> "Draft":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.keep()
        else:
            self.give_back()

    def arrays(self, generation: int, partition: int, size: int) -> tuple[F32 | None, F32]:
        """Return (the partition's residual so far, if any; where to write its new one), float32 of that size."""
        residual, new_residual = self._feedback.take(generation, partition, size)
        self._parts[partition] = (generation, residual, new_residual)
        return residual, new_residual

    def encoded(self, gradient: "Encoded") -> None:
        """Note that the push sends `gradient`: if its encoder keeps its own residuals, tell it what is accepted."""
        self._encoder_parts, self._kept = set(gradient.parts), gradient.kept

    def accepted(self, parts: Collection[int]) -> None:
        """Keep the new residuals of these partitions, where the push was accepted; it may still fail on others."""
        for partition in parts:
            if (taken := self._parts.pop(partition, None)) is not None:
                generation, residual, new_residual = taken
                self._feedback.add(generation, partition, new_residual, residual)
        encoder_parts = self._encoder_parts.intersection(parts)
        if encoder_parts and self._kept is not None:
            self._encoder_parts -= encoder_parts
            self._kept(encoder_parts)

    def keep(self) -> None:
        """Keep all new residuals: the push was accepted."""
        self.accepted([*self._parts, *self._encoder_parts])

    def give_back(self) -> None:
        """Put the old residuals back: the push was not accepted, or starts over."""
        for partition, (generation, residual, new_residual) in self._parts.items():
            if residual is not None:
                self._feedback.add(generation, partition, residual, new_residual)
        self._parts, self._encoder_parts, self._kept = {}, set(), None


def draft_for(feedback: Feedback | None) -> AbstractContextManager[Draft | None]:
    """Return the draft of one push, None without feedback; it is kept if the block succeeds, else given back."""
    return _NOTHING if feedback is None else Draft(feedback)


_NOTHING = nullcontext[None]()


class Encoded(Struct, frozen=True):
    """A gradient whose parts are already encoded."""

    selection: Selection
    codec: Codec
    parts: Mapping[int, tuple[AnyArray, int]]
    """partition -> (its bytes as sent, uint8; their number before the second stage)."""
    norm: float | None
    """2-norm of what the parts decode to."""
    generation: int
    """The model generation that it was made for."""
    kept: Callable[[Collection[int]], None] | None = None
    """Called with the partitions that accepted the push, each once; set by encoders that keep their own residuals."""

    @property
    def dtype(self) -> DType:
        """The dtype given in the frame, for readers that know no codecs."""
        return "float32"

    def sizes(self, parts: Sequence[Part]) -> list[tuple[int, int]]:
        """Return for each part its bytes in the body, and before the second stage."""
        return [(self.parts[p.partition][0].size, self.parts[p.partition][1]) for p in parts]

    def body_bytes(self, parts: Sequence[Part]) -> int:
        """Return the size, in bytes, of a body of these parts."""
        return sum(self.parts[p.partition][0].size for p in parts)

    def write(self, parts: Sequence[Part], body: memoryview, scan: Scan) -> None:
        """Copy the parts end to end into `body`."""
        out, at = np.frombuffer(body, np.uint8), 0
        for part in parts:
            data = self.parts[part.partition][0]
            out[at : at + data.size] = data
            at += data.size
        assert at == out.size

    def views(self, parts: Sequence[Part], scan: Scan) -> list[memoryview] | None:
        """Return the parts in place, without a copy; None if they are small."""
        if self.body_bytes(parts) < VIEW_BYTES_MIN * max(1, len(parts)):
            return None
        return [self.parts[p.partition][0].data for p in parts]


Content: TypeAlias = Gradient | Encoded
"""What a push carries."""


def apart_from(out: AnyArray, gradient: Content) -> Content:
    """Return the gradient, with what shares memory with `out` copied, be it an array or something made of one.

    Values arrive in `out` while some shard's part of the gradient may still have to be sent again.
    """
    if not isinstance(gradient, Gradient) or gradient.memory is not None:
        return gradient
    return replace(gradient, sources=tuple([s.copy() if np.may_share_memory(s, out) else s for s in gradient.sources]))


class Encoding(Struct, frozen=True):
    """Which elements of a gradient a push sends, and as what."""

    codec: Codec | None = None
    dtype: DTypeLike | None = None
    """Without a codec, the dtype that elements are sent in; None: float16 and bfloat16 as they are, else float32."""
    ranges: Ranges | None = None
    """Flat element ranges by name; the arrays of these parameters hold only these elements, end to end."""
    rows: Rows | None = None
    """Row numbers by name; the arrays of these parameters hold only these rows, which may be named more than once."""
    feedback: Feedback | None = None
    """A worker's, which lossy codecs need."""

    def of_call(
        self,
        *,
        codec: str | None = None,
        dtype: DTypeLike | None = None,
        ranges: Ranges | None = None,
        rows: Rows | None = None,
    ) -> "Encoding":
        """Return the encoding of one call: what it names, else the codec and feedback of this one.

        Raises RequestError (`unknown_codec`, `invalid_field`, `invalid_range`).
        """
        if codec is not None and dtype is not None:
            raise problem(
                "invalid_field", "dtype= and codec= exclude each other", hint='codec="fp16" is dtype="float16"'
            )
        named = None if codec is None else Codec.parse(codec)
        chosen = named or (self.codec if dtype is None else None)
        return Encoding(chosen, dtype, listed(None, ranges)[1] or None, ids_of(rows) or None, self.feedback)


NO_ENCODING: Final = Encoding()


def ready(
    layout: Layout,
    generation: int,
    grads: Grads,
    encoding: Encoding,
    draft: Draft | None,
    partitions: frozenset[int] | None = None,
) -> Content:
    """Return what a push of `grads` sends, elements of a dtype or encoded parts; limited to `partitions` if given.

    Raises what `gradients.prepare` does; RequestError (`invalid_encoding`) if a codec of whole partitions gets only a
    part of one, (`invalid_field`) if a lossy codec has no error feedback (`draft`), (`non_finite`).
    """
    if isinstance(grads, Encoded):
        if grads.generation != generation:
            detail = f"model '{layout.spec.name}' was deleted and created again"
            raise problem("model_replaced", detail, hint="pull again")
        if draft is not None:
            draft.encoded(grads)
        return grads
    codec, ranges, rows = encoding.codec, encoding.ranges, encoding.rows
    if codec is None:
        return prepare(layout, grads, ranges, encoding.dtype, partitions, rows)
    if codec.per_partition:
        if draft is None:
            hint = f'with model.worker() as w: w.push(..., codec="{codec.text}")'
            detail = f"codec {codec.text} is lossy and needs error feedback, which only a worker keeps"
            raise problem("invalid_field", detail, hint=hint)
        gradient = prepare(layout, grads, ranges, "float32", partitions, rows)
        return _whole(gradient, codec, generation, draft)
    gradient = prepare(layout, grads, ranges, codec.coding, partitions, rows)
    return gradient if codec.stage is None else _packed(gradient, codec, generation)


def _whole(gradient: Gradient, codec: Codec, generation: int, draft: Draft) -> Encoded:
    from paramserver.codecs.parts import encode_partition

    for part in gradient.selection.parts:
        if part.ranges is not None:
            detail = f"codec {codec.text} encodes whole partitions, but this push covers only a part of partition "
            hint = 'push every parameter, or use codec="fp16"'
            raise problem("invalid_encoding", f"{detail}{part.partition}", hint=hint)
    out: dict[int, tuple[AnyArray, int]] = {}
    norms: list[float] = []
    scan = Scan(exact=False)  # only to find NaN and infinity: the norm is that of the encoded values
    for part in gradient.selection.parts:
        values = in_place = _part_in_place(gradient, part)
        if values is None:
            values = np.empty(part.stop - part.start, np.float32)
            gradient.write([part], values.data.cast("B"), scan)
        if scan.bad and in_place is None:
            continue
        residual, new_residual = draft.arrays(generation, part.partition, values.size)
        data, norm = encode_partition(codec, values, residual, new_residual)
        if in_place is not None and not isfinite(norm) and not np.isfinite(values).all():
            scan.found_bad(gradient.selection.params[part.pieces[0].param].name)
        if scan.bad:
            continue
        norms.append(norm)
        out[part.partition] = stored(codec, data)
    scan.raise_for_bad()
    return Encoded(gradient.selection, codec, out, hypot(*norms), generation)


def _part_in_place(gradient: Gradient, part: Part) -> F32 | None:
    """Return the part in place if it is contiguous float32 in the caller's array (the encoder checks it), else None."""
    if len(part.pieces) != 1:
        return None
    piece = part.pieces[0]
    source = gradient.sources[piece.param]
    return source[piece.source : piece.source + piece.length] if source.dtype == np.float32 else None


def _packed(gradient: Gradient, codec: Codec, generation: int) -> Encoded:
    scan = Scan()
    out: dict[int, tuple[AnyArray, int]] = {}
    for part in gradient.selection.parts:
        data = np.empty(gradient.body_bytes([part]), np.uint8)
        gradient.write([part], data.data, scan)
        out[part.partition] = stored(codec, data)
    scan.raise_for_bad()
    return Encoded(gradient.selection, codec, out, scan.norm, generation)


def stored(codec: Codec, data: AnyArray) -> tuple[AnyArray, int]:
    """Return (a part's bytes as sent, their number before the second stage)."""
    if codec.stage is None:
        return data, data.size
    from paramserver.codecs.stage import pack

    return pack(codec.stage, data), data.size
