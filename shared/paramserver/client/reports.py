"""What a worker tells the scheduler besides its clock: the state that it wants kept, and metrics.

Both travel with its heartbeats, and neither may cost it one: a heartbeat goes out without what cannot be sent or is
refused, and one line in the log says why.
"""

import json
import logging
import threading
from collections.abc import Mapping
from math import isfinite
from typing import Any, Final, TypeAlias

from paramserver.client.calls import ATTEMPT_S, Call, Deadline, json_bytes, json_request
from paramserver.client.cluster import control, model_path
from paramserver.core.documents import check_document
from paramserver.core.series import check_metrics
from paramserver.errors import ConflictError, NotFoundError, PsError, RequestError, problem

log = logging.getLogger("paramserver")

POINTS_PER_BEAT: Final = 4
"""Metric reports of `step` that one heartbeat passes on; what lies between is thinned out."""
POINTS_MAX: Final = 16 * POINTS_PER_BEAT
"""Kept for the next one."""

Noted: TypeAlias = tuple[int, dict[str, float]]
"""The clock at which metrics were reported, and they."""


class Reports:
    """What one worker has to tell; safe between the worker's own threads and its heartbeat."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        """The worker's own JSON values, kept with checkpoints and given to its next incarnation."""
        self._lock = threading.Lock()
        self._points: list[Noted] = []
        self._told = b""
        self._warned: set[str] = set()

    def note(self, clock: int, values: dict[str, float]) -> None:
        """Keep metrics for the next heartbeat."""
        if values:
            with self._lock:
                self._points.append((clock, values))
                if len(self._points) > POINTS_MAX:
                    del self._points[::2]

    def put_back(self, points: list[Noted]) -> None:
        """These were taken and nobody has heard them; they go before what has come since."""
        with self._lock:
            self._points[:0] = points

    def pass_on(self, model: str, worker: str, points: list[Noted], deadline: Deadline, but: int = 0) -> Call[None]:
        """Send these points, the oldest first, all `but` so many; what is sent, or refused, is gone from them.

        Whoever reported them does not wait for the answer any more, so a refusal is only told in the log.
        """
        while len(points) > but:
            try:
                yield from send(model, worker, points[0], deadline)
            except PsError as e:
                if not refused(e):
                    raise
                self.left_out(worker, "metrics", e)
            del points[0]

    def take(self) -> list[Noted]:
        """The metrics to be sent now, with their clocks, oldest first."""
        with self._lock:
            points, self._points = self._points, []
        step = -(-len(points) // POINTS_PER_BEAT) or 1
        return points[::-1][::step][::-1]

    def fresh_state(self, worker: str) -> bytes | None:
        """The state as JSON; None where it is as it was told last, or cannot be told."""
        try:
            state = json_bytes(self.state)
            if state == self._told or not (self.state or self._told):
                return None
            check_document(json.loads(state), "state")
        except RuntimeError:  # a dict is being changed at this moment
            return None
        except PsError as e:
            self.left_out(worker, "state", e)
            return None
        return state

    def told(self, state: bytes) -> None:
        """The scheduler has that state, or has refused it: it is not sent again before it has changed."""
        self._told = state

    def joined(self, state: Any) -> None:
        """The worker is a new incarnation; `state` is that of the last one, if it is to have it."""
        if isinstance(state, dict):
            self.state.update(state)
        # What the scheduler has is not told again: a restore may have given it another one meanwhile.
        self._told = json_bytes(state) if state and self.state == state else b""

    def left_out(self, worker: str, what: str, why: PsError) -> None:
        """Say once that the scheduler does not get the worker's `state` or `metrics`."""
        if what not in self._warned:
            self._warned.add(what)
            log.warning("worker.%s_not_kept worker=%s: %s", what, worker, why)


def refused(error: PsError) -> bool:
    """Whether it is what the request says that is wrong, rather than to whom or when."""
    return isinstance(error, RequestError) and not isinstance(error, NotFoundError | ConflictError)


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers; None, NaN and infinity are left out.

    Raises RequestError (`invalid_field`) for what is no number, and for names that the scheduler would refuse.
    """
    values: dict[str, float] = {}
    for name, value in metrics.items():
        if value is None:
            continue
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
            detail = f"metrics.{name}: must be a number, not {value!r:.80}"
            raise problem("invalid_field", detail, where=f"metrics.{name}") from None
        if isfinite(number):
            values[name] = number
    return check_metrics(values)


def document(state: bytes | None, points: list[Noted]) -> dict[str, Any]:
    """What a heartbeat says of them: the state, and the newest metrics."""
    said: dict[str, Any] = {}
    if state is not None:
        said["state"] = json.loads(state)
    if points:
        said["metrics"] = points[-1][1]
    return said


def send(model: str, worker: str, point: Noted, deadline: Deadline) -> Call[None]:
    """Report the metrics of one clock."""
    clock, values = point
    body = {"metrics": values, "worker": worker, "clock": clock}
    yield from control(json_request("POST", model_path(model, "metrics"), body, timeout_s=ATTEMPT_S), deadline)
