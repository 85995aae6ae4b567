"""What a worker says of itself, the blocking one and the one on asyncio alike: all of it is in its session."""

from typing import Any

from paramserver.client.session import Session
from paramserver.errors import PsError, problem


def of_another_process() -> PsError:
    """What is said in a child that was forked while the worker was open."""
    return problem("conflict", "this worker belongs to the process that opened it", hint="open one after the fork")


class WorkerView:
    """The readable side of a worker."""

    _session: Session

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} rank {self.rank} clock {self.clock_number}>"

    @property
    def name(self) -> str:
        """The id that the scheduler gave it, such as `demo/w0`."""
        return self._session.worker

    @property
    def model(self) -> str:
        """The name of its model."""
        return self._session.model

    @property
    def rank(self) -> int:
        """Its integer place in sums and data, unique among the live workers of the model."""
        return self._session.rank

    @property
    def clock_number(self) -> int:
        """Iterations finished; also the number of the one to work on."""
        return self._session.clock

    @property
    def state(self) -> dict[str, Any]:
        """JSON values of its own that checkpoints keep, and that the next worker of this name starts with."""
        return self._session.reports.state

    @property
    def draining(self) -> bool:
        """Whether it should finish what it does and leave: the run is over, or somebody asked."""
        return self._session.status in ("draining", "stop")

    @property
    def evaluation_waits(self) -> bool:
        """Whether an evaluation is waiting for a worker to make it."""
        return self._session.evaluation_waits
