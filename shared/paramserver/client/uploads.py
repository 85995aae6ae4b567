"""Values sent by name: assignments, and the first values of a new model; a large parameter goes in several requests."""

import io
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np

from paramserver.client.cluster import Cluster, ModelMap, model_path
from paramserver.core.selection import select
from paramserver.errors import PsError, is_foreign
from paramserver.limits import PARTITION_BYTES_MAX
from paramserver.net.calls import Call, Deadline, Request, json_of
from paramserver.net.idle import KEPT_MAX
from paramserver.net.retry import Backoff, is_temporary, may_be_done, result_of, together
from paramserver.types import AnyArray

NPY: Final = "application/x-npy"
AT_ONCE: Final = KEPT_MAX
"""Most requests sent at the same time: a scheduler stores once what it learns of all of them, and each leaves its
connection to the next."""
AT_ONCE_BYTES: Final = 16 << 20
"""Bytes sent at the same time, which are copied for that; a larger piece goes alone.  To a distant cluster each round
takes several round trips."""


class _Piece(NamedTuple):
    """What one request sends: a parameter, or a partition's part of a large one."""

    name: str
    partition: int
    """The partition in which it begins."""
    range: tuple[int, int] | None
    """Elements of the parameter in C order; None: all."""


def put_values(
    cluster: Cluster,
    model_map: ModelMap,
    values: Mapping[str, AnyArray],
    deadline: Deadline,
    token: str | None = None,
) -> Call[None]:
    """Assign parameters or, with a token, upload their initial values; small ones go at the same time.

    A parameter of more than `PARTITION_BYTES_MAX` goes partition by partition.  Each piece is first sent to the owner
    of its beginning, which passes on the rest; what fails for a moment, to the given URLs.
    """
    backoff, pending = Backoff(deadline), dict(_pieces(model_map, values))
    tried = set[_Piece]()
    while pending:
        pieces, size_bytes = list[_Piece](), 0
        for piece, array in pending.items():
            size_bytes += array.nbytes
            if pieces and (len(pieces) == AT_ONCE or size_bytes > AT_ONCE_BYTES):
                break
            pieces.append(piece)
        requests = list[Request]()
        for piece in pieces:
            to = None if piece in tried else cluster.route(model_map, piece.partition)
            requests.append(deadline.bound(_put_request(model_map.name, piece, pending[piece], to, token)))
        tried.update(pieces)
        outcomes = yield requests
        results = [(p, result_of(outcome, json_of, reads=False)) for p, outcome in zip(pieces, outcomes, strict=True)]
        failures = [(piece, result) for piece, result in results if isinstance(result, PsError)]
        if refusals := [_named(piece.name, error) for piece, error in failures if not is_temporary(error)]:
            backoff.in_doubt |= any(may_be_done(error) for _, error in failures)
            raise backoff.refusal(together(sorted(refusals, key=is_foreign)))
        for piece, result in results:
            if not isinstance(result, PsError):
                del pending[piece]
        if failures:
            try:
                pause = backoff.pause(*(error for _, error in failures))
            except PsError as e:
                sent = len(values) - len({piece.name for piece in pending})
                detail = f"{e.detail}; {sent} of {len(values)} parameters were confirmed"
                raise e.with_detail(detail, e.hint or "again, with a longer timeout=") from None
            yield pause


def _pieces(model_map: ModelMap, values: Mapping[str, AnyArray]) -> Iterator[tuple[_Piece, AnyArray]]:
    for name, array in values.items():
        parts = select(model_map.layout, [name]).parts
        if array.size * _sent_as(array).itemsize <= PARTITION_BYTES_MAX:
            yield _Piece(name, parts[0].partition, None), array
            continue
        flat = array.reshape(-1)
        for part in parts:
            yield _Piece(name, part.partition, (part.start, part.stop)), flat[part.start : part.stop]


def _sent_as(array: AnyArray) -> np.dtype[np.floating]:
    """Return the dtype of a `.npy` file: half precision as it is, anything else as the server stores it."""
    return np.dtype(np.float16 if array.dtype == np.float16 else np.float32)


def _put_request(model: str, piece: _Piece, values: AnyArray, to: str | None, token: str | None) -> Request:
    file = io.BytesIO()
    with np.errstate(under="ignore"):  # tiny float64 values become zero
        values = np.asarray(values, _sent_as(values), order="C")
    np.lib.format.write_array(file, values, version=(1, 0), allow_pickle=False)
    headers = {"content-type": NPY, "accept": "application/json"}
    if token is not None:
        headers["x-upload-token"] = token
    path = model_path(model, "params", piece.name)
    if piece.range is not None:
        path += "?start={}&stop={}".format(*piece.range)
    return Request("PUT", path, file.getvalue(), headers, to=to)


def _named(name: str, error: PsError) -> PsError:
    """Return the error with the parameter's name in its detail."""
    if f"'{name}'" in error.detail:
        return error
    return error.with_detail(f"'{name}': {error.detail}")
