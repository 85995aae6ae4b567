"""Single parameters: `GET|HEAD /pull/{model}/{name}` returns one as .npy, `PUT /models/{m}/params/{name}` assigns it.

The ETag is a hash of the model's generation and of the owner token and version of each partition touched.  So every
shard returns the same tag, and it stays the same until one of these partitions gets a new version or owner.
"""

import ast
import asyncio
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from paramserver import kernels
from paramserver.core.ranges import RangeArray
from paramserver.core.selection import Selection, select
from paramserver.core.shard.effects import PushDone
from paramserver.core.shard.events import AssignPart, SetReceived
from paramserver.errors import combined, problem
from paramserver.limits import BODY_BYTES_MAX
from paramserver.types import AnyArray, DType
from paramserver.wire.tensor import fits, from_f32
from paramserver_node.conditions import ANY, Conditions
from paramserver_shard.buffers import INLINE_BYTES_MAX
from paramserver_shard.directory import KnownModel
from paramserver_shard.exchange import Exchange, GotPart, WantedPart
from paramserver_shard.link import SchedulerLink
from paramserver_shard.models import Models
from paramserver_shard.names import NameService, PullRequest, read_tensor, version_of

NPY_MEDIA: Final = "application/x-npy"
SMALLER: Final = "send it in ranges of its elements in C order, with ?start= and ?stop="
"""Hint of a value that is too large for one request."""
_MAGIC: Final = b"\x93NUMPY"
_HEADER_BYTES_MAX: Final = 10_000
_DTYPES: Final[dict[str, DType]] = {"<f2": "float16", "<f4": "float32", "<f8": "float64"}


@dataclass(frozen=True, slots=True)
class NpyAnswer:
    """A parameter ready to send; `body` is empty for HEAD and 304."""

    etag: str
    version: int
    incarnation: int
    header: bytes
    """The .npy header."""
    body: memoryview
    body_bytes: int
    unchanged: bool
    """The client's copy is still current (304)."""


class ArrayService:
    """Reads and assigns single parameters."""

    def __init__(self, models: Models, exchange: Exchange, names: NameService, link: SchedulerLink) -> None:
        self._models = models
        self._exchange = exchange
        self._names = names
        self._link = link

    async def get(
        self, model: str, name: str, given: Conditions, make_room: Callable[[int], None], *, head: bool
    ) -> NpyAnswer:
        """Return the parameter, without its body for HEAD or if the client's copy is current.  Raises PsError.

        `make_room` is called with the bytes that the body takes before they are taken, and may refuse them.
        """
        known = await self._models.find(model)
        selection = _one(known, name)
        param = selection.params[0]
        dtype = "float32" if param.dtype == "bfloat16" else param.dtype
        header = npy_header(dtype, param.shape)
        size = param.size * np.dtype(dtype).itemsize
        if head or given != ANY:
            parts = await self._versions(known, selection)
            tag = etag(known, parts)
            unchanged = given.unchanged(tag)
            if head or unchanged:
                version, incarnation = version_of(parts)
                return NpyAnswer(tag, version, incarnation, header, memoryview(b""), size, unchanged)
        if size > BODY_BYTES_MAX:
            detail = f"'{name}' has {size} bytes; the limit per response is {BODY_BYTES_MAX}"
            raise problem("too_large", detail, hint="pull ranges of it with POST /pull")
        pulled = await self._names.fetch(known, PullRequest(selection), make_room)
        tag = etag(known, pulled.parts)
        small = pulled.packed.nbytes <= INLINE_BYTES_MAX
        values = from_f32(pulled.packed, dtype) if small else await asyncio.to_thread(from_f32, pulled.packed, dtype)
        body = values.data.cast("B")
        return NpyAnswer(tag, pulled.version, pulled.incarnation, header, body, size, given.unchanged(tag))

    async def _versions(self, known: KnownModel, selection: Selection) -> list[GotPart]:
        """Pull one element of each partition, which is enough to learn its version."""
        probe = [WantedPart(p.partition, _first(p.ranges)) for p in selection.parts]
        got = await self._exchange.pull(known, probe)
        return [got[p.partition] for p in selection.parts]

    async def put(
        self,
        model: str,
        name: str,
        value: Any,
        upload_token: str | None,
        conditions: Conditions,
        start: int | None = None,
        stop: int | None = None,
    ) -> PushDone:
        """Assign a value (a JSON or msgpack tensor, or an array read from .npy), or upload an initial value.

        With `start` or `stop`, the value is the 1-D range [start, stop) of the parameter's elements.

        An upload that is repeated once the model is complete is answered as a duplicate: its answer was lost, and it
        must not overwrite what has been trained since.  Raises PsError.
        """
        known = await self._models.find(model)
        whole = selection = _one(known, name)
        ranged = not (start is None and stop is None)
        if ranged:
            end = whole.size if stop is None else stop
            selection = select(known.layout, None, {name: [(start or 0, end)]})
        shape = selection.shape(0)
        if isinstance(value, np.ndarray):
            flat, dtype = _checked(name, value, shape)
        else:
            flat, dtype = read_tensor(name, value, shape)
        command = assignment(known, selection, flat, dtype)
        if known.state != "ready":
            self._check_upload(known, name, upload_token)
            _check_parts(whole, selection)
            conditions.check("")
            return await self._upload(known, name, command, upload_token, partial=ranged)
        if upload_token is not None:
            return _duplicate(known)
        if ranged and conditions != ANY:
            raise problem("not_built", "If-Match and If-None-Match need the whole value, without start and stop")
        if conditions != ANY:
            command = await self._conditional(known, selection, command, conditions)
        return await self._exchange.assign(known, command)

    async def _upload(
        self, known: KnownModel, name: str, command: SetReceived, token: str | None, *, partial: bool
    ) -> PushDone:
        """Assign an initial value, or some partitions' part of it if it is `partial`, and tell the scheduler.

        If a complete model has lost values, only the partitions that lost them are assigned: the others hold trained
        values.  An upload that touches none of these is answered as a duplicate.
        """
        command = replace(command, first=token is not None)
        if known.lost:
            command = replace(command, parts=tuple(p for p in command.parts if p.partition in known.lost))
        done = await self._exchange.assign(known, command) if command.parts else _duplicate(known)
        given = [(p.partition, p.incarnation) for p in done.parts]
        told: dict[str, Any] = {"name": name, "token": token, "given": given}
        if partial:
            told["partial"] = True
        await self._link.request("POST", f"/internal/models/{known.key.name}/uploaded", told)
        return done

    async def _conditional(
        self, known: KnownModel, selection: Selection, command: SetReceived, conditions: Conditions
    ) -> SetReceived:
        """Check the conditions now, and for `If-Match` have each owner compare its version again when it assigns.

        Raises ConflictError (`precondition_failed`) if they do not hold.
        """
        parts = await self._versions(known, selection)
        conditions.check(etag(known, parts))
        if conditions.match in ("", "*"):
            return command
        expected = [(p.version, p.incarnation) for p in parts]
        asked = zip(command.parts, expected, strict=True)
        return replace(command, parts=tuple(replace(part, expected=stand) for part, stand in asked))

    def _check_upload(self, known: KnownModel, name: str, token: str | None) -> None:
        uploads = known.layout.by_name[name].init.kind == "upload" and not known.restored
        if known.lost and name in known.missing and not uploads:
            return  # lost values of a complete model that came from a file or a checkpoint: no upload, hence no token
        if known.upload_token is None or not uploads:
            raise problem(
                "initializing",
                f"model '{known.key.name}' is being initialized",
                hint="retry when initialization is complete",
            )
        if token != known.upload_token:
            raise problem(
                "upload_in_progress",
                f"the initial values of model '{known.key.name}' are being uploaded",
                hint="quote the upload_token of the reply to POST /models in the header X-Upload-Token",
            )


def _duplicate(known: KnownModel) -> PushDone:
    return PushDone(known.key, known.timeline, "applied", True, ())


def assignment(known: KnownModel, selection: Selection, flat: AnyArray, dtype: DType) -> SetReceived:
    """Build the event that assigns a packed vector of checked values, on all its partitions together."""
    parts = tuple(
        AssignPart(p.partition, flat[p.start : p.stop], dtype, finite=True, ranges=p.ranges) for p in selection.parts
    )
    return SetReceived(known.key.name, parts, generation=known.key.generation)


def _check_parts(whole: Selection, selection: Selection) -> None:
    """Raise RequestError (`invalid_range`) unless a first value has all elements of each partition that it touches.

    The scheduler counts the partitions that have their part.
    """
    sizes = {p.partition: p.stop - p.start for p in whole.parts}
    if any(sizes[p.partition] != p.stop - p.start for p in selection.parts):
        detail = f"a range of the first values of '{whole.params[0].name}' must begin and end with a partition"
        raise problem("invalid_range", detail, hint="`bounds` of GET /models/{m} say where partitions begin")


def etag(known: KnownModel, parts: Sequence[GotPart]) -> str:
    """Return the entity tag, in quotes, of a value stored in these partitions."""
    numbers = [known.key.generation, *(n for p in parts for n in (p.partition, p.incarnation, p.version))]
    digest = blake2b(b"".join(n.to_bytes(8, "little") for n in numbers), digest_size=12)
    return f'"{digest.hexdigest()}"'


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Build the header of a .npy file, format 1.0, in C order."""
    file = io.BytesIO()
    descr = np.dtype(dtype).newbyteorder("<").str
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


def read_npy(body: bytes | memoryview) -> AnyArray:
    """Return the array in a .npy file of floats, in C order.  Raises RequestError (`malformed`, `invalid_dtype`)."""
    view = memoryview(body)
    if len(view) < 12 or bytes(view[:6]) != _MAGIC or view[6] not in (1, 2):
        raise problem("malformed", "this is not a .npy file of format 1 or 2")
    width = 2 if view[6] == 1 else 4
    start = 8 + width
    size = int.from_bytes(view[8:start], "little")
    if size > _HEADER_BYTES_MAX or start + size > len(view):
        raise problem("malformed", "the header of the .npy file is cut short or too long")
    try:
        fields = ast.literal_eval(bytes(view[start : start + size]).decode("latin1").strip())
        descr, fortran, shape = fields["descr"], fields["fortran_order"], fields["shape"]
        if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape) or fortran is not False:
            raise ValueError("not an array in C order")
        if not fits(shape):
            raise ValueError("a shape that no parameter has")
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as e:
        raise problem("malformed", f"the header of the .npy file cannot be read: {e!r:.80}") from None
    if not isinstance(descr, str) or descr not in _DTYPES:
        raise problem("invalid_dtype", f"dtype {descr!r:.20} is not one of {', '.join(_DTYPES)}")
    dtype, data = np.dtype(descr), view[start + size :]
    if prod(shape) * dtype.itemsize != len(data):
        raise problem("malformed", f"the .npy file holds {len(data)} bytes of values, which does not match its shape")
    return np.frombuffer(data, dtype).reshape(shape)


def _checked(name: str, array: AnyArray, shape: tuple[int, ...]) -> tuple[AnyArray, DType]:
    if array.shape != shape:
        raise problem("invalid_shape", f"'{name}' has shape {list(array.shape)}, not {list(shape)}", where=name)
    flat = np.array(array).reshape(-1)  # an aligned copy: the body may be unaligned
    if not kernels.all_finite(flat):
        raise problem("non_finite", f"'{name}' holds NaN or infinity", where=name)
    return flat, _DTYPES[flat.dtype.str]


def _one(known: KnownModel, name: str) -> Selection:
    """Select one parameter: a path holds a name, never a pattern."""
    if name not in known.layout.by_name:
        raise combined(known.spec.unknown([name]))
    return select(known.layout, [name])


def _first(ranges: RangeArray | None) -> RangeArray:
    start = 0 if ranges is None else ranges[0, 0]
    return np.array(((start, start + 1),), np.int64)
