"""What a shard's heartbeat says of its partitions: one row each, which travels as a list."""

from typing import NamedTuple, TypeAlias

from paramserver.types import Token


class ServedRow(NamedTuple):
    """A partition that the shard serves."""

    model: str
    generation: int
    partition: int
    token: Token
    version: int
    durable_version: int
    revision: int
    """Revision of the settings in force there."""
    commits_from: int
    """sync: the first clock whose commit this owner, or the next one, still needs.

    With a journal, the next owner starts at the durable clock; at `applied`, where this one stands.
    """
    from_version: int
    """The version that the shard loaded: also under a renewed token, and whichever leader it tells."""
    from_lsn: int
    """Number of the last command in what it loaded."""


class CutRow(NamedTuple):
    """The newest cut that the shard has stored of a partition."""

    model: str
    generation: int
    partition: int
    token: Token
    clock: int
    """The one after the commit with `cut`, t + 1."""


class ReleasedRow(NamedTuple):
    """A partition that is suspended and stored whole, so that it may be taken over."""

    model: str
    generation: int
    partition: int
    token: Token
    version: int
    release: int
    """The number from `{"release": number}` in the model's document, which tells apart successive requests."""
    lsn: int
    """Number of the last command in what is stored."""


class LostRow(NamedTuple):
    """A partition that the shard cannot load.

    It should be loaded from a snapshot but was never stored, and its values cannot be drawn again, as they were
    uploaded, read from a file or restored; or the shard has had it under this token, and has given it up.
    """

    model: str
    generation: int
    partition: int
    token: Token
    given_up: bool
    """Whether it has been given up: what is stored of it may be loaded under another token."""


Row: TypeAlias = ServedRow | CutRow | ReleasedRow | LostRow
