"""What the answers of one pull brought: values copied into the caller's memory, or lent by shards of this machine."""

from collections.abc import Sequence

from paramserver.client.frames import Incoming, leased_by
from paramserver.client.same_host import Held, Leased, SameHost
from paramserver.core.layout import Layout
from paramserver.core.selection import Part, Selection
from paramserver.types import AnyArray
from paramserver.wire.frame import PullReply


class Arrivals:
    """The answers of one pull, in their order; a later one for the same partition counts."""

    def __init__(self, same_host: SameHost, layout: Layout) -> None:
        self._layout = layout
        self._same_host = same_host
        self.held: Held | None = None
        """What was lent, where that is all there is; set by `gather`."""
        self._leased: list[Leased] = []
        self._lent: dict[int, Leased | None] = {}

    def read(self, sink: Incoming, to: str | None) -> PullReply:
        """The header of an answer that was read to its end."""
        assert sink.reply is not None
        lease = leased_by(sink.reply, to, self._layout)
        if lease is not None:
            self._leased.append(lease)
        for partition, _, _ in sink.reply.parts:
            self._lent[partition] = lease
        return sink.reply

    def forgo(self, sinks: Sequence[Incoming], groups: Sequence[tuple[str | None, list[Part]]]) -> None:
        """Nobody reads these answers, for another one of them was a refusal: what was lent by them is over."""
        came = [(sink.reply, to) for sink, (to, _) in zip(sinks, groups, strict=True) if sink.reply is not None]
        found = [leased_by(reply, to, self._layout) for reply, to in came]
        self._same_host.done([lease for lease in found if lease is not None])

    @property
    def lenders(self) -> set[str]:
        """The addresses of the shards that lent something."""
        return {lease.address for lease in self._leased}

    def drop(self) -> None:
        """None of it is wanted: what was lent is over."""
        self._same_host.done(self._leased)

    def gather(self, selection: Selection, flat: AnyArray, *, view: bool) -> AnyArray | None:
        """The values: `flat`, or with `view` a read-only array where all was lent; None if that cannot be mapped."""
        if not self._leased:
            return flat
        held = self._same_host.hold(_used(self._leased, self._lent))
        values = held.values()
        if values is None:
            return None
        if all(self._lent.get(part.partition) is not None for part in selection.parts):
            self.held = held
            if view:
                return values
            flat[...] = values
            return flat
        at = 0
        for part in selection.parts:  # in the order of the partitions, as the window is
            if self._lent.get(part.partition) is not None:
                size = part.stop - part.start
                flat[part.start : part.stop] = values[at : at + size]
                at += size
        return flat


def _used(leased: Sequence[Leased], lent: dict[int, Leased | None]) -> list[Leased]:
    """The leases with only those pieces that no later answer has replaced."""
    return [
        Leased(lease.address, lease.number, tuple(p for p in lease.pieces if lent[p[0]] is lease)) for lease in leased
    ]
