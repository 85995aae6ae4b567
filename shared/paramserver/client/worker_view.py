"""The read-only properties that blocking and asyncio workers share; all of them come from the session."""

from typing import Any

from paramserver.client.session import Session
from paramserver.errors import PsError, problem


def of_another_process() -> PsError:
    """Return the error for using a worker in a child that was forked while it was open."""
    return problem("conflict", "this worker belongs to the process that opened it", hint="open one after the fork")


class WorkerView:
    """Base class of workers: their properties."""

    _session: Session

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
