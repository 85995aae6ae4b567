"""What the scheduler's core hears from shards, and about Redis; see `scheduler_io`."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

from msgspec import Struct, field

from paramserver.types import PartitionKey

Json: TypeAlias = Mapping[str, Any]


class JoinShard(Struct, frozen=True):
    """POST /internal/shards.

    Answer 201 {"name","epoch","lease_s","term"}; an older holder of the name is dead at once.  409 `conflict` for one
    whose Redis is another than the schedulers'.
    """

    request: int
    name: str
    addresses: Sequence[str]
    version: str = ""
    redis_term: int | None = None
    """The term that its Redis holds, 0 for none; None where that did not answer."""


class ShardHeartbeat(Struct, frozen=True):
    """PUT /internal/shards/{name}.  Answer {"state":"active"|"draining"}; 409 `fenced` when dead or replaced."""

    request: int
    name: str
    epoch: int
    metrics: Json = field(default_factory=dict)
    partitions: Sequence[Sequence[Any]] = ()
    """[model, generation, index, token, version, durable_version, revision, durable_clock] of each partition that is
    served.

    `revision` is that of the settings in force there; without it the newest is taken to be.  `durable_clock` is the
    clock that a new owner would begin with; without it the one said last.
    """
    cuts: Sequence[Sequence[Any]] = ()
    """[model, generation, index, token, version] of each snapshot stored at a commit with `cut`; repeatable.
    The number is the clock after that commit, t + 1."""
    released: Sequence[Sequence[Any]] = ()
    """[model, generation, index, token, version, release] of each partition that is held and stored as a whole.

    `release` is the number that the document's `{"release": number}` had: one asked for before is another one.
    """
    lost: Sequence[Sequence[Any]] = ()
    """[model, generation, index, token] of each partition whose values were uploaded or restored, are to be read from
    a snapshot, and of which nothing was ever stored."""
    memory: Json = field(default_factory=dict)
    """{"limit_bytes": what this process may use (0: unknown), "used_bytes": what it uses}."""
    loads: Sequence[Sequence[Any]] = ()
    """[model, generation, index, bytes per second] of what goes in and out; those not listed have none."""


class LeaveShard(Struct, frozen=True):
    """DELETE /internal/shards/{name}?epoch=.  Answer 204; its partitions go to the others at once."""

    request: int
    name: str
    epoch: int


class SetShardState(Struct, frozen=True):
    """PUT /shards/{name}, or POST /internal/shards/{name}/drain?epoch= by the shard itself.

    `draining`: its partitions move to the others, one after the other, and it gets no new ones, until `active` again or
    until its name joins anew.  Answer 200 with the line of `Reading.shards`, and `targets`: how many other shards can
    take something; 404 `unknown_node`, and 409 `not_enough_memory` with `needed_bytes` and `free_bytes` when the others
    could not hold it.  One that asks for itself (`epoch` given) goes in any case, so it is not refused for memory.
    """

    request: int
    name: str
    state: str
    epoch: int | None = None


class OpenFeed(Struct, frozen=True):
    """GET /internal/feed.  Answer {"documents": [...]}, everything once; subscribe when performing that `Reply`.

    Every `Publish` after it continues the stream.  With `shard` given and dead or replaced: 409 `fenced`.
    """

    request: int
    shard: str | None = None
    epoch: int | None = None


class RedisEmptied(Struct, frozen=True):
    """Redis has lost everything, and this leader has taken the new term `term`, higher than its own.

    Every field is stored again, every fence, and a new token for each partition: the document of a partition that has
    an owner says under which token that one held it (`from`), so it keeps its memory and stores it at once.
    """

    term: int
    unseen: Collection[PartitionKey] = ()
    """Partitions whose newest token was not stored yet, so nobody has been told of it."""


class StorageChanged(Struct, frozen=True):
    """Redis has stopped answering (`reason` says how) or answers again (""): no moves meanwhile."""

    reason: str
