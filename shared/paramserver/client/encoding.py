"""Gradients in a codec (docs/codecs.md), and the memory of what a lossy codec left out of them."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import hypot, isfinite

import numpy as np
from msgspec import Struct

from paramserver.client.gradients import VIEW_BYTES_MIN, Content, Gradient, Grads, Scan, prepare, write
from paramserver.codecs.codec import Codec
from paramserver.core.layout import Layout
from paramserver.core.selection import Part, Ranges, Selection
from paramserver.errors import PsError, problem
from paramserver.types import F32, AnyArray, DType


class Feedback:
    """What int8 and topk have left out of a worker's pushes so far, partition by partition; it is added to the next.

    A push takes it out (see `Draft`), so of several under way at once only one sends it.  Takes twice the model's size
    in float32, and more for each push beside another.  Safe between threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = 0
        self._left: dict[int, F32] = {}
        self._spare: dict[int, F32] = {}

    def take(self, generation: int, partition: int, size: int) -> tuple[F32 | None, F32]:
        """(what was left out of that partition so far, which is forgotten here; memory for what is left out now)."""
        with self._lock:
            if generation > self._generation:
                self._generation, self._left, self._spare = generation, {}, {}
            ours = generation == self._generation
            left = self._left.pop(partition, None) if ours else None
            room = self._spare.pop(partition, None) if ours else None
        return left, np.empty(size, np.float32) if room is None else room

    def add(self, generation: int, partition: int, left: F32, room: F32 | None) -> None:
        """That much is left out of the partition; `room` is memory that nobody reads any more."""
        with self._lock:
            if generation != self._generation:
                return
            other = self._left.setdefault(partition, left)
            if other is not left:
                other += left
                room = left
            if room is not None:
                self._spare[partition] = room

    def norm(self) -> float:
        """2-norm of all that is left out."""
        with self._lock:
            return hypot(*(float(np.linalg.norm(a)) for a in self._left.values()))


class Draft:
    """What one push has taken out of a worker's memory, and what it leaves out itself.

    Either goes there in the end: what it leaves out where the push was accepted, what it took where it was not, or came
    too late to be applied.
    """

    def __init__(self, feedback: Feedback) -> None:
        self._feedback = feedback
        self._parts: dict[int, tuple[int, F32 | None, F32]] = {}
        self._theirs: set[int] = set()
        self._kept: Callable[[Collection[int]], None] | None = None

    def __enter__(self) -> "Draft":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.keep()
        else:
            self.give_back()

    def arrays(self, generation: int, partition: int, size: int) -> tuple[F32 | None, F32]:
        """(what was left out of that partition so far, where to write what is left out now), float32 of that size."""
        residual, left = self._feedback.take(generation, partition, size)
        self._parts[partition] = (generation, residual, left)
        return residual, left

    def encoded(self, gradient: "Encoded") -> None:
        """The push is of what an encoder with a memory of its own has made: that is told what was accepted."""
        self._theirs, self._kept = set(gradient.parts), gradient.kept

    def accepted(self, parts: Collection[int]) -> None:
        """The push was, on those partitions, whatever becomes of it on others."""
        for partition in parts:
            if (taken := self._parts.pop(partition, None)) is not None:
                generation, residual, left = taken
                self._feedback.add(generation, partition, left, residual)
        theirs = self._theirs.intersection(parts)
        if theirs and self._kept is not None:
            self._theirs -= theirs
            self._kept(theirs)

    def keep(self) -> None:
        """The push was accepted."""
        self.accepted([*self._parts, *self._theirs])

    def give_back(self) -> None:
        """It was not, or is begun anew."""
        for partition, (generation, residual, left) in self._parts.items():
            if residual is not None:
                self._feedback.add(generation, partition, residual, left)
        self._parts, self._theirs, self._kept = {}, set(), None


def drafted(feedback: Feedback | None) -> AbstractContextManager[Draft | None]:
    """The draft of one push, of a sender that remembers: kept if the block ends well, else given back."""
    return _NOTHING if feedback is None else Draft(feedback)


_NOTHING = nullcontext[None]()


class Encoded(Struct, frozen=True):
    """A gradient whose parts are encoded already."""

    selection: Selection
    codec: Codec
    parts: Mapping[int, tuple[AnyArray, int]]
    """partition -> (its bytes as they travel, uint8; their number before the second stage)."""
    norm: float | None
    """2-norm of what the parts decode to."""
    generation: int
    """The creation of the model that it fits."""
    kept: Callable[[Collection[int]], None] | None = None
    """Told of the partitions on which its push was accepted, of each once: of an encoder with a memory of its own."""

    @property
    def dtype(self) -> DType:
        """What a reader that knows no codecs is told."""
        return "float32"

    def sizes(self, parts: Sequence[Part]) -> list[tuple[int, int]]:
        """For each part its bytes in the body, and before the second stage."""
        return [(self.parts[p.partition][0].size, self.parts[p.partition][1]) for p in parts]

    def body_bytes(self, parts: Sequence[Part]) -> int:
        """Length of a body of these parts."""
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
        """The parts where they lie, if they are large."""
        if self.body_bytes(parts) < VIEW_BYTES_MIN * max(1, len(parts)):
            return None
        return [self.parts[p.partition][0].data for p in parts]


def ready(
    layout: Layout,
    generation: int,
    grads: Grads,
    ranges: Ranges | None,
    dtype: str | None,
    codec: Codec | None,
    draft: Draft | None,
    partitions: frozenset[int] | None = None,
) -> Content:
    """What a push sends of `grads`: elements of a dtype, or encoded parts; only of `partitions` where that is given.

    Raises what `gradients.prepare` does; RequestError (`invalid_encoding`) where a codec of whole partitions gets less,
    (`invalid_field`) where it has no memory of what it leaves out, (`non_finite`).
    """
    if isinstance(grads, Encoded):
        if grads.generation != generation:
            raise problem("model_replaced", f"model '{layout.spec.name}' was created anew meanwhile", hint="pull again")
        if draft is not None:
            draft.encoded(grads)
        return grads
    if codec is None:
        return prepare(layout, grads, ranges, dtype, partitions)
    if codec.whole:
        if draft is None:
            hint = f'with model.worker() as w: w.push(..., codec="{codec.text}")'
            raise problem("invalid_field", f"{codec.text} leaves something out, and only a worker remembers", hint=hint)
        gradient = prepare(layout, grads, ranges, "float32", partitions)
        return _whole(gradient, codec, generation, draft)
    gradient = prepare(layout, grads, ranges, codec.coding, partitions)
    return gradient if codec.stage is None else _packed(gradient, codec, generation)


def codec_of(text: str | None, dtype: str | None, default: Codec | None) -> Codec | None:
    """The codec of one call: what it names, else the default unless it names a dtype.  Raises RequestError."""
    if text is None:
        return default if dtype is None else None
    if dtype is not None:
        raise problem("invalid_field", "dtype= and codec= exclude each other", hint='codec="fp16" is dtype="float16"')
    return Codec.parse(text)


def _whole(gradient: Gradient, codec: Codec, generation: int, draft: Draft) -> Encoded:
    from paramserver.codecs.parts import encode_whole

    for part in gradient.selection.parts:
        if part.ranges is not None:
            raise _partial(codec, part)
    out: dict[int, tuple[AnyArray, int]] = {}
    norms: list[float] = []
    scan = Scan(exact=False)  # for NaN alone: the norm is that of what is sent
    for part in gradient.selection.parts:
        values = as_it_lies = _as_it_lies(gradient, part)
        if values is None:
            values = np.empty(part.stop - part.start, np.float32)
            write(gradient, [part], values.data.cast("B"), scan)
        if scan.bad and as_it_lies is None:
            continue
        residual, left = draft.arrays(generation, part.partition, values.size)
        data, norm = encode_whole(codec, values, residual, left)
        if as_it_lies is not None and not isfinite(norm) and not np.isfinite(values).all():
            scan.found_bad(gradient.selection.params[part.pieces[0].param].name)
        if scan.bad:
            continue
        norms.append(norm)
        out[part.partition] = stored(codec, data)
    scan.raise_for_bad()
    return Encoded(gradient.selection, codec, out, hypot(*norms), generation)


def _as_it_lies(gradient: Gradient, part: Part) -> F32 | None:
    """The part's values, where the caller's array has them end to end in float32: the encoder tests them itself."""
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
        write(gradient, [part], data.data, scan)
        out[part.partition] = stored(codec, data)
    scan.raise_for_bad()
    return Encoded(gradient.selection, codec, out, scan.norm, generation)


def stored(codec: Codec, data: AnyArray) -> tuple[AnyArray, int]:
    """(a part's bytes as they travel, their number before the second stage)."""
    if codec.stage is None:
        return data, data.size
    from paramserver.codecs.stage import pack

    return pack(codec.stage, data), data.size


def _partial(codec: Codec, part: Part) -> PsError:
    detail = f"{codec.text} takes whole partitions, and of partition {part.partition} this push names only a part"
    return problem("invalid_encoding", detail, hint='push every parameter, or use codec="fp16"')
