"""/models: creating, reading, changing and deleting models."""

import re
import secrets
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Final
from urllib.parse import quote

from fastapi import APIRouter, Request, Response

from paramserver.core.scheduler import io
from paramserver.errors import problem
from paramserver_node import negotiate
from paramserver_node.queries import takes_query
from paramserver_node.roles import role
from paramserver_scheduler import answers
from paramserver_scheduler.requests import (
    PAGED,
    number_of,
    page,
    read_json,
    reply,
    request_body,
    response_doc,
    service,
)

router = APIRouter(tags=["models"])

TEXTS_KEPT_MAX: Final = 16
LINE_KEPT_S: Final = 50e-6
"""How long the text of a model's partitions is kept, for each of them: 20 times as long as it takes to make it."""
TOKEN_CHARS: Final = re.compile(r"[A-Za-z0-9_-]{16,128}")


class Texts:
    """One part of the documents, in JSON, of the models asked for last.

    When a shard dies, each client asks for its models at once.  The spec of a thousand parameters takes 4 ms to make
    and encode, and the list of 4,096 partitions 10 ms.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[object, bytes]] = {}
        """What each was made of, and the text, by model's name; the one asked for last at the end."""

    def text(self, name: str, state: object, make: Callable[[], object]) -> bytes:
        """Return what `make` returns, in JSON: the text that there is, if it was made in this state."""
        kept = self._kept.pop(name, None)
        if kept is None or (kept[0] is not state and kept[0] != state):
            kept = state, negotiate.json_text(make())
        self._kept[name] = kept
        if len(self._kept) > TEXTS_KEPT_MAX:
            del self._kept[next(iter(self._kept))]
        return kept[1]


_SPECS: Final = Texts()
_PARTITIONS: Final = Texts()


@router.post(
    "/models",
    status_code=201,
    responses={
        **response_doc(200, "It was there, with the same spec", answers.Model),
        **response_doc(201, "Created; every partition is served", answers.Model, ["Location"]),
    },
    openapi_extra=request_body(answers.Spec.ref(), answers.SPEC),
)
@role("admin")
async def create_model(request: Request) -> Response:
    """Create a model; answered once shards serve all its partitions.  docs/rest.md lists the fields of a spec.

    If the model exists with the same spec, the answer is 200; with another spec it is 409 `model_exists`. If parameters
    of a new model have `init.kind: upload`, the answer has an `upload_token` for their values; the header
    `X-Upload-Token` chooses it, and a repeated request that has it is told the token again. The request that made the
    model gets 201 also when it is repeated with this header. 503 `loading` if no shard serves the model within 30 s;
    `created` says whether this request has made it. 409 `not_enough_memory`, with `needed_bytes` and `free_bytes`, if
    all shards together could not hold the model. 422 `not_built` for `ack: fsynced` if Redis cannot confirm that a
    write is on its disk.
    """
    return await create(request)


async def create(request: Request, *, restore: bool = False) -> Response:
    """Create the model in the request's body; `restore`: for a client that will set it to a checkpoint."""
    nonce = _upload_token(request)
    spec = await read_json(request)
    await service(request).jobs.check_level(spec)
    made = partial(io.CreateModel, spec=spec, nonce=nonce, restore=restore)
    return await reply(request, made, lambda m: f"/models/{quote(m['name'])}")


def _upload_token(request: Request) -> str:
    """Return the upload token that the client chose, or a new one.  Raises RequestError (`invalid_field`)."""
    chosen = request.headers.get("x-upload-token")
    if chosen is None:
        return secrets.token_urlsafe(24)
    if not TOKEN_CHARS.fullmatch(chosen):
        detail = "X-Upload-Token must be of 16 to 128 letters, digits, '-' and '_', and random"
        raise problem("invalid_field", detail, where="X-Upload-Token")
    return chosen


@router.get("/models", responses=response_doc(200, "All models", answers.Page[answers.ListedModel]))
@role("reader")
@takes_query(*PAGED)
async def list_models(request: Request) -> Response:
    """List all models by name, at most `?limit=` at once; `?after=` takes the `next` of the page before."""
    return page(request, service(request).read.models())


@router.get("/models/{m}", responses=response_doc(200, "The model, with its map", answers.Model))
@role("reader")
async def get_model(request: Request, m: str) -> Response:
    """Return one model: its settings, its versions, and which shard owns each partition."""
    read = service(request).read
    outline, spec = read.outline(m)
    # Owners are always the present ones, and only versions may be of a moment ago.
    place = outline["cluster"], outline["generation"], outline["map_epoch"], outline["served"]
    moment = int(monotonic() / (LINE_KEPT_S * spec.partitions))
    partitions = _PARTITIONS.text(m, (*place, moment), partial(read.partitions, m))
    text = _SPECS.text(m, spec, spec.document)
    whole = b'%b,"partitions":%b,"spec":%b}' % (negotiate.json_text(outline)[:-1], partitions, text)
    return negotiate.respond_text(request, whole)


@router.patch(
    "/models/{m}",
    responses=response_doc(200, "The new revision", answers.Model),
    openapi_extra=request_body({"type": "object"}, {"optimizer": {"lr": 0.05}}, others=[negotiate.MERGE_PATCH]),
)
@role("admin")
@takes_query("generation")
async def patch_model(request: Request, m: str) -> Response:
    """Change a model's settings during training, by a JSON merge patch.

    The change takes effect within a second; in sync mode, at the same clock on all partitions. 409 `not_enough_memory`
    if the shards could not hold the state of another optimizer. With `?generation=`, 409 `model_replaced` if the model
    of this name is of another one: it was deleted and created again.
    """
    patch, generation = await read_json(request), number_of(request, "generation", None)
    return await reply(request, lambda n: io.PatchModel(n, m, patch, generation))


@router.delete("/models/{m}", status_code=204, responses=response_doc(204, "Deleted"))
@role("admin")
@takes_query("generation")
async def delete_model(request: Request, m: str) -> Response:
    """Delete a model with its values in memory and in Redis; its checkpoints on disk stay.

    With `X-Upload-Token`, only while the upload of its first values has this token: else 409 `upload_in_progress`. With
    `?generation=`, only this creation: 409 `model_replaced` if it was deleted already, and created again.
    """
    token, generation = request.headers.get("x-upload-token"), number_of(request, "generation", None)
    return await reply(request, lambda n: io.DeleteModel(n, m, token, generation))
