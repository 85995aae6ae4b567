"""What the scheduler's core decides, for its runtime to carry out; see `scheduler_io`."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from msgspec import Struct

from paramserver.errors import PsError
from paramserver.types import ModelKey, PartitionKey, Token

Json: TypeAlias = Mapping[str, Any]


class Store(Struct, frozen=True):
    """Write these fields of the hash `ps:state` in one script guarded by the term; None deletes a field.

    Redis away: retry, in order.  Another term found: this process is no leader any more and must stop.
    """

    fields: Mapping[str, Json | None]


class SetTokens(Struct, frozen=True):
    """Write the owner tokens of these partitions (`{NAME.GEN/INDEX}:token`, 20 digits) and these fences.

    In one script with the `Store` before it: either all of it is stored or nothing.
    """

    tokens: Sequence[tuple[PartitionKey, Token]]
    fences: Sequence[tuple[str, int]] = ()
    """(shard, highest epoch that is fenced) for the hash `ps:fence`; epoch 0 deletes the field."""


class Publish(Struct, frozen=True):
    """A document for every open feed; all are level-triggered, so one that is lost is healed by reconnecting.

    Types: `map`, `model`, `roster`, `commit`, `gone`.  `map` and `model` tell the leader's `term`: who has seen a
    higher one must not heed them, for a leader that was deposed and has not noticed may know other owners.  Beyond the
    usual fields a `model` document has
    `cut` (the newest clock stored on all partitions, null if none) and `upload` ({"token","missing":[names]} while
    initial values are awaited, else null); its `owners` are [shard, token] or [shard, token, options], options any of
    `{"release": number}` (the owner is to hand it over: hold, store everything, report `released` with that number),
    `{"from": token}` (the owner that holds it under that token or a higher one keeps its memory, takes the new token
    and stores everything at once) and `{"source": ...}` (in place of the model's); a `roster` document has the
    `revision` too.  `clock` of a model in sync is the `t` of the next commit: entering sync raises the timeline, and
    partitions then take the document's clock for theirs.
    A commit without contributions changes no value; it exists for its `cut`.
    """

    document: Json


class Reply(Struct, frozen=True):
    """The answer to a request: a JSON body (None: empty) with its status, or an error."""

    request: int
    outcome: Json | PsError | None
    status: int = 200
    waits: bool = True
    """False: need not wait for the stores before it."""


class LoadFiles(Struct, frozen=True):
    """Read these parameters from safetensors files and set them on their owners; completed by `FilesLoaded`."""

    model: ModelKey
    files: Mapping[str, str]
    """Parameter name -> file name (one path component below the state directory)."""
    partitions: Sequence[int] = ()
    """The ones to set; empty: all."""


class WriteCheckpoint(Struct, frozen=True):
    """Write a checkpoint; completed by `CheckpointWritten` or `CheckpointFailed`."""

    model: ModelKey
    name: str
    cut: int | None
    """Sync: fetch the state of this cut's clock from every partition; None: the present one (in sync no commit is made
    until the completion, so it too is of one clock)."""
    document: Json
    """For the manifest: spec, generation, creation, revision, timeline, clock, metric (name and value or null),
    created_s (Unix), workers {id: {"rank","clock","state"}}."""


class RemoveCheckpoint(Struct, frozen=True):
    """Delete a checkpoint's files, if they are of that creation of the model; no completion."""

    model: str
    name: str
    creation: str


class ForgetModel(Struct, frozen=True):
    """Delete every Redis key of that creation's partitions; completed by `ModelForgotten`."""

    model: ModelKey
    partitions: int
