"""The initial values of a model: which of them it lacks, and who may bring them (semantics 9)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

from paramserver import limits

RESTORED: Final = "*"
"""Placeholder in `missing` for values that a restore will set."""


@dataclass(slots=True)
class InitialValues:
    """What one model has and lacks of its initial values."""

    creator: str = ""
    """What the request that created it said of itself (`CreateModel.nonce`); its repetition is answered alike."""
    restored: bool = False
    """Whether the model was created from a checkpoint."""
    missing: set[str] = field(default_factory=set)
    """Parameters that still lack theirs; the model is ready when this is empty."""
    filled: set[str] = field(default_factory=set)
    """Parameters that got theirs since the model was stored: each is a field of its own, so that a new model of many
    parameters is not stored anew, with its whole spec, for each value."""
    given: dict[str, dict[int, int]] = field(default_factory=dict)
    """Of parameters that are uploaded in parts: the partitions that have theirs, with the owner token that took it.
    Only the leader that was told knows it; after a change of leaders such a parameter is uploaded again."""
    lost: set[int] = field(default_factory=set)
    """Partitions of a once complete model that were lost before anything of them was stored; their values are requested
    again."""
    upload_token: str | None = None
    upload_until_s: float = 0.0
    """Until when nobody else is given a token."""
    reading: bool = False
    """Whether a `LoadFiles` is in progress."""
    read_again: bool = False
    """More partitions were lost during that read, so its result is ignored and the files are read again."""
    read_at_s: float = inf
    """When to read its files again after an error."""
    files_error: str | None = None
    """Why the files of a once complete model could not be read again; None: no read has failed."""

    @property
    def were_complete(self) -> bool:
        """Whether they are complete, or were before some of them were lost."""
        return not self.missing or bool(self.lost)

    @property
    def awaits_restore(self) -> bool:
        """Whether a restore that created the model has yet to set them."""
        return RESTORED in self.missing and not self.lost

    def lose(self, names: set[str], partition: int) -> None:
        """Request those of these parameters again that a partition has lost before anything of it was stored."""
        if names and self.were_complete:
            self.lost.add(partition)
        self.missing |= names
        self.upload_until_s = 0.0

    def lose_all(self, names: Iterable[str], partitions: int) -> None:
        """Request them all again, of these parameters, which cannot be drawn."""
        complete = self.were_complete
        self.missing = {*names, *((RESTORED,) if self.restored else ())}
        if complete and self.missing:
            self.lost = set(range(partitions))
        self.upload_until_s = 0.0

    def take_token(self, token: str, now: float) -> None:
        """Let the client with this token upload them, and for a while no other."""
        self.upload_token = token
        self.extend_upload(now)

    def extend_upload(self, now: float) -> None:
        """Keep the token valid for another while, in which nobody else is given one."""
        self.upload_until_s = now + limits.UPLOAD_TOKEN_S

    def begin_reading(self, files: Mapping[str, str]) -> dict[str, str]:
        """Return which of these files, by parameter, are to be read now.

        Only one reading runs at a time, so that none overwrites values that another has already set.  A call during a
        reading voids its result and has it repeated.
        """
        self.read_at_s = inf
        wanted = {name: path for name, path in files.items() if name in self.missing}
        if not wanted or self.restored:
            return {}
        if self.reading:
            self.read_again = True
            return {}
        self.reading, self.read_again = True, False
        return wanted

    def end_reading(self) -> bool:
        """Note that a reading has ended; return whether its result is void and the files are to be read again."""
        again, self.reading, self.read_again = self.read_again, False, False
        return again

    def fill(self, names: set[str]) -> None:
        """Note that these parameters have theirs; if that completes them, nothing more is taken or read."""
        self.missing -= names
        if not self.missing:
            self.upload_token, self.read_at_s, self.files_error = None, inf, None
            self.lost.clear()
            self.given.clear()

    def stored(self) -> dict[str, Any]:
        """Their part of the stored field `model:NAME`."""
        return {
            "missing": sorted(self.missing),
            "lost": sorted(self.lost),
            "creator": self.creator,
            "upload_token": self.upload_token,
            "restored": self.restored,
        }

    @classmethod
    def of(cls, doc: Mapping[str, Any], now: float) -> "InitialValues":
        """Rebuild them from the stored field `model:NAME`; whoever had the token has it for another while."""
        initial = cls(doc["creator"], doc["restored"], set(doc["missing"]), lost=set(doc["lost"]))
        initial.upload_token = doc["upload_token"]
        initial.extend_upload(now)
        return initial

    def upload_document(self) -> dict[str, Any] | None:
        """What the feed tells of an upload; None once they are complete."""
        document = {"token": self.upload_token, "missing": sorted(self.missing), "lost": sorted(self.lost)}
        return document if self.missing else None
