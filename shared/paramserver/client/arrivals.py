"""The values that one pull receives: copied into the caller's memory, or leased from shards on this machine."""

from collections.abc import Sequence

from paramserver.client.frames import Incoming, leased_by
from paramserver.client.same_host import Leased, LeasedValues, SameHost
from paramserver.core.layout import Layout
from paramserver.core.selection import Part, Selection
from paramserver.types import AnyArray
from paramserver.wire.frame import PullReply


class Arrivals:
    """The answers to one pull, in order; for each partition the last one counts."""

    def __init__(self, same_host: SameHost, layout: Layout) -> None:
        self._layout = layout
        self._same_host = same_host
        self.leased_values: LeasedValues | None = None
        """The leased values, if every part of the pull was leased; set by `gather`."""
        self._leased: list[Leased] = []
        self._lent: dict[int, Leased | None] = {}

    def read(self, sink: Incoming, to: str | None) -> PullReply:
        """Record an answer that was received whole; return its header."""
        assert sink.reply is not None
        lease = leased_by(sink.reply, to, self._layout)
        if lease is not None:
            self._leased.append(lease)
        for partition, _, _ in sink.reply.parts:
            self._lent[partition] = lease
        return sink.reply

    def release_unread(self, sinks: Sequence[Incoming], groups: Sequence[tuple[str | None, list[Part]]]) -> None:
        """Release the leases in answers that are discarded because another one was a refusal."""
        came = [(sink.reply, to) for sink, (to, _) in zip(sinks, groups, strict=True) if sink.reply is not None]
        found = [leased_by(reply, to, self._layout) for reply, to in came]
        self._same_host.end_leases([lease for lease in found if lease is not None])

    @property
    def lenders(self) -> set[str]:
        """The addresses of the shards that leased values."""
        return {lease.address for lease in self._leased}

    def release_all(self) -> None:
        """Release all leases, because the values are not wanted."""
        self._same_host.end_leases(self._leased)

    def gather(self, selection: Selection, flat: AnyArray, *, view: bool) -> AnyArray | None:
        """Copy the leased values into `flat` and return it; None if they cannot be mapped.

        With `view`, return the mapped, read-only values themselves if all of them are leased.
        """
        if not self._leased:
            return flat
        leased_values = self._same_host.hold(_used(self._leased, self._lent))
        values = leased_values.values()
        if values is None:
            return None
        if all(self._lent.get(part.partition) is not None for part in selection.parts):
            self.leased_values = leased_values
            if view:
                return values
            flat[...] = values
            return flat
        at = 0
        for part in selection.parts:  # in order of partition, like the mapped window
            if self._lent.get(part.partition) is not None:
                size = part.stop - part.start
                flat[part.start : part.stop] = values[at : at + size]
                at += size
        return flat


def _used(leased: Sequence[Leased], lent: dict[int, Leased | None]) -> list[Leased]:
    """Return the leases, each with only the pieces that no later answer has replaced."""
    return [
        Leased(lease.address, lease.number, tuple(p for p in lease.pieces if lent[p[0]] is lease)) for lease in leased
    ]
