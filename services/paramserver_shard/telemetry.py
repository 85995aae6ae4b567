"""What a shard counts: for Prometheus, and in short for its heartbeats."""

from collections.abc import Callable
from typing import Any, Final

from prometheus_client import Counter, Gauge

from paramserver.core.shard_io import PushDone

PUSHES: Final = Counter("paramserver_pushes_total", "Pushes accepted", ["model", "state"])
DUPLICATES: Final = Counter("paramserver_push_duplicates_total", "Pushes recognised as repeated", ["model"])
PULLS: Final = Counter("paramserver_pulls_total", "Pulls answered", ["model"])
RECEIVED: Final = Counter("paramserver_received_bytes_total", "Bytes of gradients received", ["model"])
SENT: Final = Counter("paramserver_sent_bytes_total", "Bytes of values sent", ["model"])
PARTITIONS: Final = Gauge("paramserver_partitions", "Partitions that this shard serves")
LENT: Final = Gauge("paramserver_buffer_lent_bytes", "Pooled memory in use")
KEPT: Final = Gauge("paramserver_buffer_kept_bytes", "Pooled memory kept for reuse")


class Telemetry:
    """Totals, and rates between two heartbeats."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._pushes: dict[str, int] = {}
        self._pulls = 0
        self._rates: dict[str, Any] = {}

    def pushed(self, done: PushDone, size_bytes: int) -> None:
        """A push was accepted here."""
        model = done.model.name
        PUSHES.labels(model, done.state).inc()
        RECEIVED.labels(model).inc(size_bytes)
        if done.duplicate:
            DUPLICATES.labels(model).inc()
        self._pushes[model] = self._pushes.get(model, 0) + 1

    def pulled(self, model: str, size_bytes: int) -> None:
        """A pull was answered here."""
        PULLS.labels(model).inc()
        SENT.labels(model).inc(size_bytes)
        self._pulls += 1

    def rates(self) -> dict[str, Any]:
        """Pushes and pulls per second since a second ago at the least; asking more often gives the same again."""
        now = self._clock()
        passed_s = now - self._since
        if passed_s >= 0.9:
            self._rates = {
                "pushes_per_s": round(sum(self._pushes.values()) / passed_s, 2),
                "pulls_per_s": round(self._pulls / passed_s, 2),
                "models": {m: {"pushes_per_s": round(n / passed_s, 2)} for m, n in self._pushes.items()},
            }
            self._since, self._pushes, self._pulls = now, {}, 0
        return dict(self._rates)
