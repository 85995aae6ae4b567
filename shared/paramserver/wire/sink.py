"""Sinks for bodies as they arrive: bytes are read straight into place where it is known, else copied there."""

from collections.abc import Sequence
from typing import Protocol


class Sink(Protocol):
    """Receives a body, on either side of a connection."""

    def room(self) -> memoryview:
        """Return the memory for the next bytes, as far as it is known; may be empty."""

    def filled(self, size: int) -> None:
        """Note that `size` bytes have been written to `room`.  May raise."""

    def feed(self, data: memoryview) -> None:
        """Take the next bytes from `data`, which is valid only during this call.  May raise."""


class Destination(Sink, Protocol):
    """A sink that knows the place of the whole rest of a body."""

    def rest(self) -> Sequence[memoryview]:
        """Return memory for the whole rest, in order.  `filled` may then exceed what `room` gave."""


def pour(data: memoryview, sink: Sink) -> memoryview:
    """Copy `data` into the sink's room; return what is left when there is no more room."""
    while data and (place := sink.room()):
        size = min(len(data), len(place))
        place[:size] = data[:size]
        data = data[size:]
        sink.filled(size)
    return data
