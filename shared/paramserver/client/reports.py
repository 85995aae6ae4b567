"""What a worker reports to the scheduler besides its clock: metrics, and the state that checkpoints keep.

Both travel with the heartbeats, but must not make one fail: state or metrics that cannot be sent or are refused are
left out, and the reason is logged once.
"""

import json
import logging
import threading
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from paramserver.client.cluster import model_path
from paramserver.core.scheduler.documents import check_document
from paramserver.core.scheduler.series import check_metrics, in_json
from paramserver.errors import ConflictError, NotFoundError, PsError, RequestError, is_foreign, problem
from paramserver.net.calls import ATTEMPT_S, Call, Deadline, json_bytes, json_request
from paramserver.net.retry import deliver_json

log = logging.getLogger("paramserver")

POINTS_PER_BEAT: Final = 4
"""Metric points that one heartbeat sends; of more, evenly spaced ones are chosen, the newest among them."""
POINTS_MAX: Final = 16 * POINTS_PER_BEAT
"""Points kept for the next heartbeat; beyond that, every other one is dropped."""

MetricPoint: TypeAlias = tuple[int, int, dict[str, float]]
"""(timeline and clock at which metrics were reported, metrics)."""


class Reports:
    """The state and the unsent metrics of one worker.  Safe between the worker's threads and its heartbeat."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        """The worker's own JSON values, saved in checkpoints and given to the next worker of this name."""
        self._lock = threading.Lock()
        self._points: list[MetricPoint] = []
        self._timeline = 0
        self._sent = b""
        self._warned: set[str] = set()

    def begin(self, timeline: int) -> None:
        """Go on in this timeline, and drop the points of others: the values that they were measured of may be gone."""
        with self._lock:
            self._timeline = timeline
            self._points = self._current(self._points)

    def _current(self, points: list[MetricPoint]) -> list[MetricPoint]:
        return [point for point in points if point[0] == self._timeline]

    def note(self, timeline: int, clock: int, values: dict[str, float]) -> None:
        """Keep metrics for the next heartbeat, if the timeline that they are of still goes on."""
        if values:
            with self._lock:
                self._points += self._current([(timeline, clock, values)])
                if len(self._points) > POINTS_MAX:
                    del self._points[::2]

    def put_back(self, points: list[MetricPoint]) -> None:
        """Put unsent points back, before those that were added since."""
        with self._lock:
            self._points[:0] = self._current(points)

    def pass_on(
        self, model: str, worker: str, generation: int, points: list[MetricPoint], deadline: Deadline
    ) -> Call[None]:
        """Send `points`, oldest first, outside a heartbeat; sent and refused points are removed from the list.

        A refusal is only logged, because the code that reported the metrics no longer waits for an answer.
        """
        while points:
            try:
                yield from send(model, worker, generation, points[0], deadline)
            except PsError as e:
                if not refused(e):
                    raise
                self.left_out(worker, "metrics", e)
            del points[0]

    def take(self) -> list[MetricPoint]:
        """Take the points to be sent now, oldest first, at most `POINTS_PER_BEAT`."""
        with self._lock:
            points, self._points = self._points, []
        step = -(-len(points) // POINTS_PER_BEAT) or 1
        return points[::-1][::step][::-1]

    def fresh_state(self, worker: str) -> bytes | None:
        """Return the state as JSON; None if it has not changed since it was last sent, or cannot be sent."""
        try:
            state = json_bytes(self.state)
            if state == self._sent or not (self.state or self._sent):
                return None
            check_document(json.loads(state), "state")
        except RuntimeError:  # another thread is changing one of the dicts
            return None
        except PsError as e:
            self.left_out(worker, "state", e)
            return None
        return state

    def mark_sent(self, state: bytes) -> None:
        """Record that the scheduler has this state, or has refused it: it is not sent again until it changes."""
        self._sent = state

    def joined(self, state: Any) -> None:
        """Begin after a join; `state` is that of the previous worker of this name, if this one takes it over."""
        if isinstance(state, dict):
            self.state.update(state)
        # The state that the scheduler has is not sent back: it could overwrite one that a restore has set meanwhile.
        self._sent = json_bytes(state) if state and self.state == state else b""

    def left_out(self, worker: str, what: str, why: PsError) -> None:
        """Log, once each, that the scheduler does not get the worker's `state` or `metrics`."""
        if what not in self._warned:
            self._warned.add(what)
            log.warning("worker.%s_not_kept worker=%s: %s", what, worker, why)


def refused(error: PsError) -> bool:
    """Whether a node has refused the content of the request, as opposed to its target (404) or its timing (409)."""
    of_content = isinstance(error, RequestError) and not isinstance(error, NotFoundError | ConflictError)
    return of_content and not is_foreign(error)


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics as floats; None is left out.

    Raises RequestError (`invalid_field`) for values that are not numbers, and for names that the scheduler refuses.
    """
    values: dict[str, float] = {}
    for name, value in metrics.items():
        if value is None:
            continue
        try:
            values[name] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
            detail = f"metrics.{name}: must be a number, not {value!r:.80}"
            raise problem("invalid_field", detail, where=f"metrics.{name}") from None
    return check_metrics(values)


def check_measure(measure: Any) -> None:
    """Raise RequestError (`invalid_field`) if an evaluation has no function; one that is pending may be far off."""
    if not callable(measure):
        detail = f"evaluate takes a function of the values that returns metrics, not {measure!r:.60}"
        raise problem("invalid_field", detail, hint='w.evaluate(lambda p: {"accuracy": accuracy(p)})')


def measured(found: Any) -> dict[str, float]:
    """Return as floats the metrics that the function of an evaluation has returned; see `numbers_of`."""
    if not isinstance(found, Mapping):
        detail = f"an evaluation must return its metrics by name, not {found!r:.60}"
        raise problem("invalid_field", detail, hint='return {"accuracy": 0.97}')
    return numbers_of(found)


def document(state: bytes | None, points: list[MetricPoint]) -> dict[str, Any]:
    """Return the part of a heartbeat's body with the state and the metrics."""
    fields: dict[str, Any] = {}
    if state is not None:
        fields["state"] = json.loads(state)
    if points:
        fields["metrics"] = [[clock, in_json(values)] for _, clock, values in points]
    return fields


def send(model: str, worker: str, generation: int, point: MetricPoint, deadline: Deadline) -> Call[None]:
    """Send the metrics of one clock."""
    timeline, clock, values = point
    body = {"metrics": in_json(values), "worker": worker, "clock": clock, "timeline": timeline}
    body["generation"] = generation
    yield from deliver_json(json_request("POST", model_path(model, "metrics"), body, timeout_s=ATTEMPT_S), deadline)
