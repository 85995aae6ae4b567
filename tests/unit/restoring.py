"""A cluster with a checkpoint on disk, and a runtime that loses Redis at one kind of event."""

from pathlib import Path
from typing import Any

import numpy as np

from paramserver import checkpoint
from paramserver.core.scheduler import io
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError, problem
from paramserver_scheduler.runtime import Answer

from .scheduling import SPEC, Driver


class BlindRuntime:
    """A runtime for which Redis is away at events of one kind, before the core handles them or after (`taken_in`)."""

    def __init__(self, d: Driver, kind: type, taken_in: bool) -> None:
        self.core, self.d = d.core, d
        self.kind, self.taken_in = kind, taken_in
        self.stopped: PsError | None = None

    async def check_leads(self) -> None:
        """It does."""

    def send(self, event: io.Event) -> None:
        """Handle an event that needs no reply; does nothing once stopped."""
        if self.stopped is None:
            self.d.open[0] = event
            self.d.do(event)

    async def ask(self, make: Any, *, changes: bool = False) -> Answer:
        """Return the answer; raises `storage_unavailable` at events of that kind, and `stopped` once that is set."""
        if self.stopped is not None:
            raise self.stopped
        away = isinstance(make(0), self.kind)
        if away and not self.taken_in:
            raise problem("storage_unavailable", "Redis does not answer")
        number = self.d.send(make)
        self.d.beats()
        if away:
            raise problem("storage_unavailable", "Redis does not answer")
        return Answer(200, self.d.result(number))


def saved(state_dir: Path, **workers: Any) -> Driver:
    """Return a cluster with a model that has a checkpoint `mine` on disk, with the states of these workers."""
    d = Driver.with_model()
    values, states = {"w": np.zeros(64, np.float32)}, {f"m/{w}": state for w, state in workers.items()}
    checkpoint.write(state_dir / "checkpoints" / "m" / "mine", ModelSpec.parse(SPEC), values, {}, {}, [], states, {})
    return d
