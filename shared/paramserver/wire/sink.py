"""Where a body goes as it arrives: read straight to its place where that is known, else copied there."""

from collections.abc import Sequence
from typing import Protocol


class Sink(Protocol):
    """Takes a body, on either side of a connection."""

    def room(self) -> memoryview:
        """Where its next bytes belong, as far as that is known; may be empty."""

    def filled(self, size: int) -> None:
        """So many bytes have been put there.  May raise."""

    def feed(self, data: memoryview) -> None:
        """Its next bytes, which lie elsewhere and are only good until this returns.  May raise."""


class Destination(Sink, Protocol):
    """A sink that may know where all the rest of a body belongs."""

    def rest(self) -> Sequence[memoryview]:
        """All of it in order; empty where that is not known.  `filled` then takes more than `room` at once."""


def pour(data: memoryview, sink: Sink) -> memoryview:
    """Copies `data` to where `sink` says that it belongs; what is left when it knows of no more room."""
    while data and (place := sink.room()):
        size = min(len(data), len(place))
        place[:size] = data[:size]
        data = data[size:]
        sink.filled(size)
    return data
