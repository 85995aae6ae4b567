"""The owner of one partition, as the scheduler knows it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paramserver.types import Token


@dataclass(slots=True)
class Owner:
    """The owner of one partition, and what it last reported."""

    shard: str | None = None
    token: Token = 0
    version: int = 0
    heard: bool = True
    """Whether that is the partition's version, or was: false under a leader that has taken over and heard of none."""
    durable_version: int = 0
    stored_s: float = 0.0
    """When it was last reported to have stored something more, or to have nothing to store."""
    commits_from: int = 0
    """sync: the first clock whose commit it, or the next owner, still needs."""
    from_version: int | None = None
    """The version that the owner began with; None until it serves the partition, and once it is dead."""
    source: Any = None
    """Where to load the state from under this token, if not from `Model.source`."""
    kept_from: Token = 0
    """A shard that holds it under this token or a higher one keeps its memory; 0: it is loaded from its source."""
    previous: tuple[str, int, Token] | None = None
    """(shard, its epoch, token) of the owner that handed it over, until the new owner serves it."""
    handed_lsn: int | None = None
    """Number of the last command in what was handed over to it, which it has to begin with; None: nothing was.

    Never stored.
    """
    target: str | None = None
    """The shard it is moving to; never stored, so another leader does not know of the move."""
    release: int = 0
    """Number of the request to release it for that move; 0: none."""
    asked_s: float = 0.0
    """When the move began."""
    no_move_before_s: float = 0.0
    """Earliest time of its next move."""
    revision: int | None = None
    """Revision of the settings in force at the owner; None: not reported yet."""
    load: float = 0.0
    """Bytes per second in and out, smoothed."""

    @property
    def must_load(self) -> bool:
        """Whether its shard does not serve it, and has it not in memory either."""
        return self.from_version is None and not self.kept_from

    def withdraw_move(self) -> bool:
        """Withdraw its move; returns whether there was one."""
        moving, self.target, self.release = self.release != 0, None, 0
        return moving

    def row(self) -> list[Any]:
        """The stored form: [shard, token] or [shard, token, options]."""
        options: dict[str, Any] = {}
        if self.source is not None:
            options["source"] = self.source
        if self.kept_from:
            options["from"] = self.kept_from
        return [self.shard, self.token, *([options] if options else [])]

    def feed_row(self) -> list[Any]:
        """The form in feed documents: `row`, with the release request among the options."""
        shard, token, *options = self.row()
        if self.release:
            options = [{**(options[0] if options else {}), "release": self.release}]
        return [shard, token, *options]

    @classmethod
    def of(cls, row: Sequence[Any]) -> "Owner":
        """Rebuild an owner from its stored `row`."""
        options = row[2] if len(row) > 2 else {}
        return cls(row[0], row[1], heard=False, source=options.get("source"), kept_from=options.get("from", 0))
