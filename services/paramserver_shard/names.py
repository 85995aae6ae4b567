"""Pushes and pulls by parameter name, in JSON or msgpack: any shard answers for the whole model.

A request is checked as a whole (names, shapes, dtypes, ranges, finite values, fields) before any part of it is applied
here or forwarded, so a request that is refused for its content has changed nothing anywhere.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from paramserver import kernels, limits
from paramserver.core.fields import Reader
from paramserver.core.selection import Selection, select
from paramserver.core.shard.effects import PushDone
from paramserver.core.shard.events import PushPart, PushReceived
from paramserver.errors import PsError, problem
from paramserver.types import F32, ITEMSIZE, LEVELS, AnyArray, DType, PushId
from paramserver.wire.tensor import NUMPY_DTYPE, from_json, from_msgpack, to_f32
from paramserver_shard.buffers import INLINE_BYTES_MAX
from paramserver_shard.directory import KnownModel
from paramserver_shard.exchange import Exchange, GotPart, WantedPart
from paramserver_shard.models import Models


class PullRequest(Struct, frozen=True):
    """A checked pull by name."""

    selection: Selection
    min_version: int = 0
    min_clock: int = 0
    wait_s: float = 0.0
    dtype: DType | None = None
    """None: each parameter's own dtype."""

    @property
    def size_bytes(self) -> int:
        """Size of the requested elements in float32, as they are collected."""
        return 4 * self.selection.size


class Pulled(Struct, frozen=True):
    """The answer to a pull by name."""

    known: KnownModel
    selection: Selection
    dtype: DType | None
    """The dtype that was asked for; None: each parameter's own."""
    version: int
    incarnation: int
    timeline: int
    """The lowest of the parts': a gradient computed from these values belongs to no later one."""
    packed: F32
    """All requested elements, end to end."""
    parts: Sequence[GotPart]
    """Where they came from, without the elements."""

    def params(self) -> dict[str, F32]:
        """Return each requested parameter in its shape, or 1-D if only ranges of it were requested."""
        chosen, at = self.selection, self.selection.offsets
        return {p.name: self.packed[at[i] : at[i + 1]].reshape(chosen.shape(i)) for i, p in enumerate(chosen.params)}


class NameService:
    """`/push`, `/pull` and `/pushpull` by parameter name."""

    def __init__(self, models: Models, exchange: Exchange) -> None:
        self._models = models
        self._exchange = exchange

    async def push(self, body: Any, key: str | None) -> PushDone:
        """Apply a push; `key` is the `Idempotency-Key`. Raises PsError."""
        known, reader = await self._open(body)
        command = self._read_push(known, reader, key)
        _finish(reader)
        return await self._exchange.push(known, command)

    async def pull(self, body: Any, check: Callable[[PullRequest], None], make_room: Callable[[int], None]) -> Pulled:
        """Return the requested values; `check` and `make_room` (see `fetch`) may refuse the request. Raises PsError."""
        known, reader = await self._open(body)
        request = _read_pull(known, reader)
        _finish(reader)
        check(request)
        return await self.fetch(known, request, make_room)

    async def pushpull(
        self, body: Any, key: str | None, check: Callable[[PullRequest], None], make_room: Callable[[int], None]
    ) -> tuple[PushDone, Pulled]:
        """Push, then pull. `ranges` apply to the push only; the pull returns whole parameters. Raises PsError.

        `check` and `make_room` are as in `pull`; they refuse the push, too.
        """
        known, reader = await self._open(body)
        command = self._read_push(known, reader, key)
        request = _read_pull(known, reader, ranged=False)
        _finish(reader)
        check(request)
        make_room(request.size_bytes)
        done = await self._exchange.push(known, command)
        try:
            return done, await self.fetch(known, request, lambda _: None)
        except PsError as error:
            raise after_push(error, done) from error

    async def fetch(self, known: KnownModel, request: PullRequest, make_room: Callable[[int], None]) -> Pulled:
        """Collect the elements of a selection from all owners. Raises PsError.

        `make_room` is called with their size in bytes before they take memory, and may refuse them.
        """
        selection = request.selection
        wanted = [WantedPart(p.partition, p.ranges) for p in selection.parts]
        left = request.size_bytes

        def take_room(size_bytes: int) -> None:
            nonlocal left
            make_room(size_bytes)
            left -= size_bytes

        if not request.wait_s:
            take_room(left)
        got = await self._exchange.pull(
            known,
            wanted,
            min_version=request.min_version,
            min_clock=request.min_clock,
            wait_s=request.wait_s,
            make_room=take_room if request.wait_s else lambda _: None,  # while it waits it has none
        )
        if left:
            take_room(left)
        small = request.size_bytes <= INLINE_BYTES_MAX
        values = end_to_end(selection, got) if small else await asyncio.to_thread(end_to_end, selection, got)
        parts = [replace(got[p.partition], pieces=()) for p in selection.parts]  # their memory is free now
        timeline = min(p.timeline for p in parts)
        return Pulled(known, selection, request.dtype, *version_of(parts), timeline, values, parts)

    async def _open(self, body: Any) -> tuple[KnownModel, Reader]:
        if not isinstance(body, Mapping):
            raise problem("malformed", f"the body must be an object, not {type(body).__name__}")
        model = body.get("model")
        if not isinstance(model, str):
            raise problem("invalid_field", "model: the name of a model is required", where="model")
        reader = Reader(body, "", [])
        reader.known.append("model")
        return await self._models.find(model), reader

    def _read_push(self, known: KnownModel, r: Reader, key: str | None) -> PushReceived:
        """Build a checked push from the fields of a body; field errors are collected and raised together."""
        errors = r.errors
        push_id = _push_id(r)
        clock = r.optional_integer("clock", 0)
        timeline = r.optional_integer("timeline", 0)
        base_version = r.optional_integer("base_version", 0)
        weight = r.number("weight", 1.0, 0.0)
        ack = r.data.get("ack")
        r.known.append("ack")
        if ack not in (None, *LEVELS):
            r.fail("ack", "must be applied, journaled or fsynced")
        ranges = _read_ranges(r)
        grads = r.take("grads", {}, lambda v: isinstance(v, Mapping), "an object of tensors by name")
        _check_count("grads", grads)
        selection, tensors = _read_tensors(known, grads, ranges, errors)
        if not grads and not errors:
            raise problem("empty_push", "the push holds no gradients", hint='"grads": {"NAME": [...]}')
        r.tell()
        _check_ranges(known, selection)
        vector, dtype = packed(selection, tensors)
        parts = []
        for part in selection.parts:
            base = None if base_version is None else (base_version, known.owners[part.partition][1])
            data = vector[part.start : part.stop]
            if len(selection.parts) > 1 and not known.spec.consistency.immediate:
                data = data.copy()  # one that is held for long would keep all of the vector in memory
            parts.append(PushPart(part.partition, data, dtype, 0, True, part.ranges, base))
        return PushReceived(
            known.key.name,
            tuple(parts),
            generation=known.key.generation,
            timeline=timeline,
            push_id=push_id,
            key=None if push_id is not None else key,
            clock=clock,
            weight=weight,
            norm=kernels.norm2(vector, dtype),  # even if the model does not clip: an owner may know that it does by now
            ack=ack,
        )


def _check_ranges(known: KnownModel, selection: Selection) -> None:
    """Raise RequestError (`too_large`) for what has more ranges of one shard than a frame may have.

    That shard would refuse its part: of a push when others have applied theirs, of a pull unless it is asked itself.
    """
    counts = Counter[str]()
    for part in selection.parts:
        if owner := known.owners[part.partition][0]:  # those without an owner may get several
            counts[owner] += part.range_count
    if (most := max(counts.values(), default=0)) > limits.RANGES_PER_REQUEST_MAX:
        detail = f"{most} ranges lie on one shard; at most {limits.RANGES_PER_REQUEST_MAX} are allowed"
        raise problem("too_large", detail, hint="send them in several requests", where="ranges")


def version_of(parts: Sequence[GotPart]) -> tuple[int, int]:
    """Return (lowest version, highest incarnation) of the partitions touched."""
    return min(p.version for p in parts), max(p.incarnation for p in parts)


def end_to_end(selection: Selection, got: Mapping[int, GotPart]) -> F32:
    """Return all elements of the selection, in order."""
    out = np.empty(selection.size, np.float32)
    for part in selection.parts:
        at = part.start
        for piece in got[part.partition].pieces:
            out[at : at + piece.size] = piece
            at += piece.size
    return out


def after_push(error: PsError, done: PushDone) -> PsError:
    """Add the accepted push to the error of the pull after it, lest the client repeat the push without its id."""
    return error.plus(push=push_document(done))


def push_document(done: PushDone) -> dict[str, Any]:
    """Return the response document of a push."""
    document: dict[str, Any] = {
        "model": done.model.name,
        "version": done.version,
        "state": done.state,
        "duplicate": done.duplicate,
        "durable_version": done.durable_version,
        "incarnation": done.incarnation,
        "timeline": done.timeline,
    }
    if done.late:
        document["late"] = True
    return document


def _finish(r: Reader) -> None:
    r.done()
    r.tell()


def _push_id(r: Reader) -> PushId | None:
    given = [n for n in ("worker", "epoch", "seq") if r.data.get(n) is not None]
    worker = r.take(
        "worker", None, lambda v: v is None or (isinstance(v, str) and worker_ok(v)), "1 to 128 bytes of text"
    )
    epoch, seq = r.optional_integer("epoch", 0), r.optional_integer("seq", 0)
    if given and len(given) < 3:
        r.fail("worker", "worker, epoch and seq come together or not at all")
    if worker is None or epoch is None or seq is None:
        return None
    return PushId(worker, epoch, seq)


def worker_ok(name: str) -> bool:
    """Return whether this is a valid worker name: printable, 1 to `WORKER_NAME_BYTES_MAX` bytes of UTF-8."""
    try:
        return 0 < len(name.encode()) <= limits.WORKER_NAME_BYTES_MAX and name.isprintable()
    except UnicodeEncodeError:
        return False


def _read_ranges(r: Reader) -> dict[str, list[tuple[int, int]]]:
    def pair_ok(pair: Any) -> bool:
        return (
            isinstance(pair, list | tuple)
            and len(pair) == 2
            and all(isinstance(n, int) and not isinstance(n, bool) for n in pair)
        )

    def ok(value: Any) -> bool:
        return isinstance(value, Mapping) and all(
            isinstance(name, str) and isinstance(pairs, list | tuple) and all(map(pair_ok, pairs))
            for name, pairs in value.items()
        )

    value = r.take("ranges", {}, ok, "an object of lists of [start, stop] by name")
    _check_count("ranges", value)
    return {name: [(int(a), int(b)) for a, b in pairs] for name, pairs in value.items()}


def _check_count(where: str, named: Mapping[Any, Any]) -> None:
    """Raise RequestError (`too_large`) for more names than a model can have parameters, instead of checking each."""
    if len(named) > limits.PARAMS_PER_MODEL_MAX:
        detail = f"{where}: holds {len(named)} names; no model has more than {limits.PARAMS_PER_MODEL_MAX} parameters"
        raise problem("too_large", detail, where=where)


def _read_pull(known: KnownModel, r: Reader, *, ranged: bool = True) -> PullRequest:
    def names_ok(value: Any) -> bool:
        return (
            isinstance(value, list | tuple)
            and len(value) <= limits.PARAMS_PER_MODEL_MAX
            and all(isinstance(n, str) and 0 < len(n) <= limits.PARAM_NAME_BYTES_MAX for n in value)
        )

    names = r.take("names", None, lambda v: v is None or names_ok(v), "a list of parameter names or patterns")
    min_version, min_clock = r.integer("min_version", 0), r.integer("min_clock", 0)
    wait_s = r.number("wait_s", 0.0, 0.0, limits.WAIT_S_MAX)
    dtype = r.data.get("dtype")
    r.known.append("dtype")
    if dtype is not None and (not isinstance(dtype, str) or dtype not in ITEMSIZE):
        r.errors.append(problem("invalid_dtype", f"dtype {dtype!r:.40} is not one of {', '.join(ITEMSIZE)}"))
    ranges = _read_ranges(r) if ranged else {}
    if names is not None and not names:
        r.fail("names", "is empty; leave it out to pull everything")
    r.tell()
    selection = select(known.layout, names, ranges)
    _check_ranges(known, selection)
    return PullRequest(selection, min_version, min_clock, wait_s, dtype)


def _read_tensors(
    known: KnownModel,
    grads: Mapping[Any, Any],
    ranges: Mapping[str, Sequence[tuple[int, int]]],
    errors: list[PsError],
) -> tuple[Selection, list[tuple[AnyArray, DType]]]:
    """Return the selection of these named tensors, and each tensor 1-D with its dtype; appends to `errors`."""
    try:
        names = [n for n in grads if isinstance(n, str)]
        errors += known.spec.unknown([n for n in names if n not in known.layout.by_name])
        known_names = [n for n in names if n in known.layout.by_name]
        stray = [n[: limits.PARAM_NAME_BYTES_MAX] for n in ranges if n not in grads]
        errors += [problem("invalid_range", f"ranges: '{n}' is not in grads", where=n) for n in stray]
        used = {n: r for n, r in ranges.items() if n in grads and n in known.layout.by_name}
        selection = select(known.layout, known_names, used)
    except PsError as error:
        errors.append(error)
        return select(known.layout, []), []
    tensors: list[tuple[AnyArray, DType]] = []
    for i, param in enumerate(selection.params):
        try:
            tensors.append(read_tensor(param.name, grads[param.name], selection.shape(i)))
        except PsError as error:
            errors.append(error)
    return selection, tensors


def packed(selection: Selection, tensors: Sequence[tuple[AnyArray, DType]]) -> tuple[AnyArray, DType]:
    """Concatenate the tensors, in their common dtype if they share one, else in float32."""
    dtypes = {dtype for _, dtype in tensors}
    dtype: DType = dtypes.pop() if len(dtypes) == 1 else "float32"
    if len(tensors) == 1:
        return tensors[0][0], dtype
    out = np.empty(selection.size, NUMPY_DTYPE[dtype])
    for (array, own), at in zip(tensors, selection.offsets, strict=False):
        out[at : at + array.size] = array if own == dtype else to_f32(array, own)
    return out, dtype


def read_tensor(name: str, value: Any, shape: tuple[int, ...]) -> tuple[AnyArray, DType]:
    """Return a tensor of a JSON or msgpack body, 1-D, with its dtype, after checking its shape and for finite values.

    Raises RequestError: `invalid_shape`, `invalid_dtype`, `non_finite`, `malformed`.
    """
    array, named = (from_msgpack if isinstance(value, Mapping) else from_json)(value, name)
    dtype = cast(DType, named)
    if array.shape != shape:
        have, want = list(array.shape), list(shape)
        raise problem("invalid_shape", f"'{name}' has shape {have}, not {want}", where=name)
    flat = np.ascontiguousarray(array).reshape(-1)
    if not kernels.all_finite(flat, dtype):
        what = "numbers beyond float32" if dtype == "float64" else "infinity"
        raise problem("non_finite", f"'{name}' holds NaN or {what}", where=name)
    return flat, dtype
