"""Effects of the scheduler's core, performed by its runtime; see `scheduler_io`."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from paramserver.errors import PsError
from paramserver.types import Json, ModelKey, PartitionKey, Token


class Store(Struct, frozen=True):
    """Write all of this in one script guarded by the term, or nothing.

    While Redis is away: retry, in order.  If Redis has another term, this process no longer leads and must stop.
    """

    fields: Mapping[str, Json | None]
    """For the hash `ps:state`; None deletes a field."""
    tokens: Sequence[tuple[PartitionKey, Token]]
    """The owner tokens of these partitions (`{NAME.GEN/INDEX}:token`, 20 digits)."""
    fences: Sequence[tuple[str, int]]
    """(shard, highest fenced epoch) for the hash `ps:fence`; epoch 0 deletes the field."""


class Publish(Struct, frozen=True):
    """Send a document to every open feed.

    Documents are level-triggered: reconnecting makes up for a lost one.  Types: `map`, `model`, `roster`, `commit`,
    `gone`.  `map` and `model` documents have the leader's `term`; a node that has seen a higher one ignores them,
    because a deposed leader that has not noticed may name other owners.  Fields of a `model` document:

    - `owners`: [shard, token] or [shard, token, options] for each partition.  Options are any of `{"release": number}`
      (hand it over: hold it, store its whole state, report it in `released` with that number), `{"from": token}` (an
      owner that holds it under that token or a higher one keeps its memory, adopts the new token and stores everything
      at once) and `{"source": ...}` (replaces the model's `source`).
    - `cut`: the newest clock stored on all partitions, null if none.
    - `upload`: {"token","missing":[names],"lost":[partitions]} while initial values are incomplete, else null.
    - `clock`: in sync the `t` of the next commit.
    - `began`: the clock at which the timeline began.  Entering sync begins one; partitions move to that clock.

    A `roster` document also has `revision`.  A commit without contributions changes no value; it exists for its `cut`.
    """

    document: Json


class Reply(Struct, frozen=True):
    """The answer to a request: a JSON body (None: empty) with its status, or an error."""

    request: int
    outcome: Json | PsError | None
    status: int = 200
    waits: bool = True
    """Whether it must wait until all stores before it have succeeded."""


class LoadFiles(Struct, frozen=True):
    """Read these parameters from safetensors files and set them on their owners; completed by `FilesLoaded`."""

    model: ModelKey
    files: Mapping[str, str]
    """Parameter name -> file name (one path component below the state directory)."""
    partitions: Sequence[int] = ()
    """Partitions to set; empty: all."""


class WriteCheckpoint(Struct, frozen=True):
    """Write a checkpoint; completed by `CheckpointWritten` or `CheckpointFailed`."""

    model: ModelKey
    name: str
    cut: int | None
    """sync: clock of the cut to fetch from every partition.

    None: their current state.  In sync no commit is made until completion, so that state is of one clock as well.
    """
    document: Json
    """For the manifest: spec, generation, creation, revision, timeline, clock, metric (name and value or null),
    created_s (Unix), workers {id: {"rank","clock","state"}}."""


class RemoveCheckpoint(Struct, frozen=True):
    """Delete a checkpoint's files if they come from that creation of the model; no event follows."""

    model: str
    name: str
    creation: str


class ForgetModel(Struct, frozen=True):
    """Delete every Redis key of the partitions of that generation; completed by `ModelForgotten`."""

    model: ModelKey
    partitions: int


class ForgetOthers(Struct, frozen=True):
    """Delete the Redis keys of partitions of all models that it `concerns`; no event follows."""

    kept: frozenset[ModelKey]
    newest: int
    """The last generation that was given out; models that have been created since are not concerned."""

    def concerns(self, model: ModelKey) -> bool:
        """Whether that model is gone: Redis has its keys because it came back with older data."""
        return model.generation <= self.newest and model not in self.kept
