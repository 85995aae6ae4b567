"""The values that one pull receives: copied into the caller's memory, or leased from shards on this machine."""

from collections.abc import Sequence

import numpy as np

from paramserver.client.arrays import Origin, Params
from paramserver.client.frames import Incoming, leased_by
from paramserver.client.same_host import Leased, LeasedValues, SameHost
from paramserver.core.layout import Layout
from paramserver.core.selection import Part, Selection
from paramserver.errors import PsError, problem
from paramserver.types import AnyArray, DType
from paramserver.wire.frame import PullReply
from paramserver.wire.tensor import HANDED_OUT


def memory(selection: Selection, dtype: DType, out: Params | None) -> AnyArray:
    """Return where a pull puts its values: into `out`, else new memory.  Raises RequestError if `out` does not fit."""
    if out is None:
        return np.empty(selection.size, HANDED_OUT[dtype])
    if not isinstance(out, Params):
        raise problem("invalid_field", f"out must be what pull() returned, not {type(out).__name__}")
    if not out.fits(selection, HANDED_OUT[dtype]):
        hint = "its parameters, shapes, ranges and dtype must be those of this pull, and it must be writable"
        raise problem("invalid_shape", "out cannot take what this pull returns", hint=hint)
    return out.flat


class Arrivals:
    """The answers to one pull, in order, and where their values go; for each partition the last answer counts."""

    def __init__(
        self, same_host: SameHost, layout: Layout, selection: Selection, dtype: DType, out: Params | None, *, view: bool
    ) -> None:
        """`view`: without `out`, the values may be leased memory itself, which is read-only."""
        self._same_host, self._layout = same_host, layout
        self._selection, self._dtype = selection, dtype
        self._out, self._view = out, view and out is None
        self._place: AnyArray | None = None
        self.start_over()

    @property
    def _flat(self) -> AnyArray:
        """Where the values go; made when it is first needed, as leased ones may need no place."""
        if self._place is None:
            self._place = memory(self._selection, self._dtype, self._out)
        return self._place

    def start_over(self) -> None:
        """Forget the answers."""
        self.replies: list[PullReply] = []
        self.leased_values: LeasedValues | None = None
        """The leased values, if every part of the pull was leased; set by `params`."""
        self._unread: dict[Incoming, str | None] = {}
        """The sinks of the requests sent last, but for those that were read -> the shard asked."""
        self.lacked: PsError | None = None
        """The error if this process could open no more files to map leased values; set by `params`."""
        self._leased: list[Leased] = []
        self._lent: dict[int, Leased | None] = {}

    def sinks(self, groups: Sequence[tuple[str | None, list[Part]]]) -> list[Incoming]:
        """Return a sink for the answer of each group of parts.  Raises RequestError if `out` cannot take the values."""
        self._unread = {Incoming(parts, self._flat, self._dtype): to for to, parts in groups}
        return list(self._unread)

    def read(self, sink: Incoming) -> PullReply:
        """Record an answer that was received whole; return its header."""
        assert sink.reply is not None
        self.replies.append(sink.reply)
        lease = leased_by(sink.reply, self._unread.pop(sink), self._layout)
        if lease is not None:
            self._leased.append(lease)
        for partition, _, _ in sink.reply.parts:
            self._lent[partition] = lease
        return sink.reply

    def release_unread(self) -> None:
        """Release the leases in answers that are discarded unread, because another one was a refusal."""
        found = [leased_by(sink.reply, to, self._layout) for sink, to in self._unread.items()]
        self._unread = {}
        self._same_host.end_leases([lease for lease in found if lease is not None])

    @property
    def unmappable(self) -> set[str]:
        """The addresses of the shards whose leased values cannot be mapped; none if only files were `lacked`."""
        return set() if self.lacked else {lease.address for lease in self._leased}

    @property
    def torn(self) -> bool:
        """Whether the answers are of different timelines."""
        return len({r.timeline for r in self.replies}) > 1

    def release_all(self) -> None:
        """Release all leases, also in answers not read yet, because the values are not wanted."""
        self.release_unread()
        self._same_host.end_leases(self._leased)

    def params(self, model: str) -> Params | None:
        """Return the parameters that have arrived; None if leased values cannot be mapped."""
        flat = self._gathered()
        if flat is None:
            return None
        versions = {p: (v, i) for r in self.replies for p, v, i in r.parts}
        timeline = max([r.timeline for r in self.replies])
        return self._handed_out(flat, Origin.of(model, self.replies[0].generation, timeline, versions))

    def known(self, values: AnyArray, origin: Origin) -> Params:
        """Return leased values that the client has already, of the whole model, as a pull would."""
        if self._view:
            return self._handed_out(values, origin)
        self._flat[...] = values
        return self._handed_out(self._flat, origin)

    def _handed_out(self, flat: AnyArray, origin: Origin) -> Params:
        return Params(self._selection, flat, origin) if self._out is None else self._out.refreshed(origin)

    def _gathered(self) -> AnyArray | None:
        """Copy leased values to where the others are; None if they cannot be mapped."""
        if not self._leased:
            return self._flat
        leased_values = self._same_host.hold(_used(self._leased, self._lent))
        values = leased_values.values()
        if values is None:
            self.lacked = leased_values.lacked
            return None
        lent = [part for part in self._selection.parts if self._lent.get(part.partition) is not None]
        if len(lent) == len(self._selection.parts):
            self.leased_values = leased_values
            if self._view:
                return values
        at = 0
        for part in lent:  # in order of partition, as they are mapped
            size = part.stop - part.start
            self._flat[part.start : part.stop] = values[at : at + size]
            at += size
        return self._flat


def _used(leased: Sequence[Leased], lent: dict[int, Leased | None]) -> list[Leased]:
    """Return the leases, each with only the pieces that no later answer has replaced."""
    return [
        Leased(lease.address, lease.number, tuple(p for p in lease.pieces if lent[p[0]] is lease)) for lease in leased
    ]
