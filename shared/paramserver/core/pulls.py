"""A pull that may have to wait: for a version, for a partition to be loaded, or for initial values to be complete."""

from dataclasses import dataclass

from paramserver import limits
from paramserver.core.partition import Partition
from paramserver.core.served_model import ServedModel
from paramserver.core.shard_io import PullDone, PulledPart, PullReceived
from paramserver.errors import PsError, problem


@dataclass(slots=True, eq=False)
class WaitingPull:
    """One pull and until when it waits."""

    model: ServedModel
    event: PullReceived
    version_until: float
    """Until when it waits for `min_version`."""
    load_until: float
    """Until when it waits for values to be there at all."""
    at: Partition | None = None
    """The partition it waits for."""

    @classmethod
    def of(cls, model: ServedModel, event: PullReceived, now: float) -> "WaitingPull":
        """A pull that has just come; it waits at least a lease for partitions that are being recovered."""
        wait_s = min(event.wait_s, limits.WAIT_S_MAX) if event.wait_s > 0.0 else 0.0
        return cls(model, event, now + wait_s, now + max(wait_s, limits.LEASE_S))

    def attempt(self, map_epoch: int, now: float) -> PullDone | float:
        """The outcome, or until when to wait for `at`; raises PsError when it cannot be or has waited long enough."""
        event, model = self.event, self.model
        model.check(event.generation, event.timeline)
        partitions = [model.owned(i, map_epoch) for i in event.parts]
        for p in partitions:
            until = self.version_until if p.state is not None and model.ready else self.load_until
            if p.state is not None and model.ready and p.version >= event.min_version:
                continue
            if now >= until:
                raise self._late(p)
            self.at = p
            return until
        parts = tuple(PulledPart(p.index, p.state, p.version, p.token) for p in partitions if p.state is not None)
        return PullDone(
            model.key, model.timeline, min(p.version for p in parts), max(p.incarnation for p in parts), parts
        )

    def _late(self, p: Partition) -> PsError:
        if p.state is None:
            return problem("loading", f"partition {p.index} is being recovered")
        if not self.model.ready:
            return problem("initializing", "the model's initial values are not complete")
        return problem(
            "version_not_reached",
            f"partition {p.index} is at version {p.version}, not yet at {self.event.min_version}",
            version=p.version,
        )
