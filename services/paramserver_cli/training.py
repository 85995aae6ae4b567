"""The progress of one training, sampled from `GET /status`: for displays, stopping rules and charts."""

from __future__ import annotations  # client classes are named, but not imported until used

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any

import paramserver as ps
from paramserver.errors import NotFoundError, Unavailable

POLL_TIMEOUT_S = 2.0
SAMPLES_MAX = 4096
"""Samples kept; a training of that many goes on with every other one of them, and half as many new ones."""


@dataclass(frozen=True)
class WorkerLine:
    """One worker of the model."""

    name: str
    clock: int
    loss: float | None
    """NaN also stands for infinity, here and in a sample."""
    lag: float | None
    """Mean version lag of its pushes, as the shards measure it; None if unknown."""
    state: str
    heartbeat_age_s: float


@dataclass(frozen=True)
class Sample:
    """The state of a model at one moment."""

    elapsed_s: float
    loss: float | None
    """Mean of the losses that the workers last reported."""
    accuracy: float | None
    """Accuracy of the last evaluation."""
    version: int
    clock: int
    pushes_per_s: float
    lag: float | None
    """Mean version lag of the workers."""
    workers: tuple[WorkerLine, ...] = ()


@dataclass
class Training:
    """The samples of one training, oldest first."""

    client: ps.Client
    model: str
    title: str
    began_s: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    """Accuracies of the evaluations, oldest first; equal ones in a row are stored once, also NaN (`math.nan`)."""
    error: str = ""
    """Why the last `poll` failed; empty if it succeeded."""
    held: str = ""
    """Why its run is paused, or waits for workers; empty while it runs, or if nobody has said."""
    _polls: int = 0
    _every: int = 1
    """How many polls share a sample, which is that of the last one."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the training began."""
        return time.monotonic() - self.began_s

    @property
    def last(self) -> Sample | None:
        """The newest sample; None before the first."""
        return self.samples[-1] if self.samples else None

    def poll(self) -> None:
        """Add a sample if the model is in the status; if the request fails, set `error` to the reason instead."""
        try:
            status = self.client.status(timeout=POLL_TIMEOUT_S)
        except (Unavailable, NotFoundError) as e:
            self.error = str(e)
            return
        self.error = ""
        found = next((m for m in status["models"] if m["name"] == self.model), None)
        if found is None:
            return
        sample = self._sample(found)
        if len(self.samples) == SAMPLES_MAX and self._polls % self._every == 0:
            del self.samples[1::2]
            self._every *= 2
        if self._polls % self._every:
            self.samples[-1] = sample
        else:
            self.samples.append(sample)
        self._polls += 1
        if sample.accuracy is not None and self.evaluations[-1:] != [sample.accuracy]:
            self.evaluations.append(sample.accuracy)

    def _sample(self, model: Mapping[str, Any]) -> Sample:
        before = self.last
        workers = tuple(
            WorkerLine(
                str(w["worker"]).rpartition("/")[2],
                int(w["clock"]),
                _loss(w["metrics"]),
                w["lag"],
                str(w["state"]),
                float(w["heartbeat_age_s"]),
            )
            for w in model["workers"]
            if w["alive"]
        )
        losses = [w.loss for w in workers if w.loss is not None]
        newest = {n: value for n, (_, value) in model["latest"].items()} | dict.fromkeys(model["not_finite"], nan)
        accuracy = newest.get("accuracy")
        return Sample(
            elapsed_s=self.elapsed_s,
            # One that is not finite is known of the model also when its worker is no longer there.
            loss=nan if "loss" in model["not_finite"] else sum(losses) / len(losses) if losses else None,
            accuracy=accuracy if accuracy is not None or before is None else before.accuracy,
            version=int(model["version"]),
            clock=int(model["clock"]),
            pushes_per_s=float(model["pushes_per_s"]),
            lag=model["lag"],
            workers=workers,
        )

    def has_reached(self, accuracy: float) -> bool:
        """Whether each of the last two entries of `evaluations` is at least `accuracy`."""
        last = self.evaluations[-2:]
        return len(last) == 2 and all(a >= accuracy for a in last)

    def rate(self) -> tuple[float, float]:
        """Return (updates per second, pushes per second), both averaged since the first sample with an update."""
        moving = [s for s in self.samples if s.version > 0]
        if len(moving) < 2 or moving[-1].elapsed_s <= moving[0].elapsed_s:
            return 0.0, 0.0
        span_s = moving[-1].elapsed_s - moving[0].elapsed_s
        return (moving[-1].version - moving[0].version) / span_s, sum(s.pushes_per_s for s in moving) / len(moving)


def _loss(metrics: Mapping[str, float | None]) -> float | None:
    """Return the loss among a worker's metrics, in which null stands for NaN and infinity; None if there is none."""
    if "loss" not in metrics:
        return None
    loss = metrics["loss"]
    return nan if loss is None else loss
