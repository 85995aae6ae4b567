"""A partition's memory of the pushes it accepted, so that none is applied twice.

A push id (worker, epoch, seq) is checked against an anti-replay window anchored at the highest seq seen, as in IPsec
(RFC 4303, 3.4.3) and DTLS: a seq above the highest is new, one within the last `limits.WINDOW` is new or a duplicate,
and an older one cannot be decided and is refused.  An epoch fences all lower ones of its worker.  For plain clients,
the last `Idempotency-Key` values are remembered in order of arrival instead.
"""

from array import array
from collections.abc import Mapping
from hashlib import blake2b
from itertools import chain
from typing import Any

from msgspec import Struct

from paramserver import limits
from paramserver.errors import PsError, problem
from paramserver.types import PushId

_EMPTY = -1
_START = 4  # slots of a fresh window; doubles up to limits.WINDOW, a power of two

Row = tuple[str, int, int, bytes]
"""A window as stored: worker, epoch, highest seq, and of all slots the seqs, then the checksums, then the versions, all
of 64 bits, little-endian.  An empty slot has seq -1, a late push ~version."""


class EarlierAnswer(Struct, frozen=True):
    """The answer that the push got when it first arrived, or what has become of it since."""

    version: int
    late: bool
    """sync: it was discarded, as the commit of its clock came before it or did not list it."""


class Window:
    """The last seqs of one (worker, epoch), with the checksum and the version of each: 24 bytes per seq."""

    __slots__ = ("_crcs", "_row", "_seqs", "_versions", "epoch", "highest")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.highest = _EMPTY
        self._row: Row | None = None  # as stored, while it is unchanged: of many windows, few change between snapshots
        self._resize(_START)

    @classmethod
    def of(cls, row: Row) -> "Window":
        """Return the window that was stored as this row."""
        window = cls(row[1])
        window.highest, window._row = row[2], row
        column = len(row[3]) // 3
        window._seqs, window._crcs, window._versions = (
            array(code, row[3][i * column : (i + 1) * column]) for i, code in enumerate("qQq")
        )
        return window

    def row(self, worker: str) -> Row:
        """Return it as it is stored, made anew only if it has changed."""
        if self._row is None:
            data = b"".join((self._seqs.tobytes(), self._crcs.tobytes(), self._versions.tobytes()))
            self._row = (worker, self.epoch, self.highest, data)
        return self._row

    def _resize(self, slots: int) -> None:
        self._seqs = array("q", [_EMPTY]) * slots
        self._crcs = array("Q", [0]) * slots
        self._versions = array("q", [0]) * slots

    def check(self, seq: int, crc: int) -> EarlierAnswer | None:
        """Return None for a new seq, else the original answer; raises `id_reused` or `outside_window`."""
        if seq > self.highest:
            return None
        if seq <= self.highest - limits.WINDOW:
            raise problem(
                "outside_window",
                f"push {seq} is {self.highest - seq} behind the highest seq, {self.highest}",
                hint=f"keep at most {limits.WINDOW} pushes in doubt",
            )
        slot = seq & (len(self._seqs) - 1)
        if self._seqs[slot] != seq:
            return None
        if self._crcs[slot] != crc:
            raise problem("id_reused", f"push {seq} was already accepted with different content", hint="take a new seq")
        version = self._versions[slot]
        return EarlierAnswer(version, False) if version >= 0 else EarlierAnswer(~version, True)

    def remembers(self, seq: int) -> bool:
        """Whether the seq is remembered, so that its content must be compared."""
        return self._seqs[seq & (len(self._seqs) - 1)] == seq > self.highest - limits.WINDOW

    def record(self, seq: int, crc: int, version: int, late: bool) -> None:
        """Remember an accepted push that `check` found to be new."""
        self._row = None
        self.highest = max(self.highest, seq)
        slot = seq & (len(self._seqs) - 1)
        while self._seqs[slot] not in (_EMPTY, seq) and self._seqs[slot] > self.highest - limits.WINDOW:
            self._grow()
            slot = seq & (len(self._seqs) - 1)
        self._seqs[slot], self._crcs[slot] = seq, crc
        self._versions[slot] = ~version if late else version

    def discard(self, seq: int) -> None:
        """Remember of an accepted push, if it is remembered, that it was discarded."""
        slot = seq & (len(self._seqs) - 1)
        if self._seqs[slot] == seq and self._versions[slot] >= 0:
            self._versions[slot] = ~self._versions[slot]
            self._row = None

    def _grow(self) -> None:
        held = list(zip(self._seqs, self._crcs, self._versions, strict=True))
        self._resize(2 * len(held))
        for seq, crc, version in held:
            if seq > self.highest - limits.WINDOW and seq != _EMPTY:
                slot = seq & (len(self._seqs) - 1)
                self._seqs[slot], self._crcs[slot], self._versions[slot] = seq, crc, version


class PushMemory:
    """All windows and idempotency keys of one partition.

    Worker names issued by the scheduler contain a `/`, and their number is bounded.  Plain clients may make up any
    others, so these are kept apart: they never evict issued ones.
    """

    __slots__ = ("_issued", "_keys", "_plain")

    def __init__(self) -> None:
        self._issued: dict[str, Window] = {}  # least recently used first
        self._plain: dict[str, Window] = {}  # likewise
        self._keys: dict[bytes, tuple[int, int]] = {}  # oldest first: digest -> (crc, version)

    def _among(self, worker: str) -> dict[str, Window]:
        return self._issued if "/" in worker else self._plain

    def check(self, push_id: PushId | None, key: str | None, crc: int) -> EarlierAnswer | None:
        """Return None for a push that is new here, else its original answer.

        Raises ConflictError `fenced` (lower epoch) or `outside_window`, RequestError `id_reused`.
        """
        if push_id is not None:
            window = self._among(push_id.worker).get(push_id.worker)
            if window is None or push_id.epoch > window.epoch:
                return None
            if push_id.epoch < window.epoch:
                raise fenced(push_id.worker, push_id.epoch, window.epoch)
            return window.check(push_id.seq, crc)
        if key is not None and (seen := self._keys.get(_digest(key))) is not None:
            if seen[0] != crc:
                raise problem("id_reused", "this Idempotency-Key was already used with different content")
            return EarlierAnswer(seen[1], False)
        return None

    def remembers(self, push_id: PushId | None, key: str | None) -> bool:
        """Whether `check` would compare the content of this push with that of an earlier one."""
        if push_id is not None:
            window = self._among(push_id.worker).get(push_id.worker)
            return window is not None and window.epoch == push_id.epoch and window.remembers(push_id.seq)
        return key is not None and _digest(key) in self._keys

    def record(self, push_id: PushId | None, key: str | None, crc: int, version: int, late: bool = False) -> None:
        """Remember an accepted push and the version it is answered with."""
        if push_id is not None:
            windows = self._among(push_id.worker)
            window = windows.pop(push_id.worker, None)
            if window is None or window.epoch < push_id.epoch:
                window = Window(push_id.epoch)
            window.record(push_id.seq, crc, version, late)
            windows[push_id.worker] = window
            if len(windows) > limits.WORKERS_PER_MODEL_MAX:
                del windows[next(iter(windows))]
        elif key is not None:
            self._keys[_digest(key)] = (crc, version)
            if len(self._keys) > limits.IDEMPOTENCY_KEYS_MAX:
                del self._keys[next(iter(self._keys))]

    def discard(self, push_id: PushId) -> None:
        """Remember of a push that was accepted and staged that it was discarded."""
        window = self._among(push_id.worker).get(push_id.worker)
        if window is not None and window.epoch == push_id.epoch:
            window.discard(push_id.seq)

    def epoch(self, worker: str) -> int | None:
        """Return the highest epoch in which that worker has pushed here; None if it has not."""
        window = self._among(worker).get(worker)
        return None if window is None else window.epoch

    def export(self) -> dict[str, Any]:
        """Return the memory as lists, tuples, strings, integers and bytes, for a snapshot.

        It costs little for windows that have not changed since the last time: there may be those of thousands of
        workers that have left, in every partition.
        """
        windows = [x.row(w) for w, x in chain(self._plain.items(), self._issued.items())]
        return {"windows": windows, "keys": [[d, *v] for d, v in self._keys.items()]}

    @classmethod
    def restore(cls, exported: Mapping[str, Any]) -> "PushMemory":
        """Return the memory that `export` was called on."""
        memory = cls()
        for worker, epoch, highest, data in exported.get("windows", ()):
            memory._among(worker)[worker] = Window.of((worker, epoch, highest, data))
        for digest, crc, version in exported.get("keys", ()):
            memory._keys[bytes(digest)] = (crc, version)
        return memory


def fenced(worker: str, epoch: int, newest: int) -> PsError:
    """Return the error for a push whose epoch is below the newest known one."""
    return problem(
        "fenced",
        f"epoch {epoch} of worker '{worker}' was replaced by epoch {newest}",
        hint="join again for a fresh epoch",
        epoch=newest,
    )


def _digest(key: str) -> bytes:
    return blake2b(key.encode(), digest_size=16).digest()
