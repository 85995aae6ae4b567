"""What the scheduler's core hears about models and their checkpoints; see `scheduler_io`."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from msgspec import Struct

from paramserver.errors import PsError
from paramserver.types import ModelKey

Json: TypeAlias = Mapping[str, Any]


class CreateModel(Struct, frozen=True):
    """POST /models.  Answer 201 (new) or 200 (the same spec) with the model document, when every partition is served.

    With `init.kind: upload` the document holds `upload_token` (201 always; 200 only when no other token is alive).
    `restore=True` (a checkpoint under a new name): the model stays `initializing` until `RestoreFinished`; a taken name
    is 409 `model_exists`, even with the same spec.  What all shards together have no memory for is 409
    `not_enough_memory`, with `needed_bytes` and `free_bytes`, unless the limit of one is unknown.
    """

    request: int
    spec: Any
    nonce: str
    """An unguessable string of the runtime's; becomes the upload token where one is needed."""
    restore: bool = False


class PatchModel(Struct, frozen=True):
    """PATCH /models/{m}, a JSON merge patch.  Answer 200 with the model document.

    An optimizer whose state the shards have no memory for is 409 `not_enough_memory`, as in `CreateModel`.
    """

    request: int
    model: str
    patch: Any


class DeleteModel(Struct, frozen=True):
    """DELETE /models/{m}.  Answer 204."""

    request: int
    model: str


class ParameterUploaded(Struct, frozen=True):
    """POST /internal/models/{m}/uploaded: all owners have that parameter's values.  Answer 200 {"missing":[...]}."""

    request: int
    model: str
    name: str
    token: str | None = None
    """The upload token quoted; None from a shard that has already compared it (see `upload` in the feed's document)."""
    given: Sequence[Sequence[int]] = ()
    """[index, owner token] of each partition that took the values."""


class FilesLoaded(Struct, frozen=True):
    """Completion of `LoadFiles`: the owners hold these parameters, or `error` says why not.

    Then a model that was never complete is removed; one that was is kept, and its files are read again after a while.
    """

    model: ModelKey
    names: Sequence[str] = ()
    error: PsError | None = None


class ModelForgotten(Struct, frozen=True):
    """Completion of `ForgetModel`: nothing of that creation is left in Redis."""

    model: ModelKey


class StartRestore(Struct, frozen=True):
    """POST /models/{m}/restore onto the living model: commits pause.  Answer 200 with the model document.

    The service then sets every partition (`POST /internal/set/...`) and sends `RestoreFinished`.
    """

    request: int
    model: str


class RestoreFinished(Struct, frozen=True):
    """Every partition of the model was set (or not: `error`).  Answer 200 with the model document, or the error.

    Request 0: nobody waits.  A failure may be told of what was not begun, or has ended; then nothing changes.
    """

    request: int
    model: ModelKey
    error: PsError | None = None
    version: int = 0
    """The checkpoint's; the first commit of a synchronous model that is not beyond it leads there."""
    workers: Mapping[str, Any] = {}
    """What each worker is to begin with that joins from now on, checked (`documents.check_states`)."""


class ModelRestored(Struct, frozen=True):
    """POST /internal/models/{m}/restored: a client has set every partition itself.  Answer 200 with the model document.

    A synchronous model that is still on `timeline` begins another one; so it does no harm to say it again.
    """

    request: int
    model: str
    generation: int
    timeline: int | None
    """None: more is to come."""
    version: int
    """As in `RestoreFinished`."""
    workers: Mapping[str, Any] = {}
    """As there, not yet checked."""


class RequestCheckpoint(Struct, frozen=True):
    """POST /models/{m}/checkpoints.  Answer 201 with the checkpoint's document once it is written.

    One with a name of the user's own is never removed by the rule of `keep`.
    """

    request: int
    model: str
    name: str | None = None


class CheckpointWritten(Struct, frozen=True):
    """Completion of `WriteCheckpoint`."""

    model: ModelKey
    name: str
    bytes: int
    versions: Sequence[int]
    """Of each partition, as written."""
    path: str = ""
    scheduler: str = ""
    """The name of the scheduler that has the files."""
    creation: str = ""
    """Of the model it is of, as its manifest says."""


class CheckpointFailed(Struct, frozen=True):
    """`WriteCheckpoint` did not succeed; nothing of it is left."""

    model: ModelKey
    name: str
    error: PsError
    taken: bool = False
    """Another creation of the model has a checkpoint of that name, which stays."""
