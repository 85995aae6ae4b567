"""What blocking and asyncio workers share: the session, its properties, and the terms of its heartbeats."""

import logging
from collections.abc import Mapping
from typing import Any

from paramserver import limits
from paramserver.client.client_base import ClientBase
from paramserver.client.encoding import Encoding
from paramserver.client.iterations import Iterations
from paramserver.client.session import Session
from paramserver.client.task_requests import TaskRequests
from paramserver.codecs.codec import Codec
from paramserver.core.selection import Ranges
from paramserver.errors import PsError, problem
from paramserver.net.calls import Call, Deadline
from paramserver.types import DTypeLike

log = logging.getLogger("paramserver")
LEAVE_S = 5.0
"""How long a worker tries to tell the scheduler that it leaves."""


def of_another_process() -> PsError:
    """Return the error for using a worker in a child that was forked while it was open."""
    return problem("conflict", "this worker belongs to the process that opened it", hint="open one after the fork")


class WorkerBase:
    """Base class of workers."""

    _client: ClientBase

    def __init__(
        self,
        client: ClientBase,
        model: str,
        name: str | None,
        rank: int | None,
        timeout: float | None,
        codec: Codec | None,
    ) -> None:
        self._client, self._timeout = client, timeout
        silence_s = client.timeout if timeout is None else timeout
        self._session = Session(client.cluster, model, name, rank, silence_s, codec)
        self._iterations = Iterations(self._session)
        self._tasks = TaskRequests(self._session)
        self._pid = -1
        """The process that opened it; -1 before that."""
        self.run: Mapping[str, Any] | None = None
        """The run that this worker takes part in, if any."""

    def __repr__(self) -> str:
        if not self._session.joined:
            return f"<{type(self).__name__} of {self.model!r}, not joined>"
        return f"<{type(self).__name__} {self.name!r} rank {self.rank} clock {self.clock_number}>"

    @property
    def name(self) -> str:
        """The id that the scheduler issued, such as `demo/w0`."""
        return self._session.worker

    @property
    def model(self) -> str:
        """The name of its model."""
        return self._session.model

    @property
    def rank(self) -> int:
        """Position of the worker in the order of summation and in data assignment; unique among the live workers."""
        return self._session.rank

    @property
    def clock_number(self) -> int:
        """Iterations finished, which is also the number of the current one."""
        return self._session.clock

    @property
    def state(self) -> dict[str, Any]:
        """The worker's own JSON values, saved in checkpoints and given to the next worker of this name."""
        return self._session.reports.state

    @property
    def draining(self) -> bool:
        """Whether the worker should finish its work and leave: the run is over, or somebody has asked it to."""
        return self._session.status in ("draining", "stop")

    @property
    def evaluation_waits(self) -> bool:
        """Whether an evaluation may be waiting for a worker."""
        return self._session.evaluation_waits

    def _encoding(self, codec: str | None, dtype: DTypeLike | None, ranges: Ranges | None = None) -> Encoding:
        return self._session.encoding.of_call(codec=codec, dtype=dtype, ranges=ranges)

    def _deadline(self, timeout: float | None) -> Deadline:
        return self._client.deadline(self._timeout if timeout is None else timeout)

    def _deadlines(self, timeout: float | None) -> tuple[Deadline, Deadline | None]:
        """Return when a call that ends an iteration gives up on the cluster, and on other workers: see `Iterations`."""
        deadline = self._deadline(timeout)
        return deadline, None if timeout is None else deadline

    def _beat_pause_s(self) -> float:
        return min(limits.HEARTBEAT_S, self._session.lease_s / 5)

    def _beat(self) -> Call[None]:
        return self._session.beat(Deadline.after(max(1.0, self._session.lease_s / 2)))

    def _log_failed_beat(self, error: Exception) -> None:
        unforeseen = not isinstance(error, PsError)
        log.warning("worker.heartbeat_failed worker=%s error=%s", self.name, error, exc_info=unforeseen)
