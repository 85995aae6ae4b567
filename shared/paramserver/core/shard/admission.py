"""Admission checks for pushes and assignments: their content and their worker.  Pure functions."""

from collections.abc import Iterable, Mapping
from math import isfinite

import numpy as np

from paramserver import limits
from paramserver.core import ranges as range_arrays
from paramserver.core.fields import INTEGER_MAX, NUMBER_MAX
from paramserver.core.layout import Layout
from paramserver.core.ranges import RangeArray
from paramserver.core.shard.events import AssignPart, PushPart, PushReceived, SetReceived, WorkerAnswered
from paramserver.core.shard.served_model import ServedModel
from paramserver.core.shard.window import fenced
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError, problem
from paramserver.types import LEVELS, PER_PARTITION, PushId

_NUMPY = {
    "float16": (np.float16, np.uint16),
    "bfloat16": (np.uint16,),
    "float32": (np.float32,),
    "float64": (np.float64,),
}


def check_push(event: PushReceived, layout: Layout) -> None:
    """Raise RequestError if the push is invalid whatever the state of its partitions."""
    if not event.parts:
        raise problem("empty_push", "the push holds no gradients")
    if event.ack is not None and event.ack not in LEVELS:
        raise problem("invalid_field", f"ack: must be one of {', '.join(LEVELS)}, not {event.ack!r:.40}")
    if not 0.0 <= event.weight <= NUMBER_MAX:  # false for NaN too
        raise problem("invalid_field", f"weight: must be a number from 0 to {NUMBER_MAX:g}, not {event.weight!r}")
    if event.push_id is not None:
        _check_id(event.push_id)
    if event.key is not None and not 0 < len(event.key) <= limits.IDEMPOTENCY_KEY_BYTES_MAX:
        raise problem("invalid_field", f"Idempotency-Key: must have 1 to {limits.IDEMPOTENCY_KEY_BYTES_MAX} bytes")
    if event.clock is not None and not 0 <= event.clock <= INTEGER_MAX:
        raise problem("invalid_field", f"clock: must be from 0 to {INTEGER_MAX}, not {event.clock}")
    if event.norm is not None and not (isfinite(event.norm) and event.norm >= 0.0):
        raise problem("non_finite", "the gradient's norm is not a finite number")
    _check_parts(event.parts, layout)


def check_level(level: int, own: int, mode: str) -> None:
    """Raise RequestError if a push to a sync model asks for a level above the model's own.

    A staged push becomes durable with its clock's cut, and that cut cannot come before the push is acknowledged.
    """
    if level > own and mode == "sync":
        raise problem(
            "invalid_field",
            "ack: a model in mode sync acknowledges at its own level",
            hint="create the model with the ack level it needs",
        )


def _check_id(push_id: PushId) -> None:
    if not 0 < len(push_id.worker.encode()) <= limits.WORKER_NAME_BYTES_MAX:
        raise problem("invalid_field", f"worker: must have 1 to {limits.WORKER_NAME_BYTES_MAX} bytes")
    for name, value in (("epoch", push_id.epoch), ("seq", push_id.seq)):
        if not 0 <= value <= INTEGER_MAX:
            raise problem("invalid_field", f"{name}: must be from 0 to {INTEGER_MAX}, not {value}")


def check_set(event: SetReceived, layout: Layout) -> None:
    """Raise RequestError if the assignment does not fit the model, whatever its optimizer."""
    if not event.parts:
        raise problem("empty_push", "the assignment holds no values")
    _check_parts(event.parts, layout)
    for part in event.parts:
        size, segments = layout.partition_size(part.partition), layout.segments[part.partition]
        if part.slots is not None and any(s.size != size for s in part.slots):
            raise problem("invalid_shape", f"partition {part.partition}: the optimizer's state does not fit")
        if part.steps is not None and len(part.steps) != len(segments):
            raise problem("invalid_shape", f"partition {part.partition}: needs {len(segments)} step counts")


def _check_parts(parts: tuple[PushPart, ...] | tuple[AssignPart, ...], layout: Layout) -> None:
    count = layout.spec.partitions
    seen: set[int] = set()
    for part in parts:
        if not 0 <= part.partition < count:
            raise problem(
                "invalid_range", f"partition {part.partition} does not exist: the model has {count} partitions"
            )
        if part.partition in seen:
            raise problem("invalid_range", f"partition {part.partition} is named twice")
        seen.add(part.partition)
        if isinstance(part, PushPart) and part.dtype in PER_PARTITION:
            if part.ranges is not None:
                raise problem(
                    "invalid_encoding",
                    f"partition {part.partition}: codec {part.dtype} encodes the whole partition and takes no ranges",
                )
            assert part.data.dtype == np.uint8, "the runtime has checked that the bytes fit the partition"
            continue
        if part.dtype not in _NUMPY:
            raise problem("invalid_dtype", f"dtype '{part.dtype}' is not one of {', '.join(_NUMPY)}")
        assert part.data.ndim == 1, "the runtime decodes to flat arrays"
        assert part.data.dtype in _NUMPY[part.dtype], "of the dtype it names"
        size = layout.partition_size(part.partition)
        want = size if part.ranges is None else _elements(part.ranges, size, part.partition)
        if part.data.size != want:
            raise problem("invalid_shape", f"partition {part.partition}: {part.data.size} elements came, not {want}")
    check_finite(parts)


def check_finite(parts: Iterable[PushPart] | Iterable[AssignPart]) -> None:
    """Raise RequestError (`non_finite`) for the first part that holds NaN or infinity."""
    for part in parts:
        if not part.finite:
            raise not_finite(part.partition)


def not_finite(partition: int) -> PsError:
    """The error for a part that holds NaN or infinity."""
    return problem("non_finite", f"partition {partition} holds NaN or infinity", hint="nothing was changed")


def _elements(ranges: RangeArray, size: int, partition: int) -> int:
    if not 0 < len(ranges) <= limits.RANGES_PER_REQUEST_MAX:
        detail = f"partition {partition}: 1 to {limits.RANGES_PER_REQUEST_MAX} ranges are allowed, not {len(ranges)}"
        raise problem("invalid_range", detail)
    start, stop = ranges[-1]  # they are sorted and disjoint
    if stop > size:
        raise problem("invalid_range", f"partition {partition}: [{start}, {stop}) is beyond its {size} elements")
    return range_arrays.elements(ranges)


def clip_factor(event: PushReceived, spec: ModelSpec) -> float:
    """Factor that limits the 2-norm of the whole gradient to the model's `clip_norm`; 1.0 if there is nothing to clip.

    Raises RequestError (`invalid_field`) if the model clips and the push carries no norm.
    """
    bound = spec.optimizer.clip_norm
    if bound is None:
        return 1.0
    if event.norm is None:
        raise problem(
            "invalid_field",
            "norm: is required, because the model clips by norm",
            hint="send the 2-norm of the whole gradient, or push by name",
            where="norm",
        )
    return bound / event.norm if event.norm > bound else 1.0


def must_ask(event: PushReceived, push_id: PushId, model: ServedModel) -> bool:
    """Whether to ask the scheduler about the push's worker before the push is judged.

    Only ids with a '/' are issued by the scheduler.  The roster may lag behind a join, so a worker is asked about if
    the roster lacks it or lists a lower epoch.  In async and buffered mode a missing worker need not be asked about if
    this epoch, or a higher one, has already pushed to one of the partitions.
    """
    if "/" not in push_id.worker:
        return False
    live = model.workers.get(push_id.worker)
    if live is not None:
        return push_id.epoch > live
    if model.spec.consistency.mode in ("ssp", "sync"):
        return True
    memories = (model.partitions[part.partition].memory for part in event.parts)
    return all((memory.epoch(push_id.worker) or -1) < push_id.epoch for memory in memories)


def check_worker(event: PushReceived, mode: str, workers: Mapping[str, int], answer: WorkerAnswered | None) -> None:
    """Raise PsError unless the push's worker may push in this mode; `answer`: the scheduler's, if it was asked."""
    joined, push_id = mode in ("ssp", "sync"), event.push_id
    if push_id is None or "/" not in push_id.worker:
        if joined:
            raise problem(
                "worker_required",
                f"mode {mode} accepts pushes from joined workers only",
                hint="join as a worker first, at /models/{m}/workers",
            )
        return
    live = workers.get(push_id.worker)
    if live is not None and live >= push_id.epoch:
        if live > push_id.epoch:
            raise fenced(push_id.worker, push_id.epoch, live)
    elif answer is not None:
        _check_answer(answer, push_id, joined=joined)
    elif joined:
        raise problem("loading", f"worker '{push_id.worker}' has just left the roster", hint="send it again")


def _check_answer(answer: WorkerAnswered, push_id: PushId, *, joined: bool) -> None:
    """Raise PsError unless the scheduler knows that epoch of the worker, and with `joined` that it is live."""
    if answer.error is not None:
        raise answer.error
    if answer.epoch is None:
        raise problem("reserved_worker", f"worker '{push_id.worker}' never joined", hint="take a name without '/'")
    if answer.epoch < push_id.epoch:
        raise problem("unknown_worker", f"worker '{push_id.worker}' never had epoch {push_id.epoch}")
    if answer.epoch > push_id.epoch:
        raise fenced(push_id.worker, push_id.epoch, answer.epoch)
    if joined and not answer.live:
        raise problem("fenced", f"worker '{push_id.worker}' is no longer live", hint="join again", epoch=answer.epoch)
