"""Routes between nodes: read a partition's whole state for a checkpoint, assign values (also restores and uploads)."""

from collections.abc import Callable
from functools import partial

import numpy as np
from fastapi import APIRouter, Request, Response

from paramserver import kernels
from paramserver.core.shard.events import AssignPart, CaptureReceived, SetReceived
from paramserver.errors import problem
from paramserver.types import F32, AnyArray
from paramserver.wire.frame import MEDIA_TYPE, encode_header
from paramserver.wire.state import SetFrame, StateFrame
from paramserver.wire.tensor import NUMPY_DTYPE
from paramserver_node.roles import role
from paramserver_shard.directory import KnownModel
from paramserver_shard.frames import push_reply
from paramserver_shard.models import Models
from paramserver_shard.receiving import Body, FrameReader
from paramserver_shard.responses import ChunkedResponse
from paramserver_shard.runtime import Runtime
from paramserver_shard.serving import Serving


def router(
    serving: Serving, models: Models, runtime: Runtime, reader: FrameReader, obey: Callable[[int], None]
) -> APIRouter:
    """Build the internal routes of a shard; `obey` is given the term of each leader's request (`Membership.obey`)."""
    routes = APIRouter(prefix="/internal")

    @routes.get("/state/{model}/{index}")
    @role("node")
    async def state(model: str, index: int, generation: int | None = None, cut: int | None = None) -> Response:
        """Return one partition's values, optimizer state and step counts."""
        serving.check()
        known = await models.find(model, generation)
        if not 0 <= index < known.spec.partitions:
            raise problem("invalid_range", f"model '{model}' has no partition {index}")
        capture = await runtime.capture(CaptureReceived(model, index, generation=known.key.generation, cut=cut))
        serving.check()
        values, slots = capture.state.values, capture.state.slots
        frame = StateFrame(
            model,
            known.key.generation,
            index,
            capture.version,
            capture.clock,
            values.size,
            len(slots),
            capture.state.steps,
            tuple(capture.memory["slots"]),
        )
        return ChunkedResponse([encode_header(frame), *[a.data.cast("B") for a in (values, *slots)]], MEDIA_TYPE)

    @routes.post("/set/{model}")
    @role("node")
    async def assign(model: str, request: Request) -> Response:
        """Assign values to partitions of this shard."""
        serving.check()

        async def prepare(frame: SetFrame) -> tuple[tuple[KnownModel, SetFrame, Body], Body]:
            known = await models.find(model, frame.generation)
            body = Body((frame.body_bytes(),))
            return (known, frame, body), body

        known, frame, body = await reader.read(request.scope, request.receive, SetFrame, prepare)
        # In a thread, because a partition with its optimizer's state may be 256 MiB.
        parts = await runtime.submit(partial(assignments, frame, body.parts[0]))
        command = SetReceived(
            model,
            parts,
            generation=known.key.generation,
            restore=frame.restore,
            timeline=frame.timeline,
            slot_names=frame.slot_names,
            first=frame.first,
        )
        if frame.term is not None:
            # Not before: its leader may have been replaced while the body came.  From here on the order of arrival
            # counts, so what the successor has had set comes after this.
            obey(frame.term)
        done = await runtime.push(command)
        serving.check()
        return Response(encode_header(push_reply(done)), media_type=MEDIA_TYPE)

    return routes


def assignments(frame: SetFrame, body: AnyArray) -> tuple[AssignPart, ...]:
    """Return the parts of a frame; their values are views of its body."""
    out: list[AssignPart] = []
    at = 0
    for part in frame.parts:
        dtype = NUMPY_DTYPE[part.dtype]
        data = body[at : at + part.count * dtype.itemsize].view(dtype)
        at += part.count * dtype.itemsize
        slots: list[F32] = []
        for _ in range(part.slots):
            # Copied: the partition keeps the slots, and a view would keep the whole body alive.
            slots.append(np.array(body[at : at + 4 * part.size].view(np.float32)))
            at += 4 * part.size
        finite = kernels.all_finite(data, part.dtype) and all(map(kernels.all_finite, slots))
        keeps_slots = part.steps is None and not part.slots
        out.append(
            AssignPart(
                part.partition,
                data,
                part.dtype,
                finite,
                part.ranges,
                None if keeps_slots else tuple(slots),
                part.steps,
                part.expected,
                part.version,
            )
        )
    return tuple(out)
