"""Events of the scheduler's core about models and their checkpoints; see `io`."""

from collections.abc import Mapping, Sequence
from typing import Any

from paramserver.core.scheduler.event import Event, Request
from paramserver.errors import PsError
from paramserver.types import ModelKey


class CreateModel(Request, frozen=True):
    """POST /models. Answer 201 (new, or made by a request of this `nonce`) or 200 (same spec) with the model document.

    The answer comes once every partition is served.

    With `init.kind: upload` the document contains `upload_token` (always if new; else only if no other token than
    `nonce` is valid). With `restore=True` (a checkpoint under a new name; a client's own by POST /internal/models) the
    model stays `initializing` until `RestoreFinished` or `ModelRestored`, and an existing name that a request of
    another `nonce` has made is 409 `model_exists` even with the same spec. A model too large for the memory of all
    shards together is 409 `not_enough_memory` with `needed_bytes` and `free_bytes`, unless a shard's limit is unknown.
    """

    spec: Any
    nonce: str
    """The client's own upload token, or an unguessable string made by the runtime; the token if one is needed.  Empty
    for a restore by the cluster."""
    restore: bool = False


class PatchModel(Request, frozen=True):
    """PATCH /models/{m}, a JSON merge patch. Answer 200 with the model document.

    An optimizer whose state does not fit in the shards' memory is 409 `not_enough_memory`, as in `CreateModel`.
    """

    model: str
    patch: Any
    generation: int | None = None
    """If given, only this creation is meant, as in the other events with it: of another one, 409 `model_replaced`."""


class DeleteModel(Request, frozen=True):
    """DELETE /models/{m}. Answer 204."""

    model: str
    upload_token: str | None = None
    """If given, the model is deleted only while the upload of its first values has this token."""
    generation: int | None = None


class ParameterUploaded(Request, frozen=True):
    """POST /internal/models/{m}/uploaded: owners have the parameter's values, all or some of them. Answer 204."""

    model: str
    name: str
    token: str | None = None
    """The upload token that the client quoted; None for lost values of a complete model that need no token."""
    given: Sequence[Sequence[int]] = ()
    """[index, owner token] of each partition that accepted the values."""
    partial: bool = False
    """Whether other partitions get their values by other requests; the parameter is complete once all have theirs."""


class FilesLoaded(Event, frozen=True):
    """Completion of `LoadFiles`: the owners hold these parameters, or `error` says why not.

    After an error, a model that was never complete is removed; one that was complete is kept, and its files are read
    again after `model_desk.FILES_AGAIN_S`.
    """

    model: ModelKey
    names: Sequence[str] = ()
    error: PsError | None = None


class StartRestore(Request, frozen=True):
    """POST /models/{m}/restore into an existing model: commits pause. Answer 200 with the model document.

    The service then sets every partition (`POST /internal/set/...`) and sends `RestoreFinished`.
    """

    model: str
    sizes: Mapping[str, int] = {}
    """Worker name -> `size_of` the state that the restore brings it; refused at once if they do not fit (413)."""
    generation: int | None = None
    arrays: tuple[str, ...] | None = None
    """Names of the optimizer's arrays that it brings; 409 `conflict` if the model's optimizer has others by now."""


class RestoreFinished(Request, frozen=True):
    """Every partition was set, or `error` says why not. Answer 200 with the model document, or the error.

    Request 0: nobody waits for an answer. An error for a restore that never began or has already ended changes nothing.
    409 `conflict` if what was set at one of `places` is gone: nothing has ended then, and all is to be set again.
    """

    model: ModelKey
    error: PsError | None = None
    version: int = 0
    """The checkpoint's version. In sync the first commit brings the model to it, unless it is already beyond."""
    places: Mapping[int, tuple[int, int]] = {}
    """Partition -> `timeline.place` at which it was set; those not listed are not checked."""


class ModelRestored(Request, frozen=True):
    """POST /internal/models/{m}/restored: a client has set every partition itself. Answer 200 with the model document.

    A model that awaits its values is complete.  A synchronous model begins a new timeline, once, however often the
    request comes.  Neither is done if a partition has another owner than `given` says, or none: 409 `conflict`, and
    what was set there is to be set again.  So it is if a synchronous model is on another timeline by now, unless this
    request began it and not every partition has another owner since.  Without `timeline` it only brings `workers`, also
    those of a restore that ends with `RestoreFinished`.
    """

    model: str
    generation: int
    timeline: int | None = None
    """The model's timeline once every partition was set."""
    version: int = 0
    """As in `RestoreFinished`."""
    workers: Mapping[str, Any] = {}
    """Worker name -> state it starts with if it joins from now on."""
    given: Sequence[Sequence[int]] = ()
    """[index, owner token] of each partition, under which it was set."""


class RequestCheckpoint(Request, frozen=True):
    """POST /models/{m}/checkpoints. Answer 201 with the checkpoint's document once it is written.

    A checkpoint named by the user is never removed by the `keep` rule.
    """

    model: str
    name: str | None = None
    generation: int | None = None


class DeleteCheckpoint(Request, frozen=True):
    """DELETE /models/{m}/checkpoints/{name}, once its files are gone: it leaves the model's list. Answer 204."""

    model: str
    name: str


class CheckpointRead(Event, frozen=True):
    """The states for `WriteCheckpoint` are read, and its files are written from now on."""

    model: ModelKey
    name: str


class CheckpointWritten(Event, frozen=True):
    """Completion of `WriteCheckpoint`."""

    model: ModelKey
    name: str
    bytes: int
    versions: Sequence[int]
    """Version of each partition, as written."""
    path: str = ""
    scheduler: str = ""
    """Name of the scheduler that has the files."""
    creation: str = ""
    """`Model.creation` of the model it was taken from, as in the manifest."""


class CheckpointFailed(Event, frozen=True):
    """`WriteCheckpoint` failed; no files of it are left."""

    model: ModelKey
    name: str
    error: PsError
    taken: bool = False
    """A checkpoint of that name exists from another creation of the model, and is kept."""
