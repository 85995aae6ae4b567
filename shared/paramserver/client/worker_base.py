"""What blocking and asyncio workers share: the session, its properties, and the terms of its heartbeats."""

import difflib
import logging
import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from paramserver import limits
from paramserver.client.client_base import ClientBase
from paramserver.client.iterations import Iterations
from paramserver.client.membership import has_left
from paramserver.client.rows import Rows
from paramserver.client.session import Session
from paramserver.client.task_requests import TaskRequests
from paramserver.codecs.codec import Codec
from paramserver.core.selection import Ranges
from paramserver.errors import PsError, problem
from paramserver.net.calls import Call, Deadline, seconds
from paramserver.types import DTypeLike

log = logging.getLogger("paramserver")
MISSPELLED: Final = ("codec", "dtype", "timeout", "weight")
"""Options of `step` and `exchange` of which a slip would change the result and look like a metric."""
ALIKE: Final = 0.8
"""How alike a slip is to its option at least (`difflib`'s ratio): 'wieght' and 'weight' 0.83, 'val_loss' 0.29."""
ELSEWHERE: Final = ("copy", "min_version", "names", "out", "ranges", "rows", "wait_s")
"""Options of `pull`, `push` and `exchange`; `step` and `exchange` get those that they do not have as metrics."""
LEAVE_S = 5.0
"""How long a worker tries to tell the scheduler that it leaves."""


def of_another_process() -> PsError:
    """Return the error for using a worker in a child that was forked while it was open."""
    return problem("conflict", "this worker belongs to the process that opened it", hint="open one after the fork")


@lru_cache(256)  # every step names the same metrics
def _meant_by(name: str) -> str | None:
    """Return the option that a keyword of `step` or `exchange` is a slip of, or None if it is a metric."""
    found = difflib.get_close_matches(name, MISSPELLED, 1, ALIKE)
    return found[0] if found else None


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
        self._client, self._timeout = client, None if timeout is None else seconds(timeout)
        silence_s = client.timeout if timeout is None else timeout
        self._session = Session(client.cluster, model, name, rank, silence_s, codec)
        self._iterations = Iterations(self._session)
        self._tasks = TaskRequests(self._session)
        self._silent = False
        """Whether the last heartbeat failed."""
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
    def first(self) -> bool:
        """Whether its rank is the lowest of the live workers'; once that one is gone, a heartbeat tells the next."""
        return self._session.first

    @property
    def clock_number(self) -> int:
        """Iterations finished, which is also the number of the current one."""
        return self._session.clock

    @property
    def state(self) -> dict[str, Any]:
        """The worker's own JSON values, saved in checkpoints and given to the next worker of this name."""
        return self._session.reports.state

    @state.setter
    def state(self, values: dict[str, Any]) -> None:
        if not isinstance(values, dict):
            raise problem("invalid_field", f"the state of a worker is a dict of JSON values, not {values!r:.60}")
        self._session.reports.state = values

    @property
    def draining(self) -> bool:
        """Whether the worker should finish its work and leave: the run is over, or somebody has asked it to."""
        return self._session.status in ("draining", "stop")

    @property
    def evaluation_waits(self) -> bool:
        """Whether an evaluation may be waiting for a worker."""
        return self._session.evaluation_waits

    def _terms(
        self,
        codec: str | None,
        dtype: DTypeLike | None,
        ranges: Ranges | None = None,
        rows: Rows | None = None,
        **terms: Any,
    ) -> dict[str, Any]:
        """Return these terms of a push, with its encoding."""
        encoding = self._session.encoding.of_call(codec=codec, dtype=dtype, ranges=ranges, rows=rows)
        return {"encoding": encoding, **terms}

    def _metrics(self, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the metrics that were given to `step` or `exchange` as keywords.

        Raises RequestError (`invalid_field`) for a name that was meant as an option: it would be without effect.
        """
        for name in metrics:
            if name in ELSEWHERE:
                hint = f"pull(), push() and clock() have all options. If it is a metric: report({name}=...)"
                if name in ("ranges", "rows"):
                    hint = f"exchange() is of the whole model: step(..., {name}=...), then pull({name}=...)"
                raise problem("invalid_field", f"this call has no option {name}=", hint=hint)
            if meant := _meant_by(name):
                hint = f"did you mean {meant}=? If it is a metric: report({name}=...)"
                raise problem("invalid_field", f"this call has no option {name}=", hint=hint)
        return metrics

    def _deadline(self, timeout: float | None, wait_s: float | None = None) -> Deadline:
        return self._client.deadline(timeout, wait_s or 0.0, default=self._timeout)

    def _deadlines(self, timeout: float | None) -> tuple[Deadline, Deadline | None]:
        """Return when a call that ends an iteration gives up on the cluster, and on other workers: see `Iterations`."""
        deadline = self._deadline(timeout)
        return deadline, None if timeout is None else deadline

    def _beat_pause_s(self) -> float:
        return min(limits.HEARTBEAT_S, self._session.lease_s / 5)

    def _beat(self) -> Call[None]:
        return self._session.beat(Deadline.after(max(1.0, self._session.lease_s / 2)), last=True)

    def _note_beat(self, error: Exception | None = None) -> None:
        """Log the first heartbeat that fails; without an error, one has come through."""
        if error is not None and not self._silent and not self._session.left:
            unforeseen = not isinstance(error, PsError)
            log.warning("worker.heartbeat_failed worker=%s error=%s", self.name, error, exc_info=unforeseen)
        self._silent = error is not None

    def _refusal(self, opening: str) -> PsError | None:
        """Return why nothing can be done with the worker now, if there is a reason; `opening` opens one."""
        if self._pid not in (-1, os.getpid()):
            return of_another_process()
        if self._session.left:
            return has_left()
        if not self._session.joined:
            return problem("conflict", "the worker has not joined yet", hint=f"{opening} model.worker() as w: ...")
        return None
