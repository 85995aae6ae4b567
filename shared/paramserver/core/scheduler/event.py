"""Base classes of the events of the scheduler's core; see `io`."""

from msgspec import Struct


class Event(Struct, frozen=True):
    """What `SchedulerCore.handle` takes."""


class Request(Event, frozen=True):
    """An event that is answered by exactly one `Reply`, with its number."""

    request: int
