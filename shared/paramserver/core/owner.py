"""Who owns one partition of a model, as the scheduler knows it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paramserver.types import Token


@dataclass(slots=True)
class Owner:
    """Who owns one partition, and what was last heard of it."""

    shard: str | None = None
    token: Token = 0
    version: int = 0
    durable_version: int = 0
    durable_clock: int = 0
    """sync: the clock that a new owner would begin with."""
    from_version: int | None = None
    """The first version reported under this token; None until the owner serves it."""
    source: Any = None
    """Where the state comes from under this token, if not from where the model says."""
    renewed: Token = 0
    """Who holds it under that token or a higher one goes on with its memory; 0: begins anew from its source."""
    previous: tuple[str, int, Token] | None = None
    """(shard, its epoch, token) of who handed it over, until a new owner serves it."""
    target: str | None = None
    """The shard it is moving to: a wish, which no other leader will know of."""
    release: int = 0
    """Number of that wish, 0 without one."""
    asked_s: float = 0.0
    """When it began."""
    rests_until_s: float = 0.0
    """It is not moved before then."""
    revision: int | None = None
    """Of the settings in force at the owner; None: not heard yet."""
    load: float = 0.0
    """Bytes per second in and out, smoothed."""

    def stay(self) -> bool:
        """It moves nowhere; whether it was to."""
        moving, self.target, self.release = self.release != 0, None, 0
        return moving

    def row(self) -> list[Any]:
        """As it is stored: [shard, token] or [shard, token, options]."""
        options: dict[str, Any] = {}
        if self.source is not None:
            options["source"] = self.source
        if self.renewed:
            options["from"] = self.renewed
        return [self.shard, self.token, *([options] if options else [])]

    def feed_row(self) -> list[Any]:
        """As shards are told."""
        shard, token, *options = self.row()
        if self.release:
            options = [{**(options[0] if options else {}), "release": self.release}]
        return [shard, token, *options]

    @classmethod
    def of(cls, row: Sequence[Any]) -> "Owner":
        """The one that `row` gave."""
        options = row[2] if len(row) > 2 else {}
        return cls(row[0], row[1], source=options.get("source"), renewed=options.get("from", 0))
