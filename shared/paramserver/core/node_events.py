"""Events of the scheduler's core about shards and Redis; see `scheduler_io`, and `heartbeat_rows` for the rows."""

from collections.abc import Collection, Sequence
from typing import Any

from msgspec import Struct, field

from paramserver.types import Json, PartitionKey


class JoinShard(Struct, frozen=True):
    """POST /internal/shards.

    Answer 201 {"name","epoch","lease_s","term"}; an older incarnation of the name is dead at once. 409 `conflict` if
    the shard's Redis is not the schedulers'.
    """

    request: int
    name: str
    addresses: Sequence[str]
    version: str = ""
    redis_term: int | None = None
    """Leader term found in the shard's Redis, 0 if there is none; None if Redis did not answer."""
    other_leader: bool = False
    """Whether the shard's Redis names another leader than the scheduler that it asks."""


class ShardHeartbeat(Struct, frozen=True):
    """PUT /internal/shards/{name}. Answer {"state":"active"|"draining"}; 409 `fenced` if dead or replaced."""

    request: int
    name: str
    epoch: int
    metrics: Json = field(default_factory=dict)
    partitions: Sequence[Sequence[Any]] = ()
    """Of each partition it serves the fields of a `ServedRow`."""
    cuts: Sequence[Sequence[Any]] = ()
    """The fields of a `CutRow`; repeatable."""
    released: Sequence[Sequence[Any]] = ()
    """The fields of a `ReleasedRow`."""
    lost: Sequence[Sequence[Any]] = ()
    """The fields of a `LostRow`."""
    memory: Json = field(default_factory=dict)
    """{"limit_bytes": memory limit of the process (0: unknown), "used_bytes": memory in use}."""
    loads: Sequence[Sequence[Any]] = ()
    """[model, generation, index, bytes per second in and out]; partitions not listed have no traffic."""


class LeaveShard(Struct, frozen=True):
    """DELETE /internal/shards/{name}?epoch=. Answer 204; its partitions go to other shards at once.

    With `stored`, it has stored all that it knows of and serves no more. If a model would still lose commits, because
    they or the partition have not been heard of, the answer is {"left": false}, and that model's clock becomes a cut.
    """

    request: int
    name: str
    epoch: int
    stored: bool = False


class SetShardState(Struct, frozen=True):
    """PUT /shards/{name}, or POST /internal/shards/{name}/drain?epoch= by the shard itself.

    `draining`: its partitions move to other shards, a few at a time (`limits.MOVES_AT_ONCE`), and it gets no new ones
    until it is `active` again or its name joins anew. Answer 200 with its entry of `Reading.shards` and `targets`, the
    number of other shards that may take partitions; 404 `unknown_node`; 409 `not_enough_memory` with `needed_bytes` and
    `free_bytes` if the others cannot hold its partitions. A shard that asks for itself (`epoch` given) stops in any
    case, so it is not refused for memory.
    """

    request: int
    name: str
    state: str
    epoch: int | None = None
    cut: bool = False
    """The shard stops and serves no more: have its synchronous models cut where they stand, as not all may move."""


class OpenFeed(Struct, frozen=True):
    """GET /internal/feed. Answer {"documents": [...]}, the whole state; subscribe when performing that `Reply`.

    Every later `Publish` continues the stream. 409 `fenced` if `shard` is given and dead or replaced.
    """

    request: int
    shard: str | None = None
    epoch: int | None = None


class RedisEmptied(Struct, frozen=True):
    """Redis lost all data, and this leader has taken a new and higher term.

    All fields and fences are stored again, with a new token for each owned partition. The model's document names the
    token under which the owner held the partition (`from`), so the owner keeps its memory and stores it at once.
    """

    term: int
    unseen: Collection[PartitionKey] = ()
    """Partitions whose newest token was not stored yet, so no shard has been told of it."""


class StorageChanged(Struct, frozen=True):
    """Redis has stopped answering (`reason` says why) or answers again (""); no moves while it is away."""

    reason: str
