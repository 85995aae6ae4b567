"""A simulated client that brings a model's first values, and those that are lost before they are stored."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace

from paramserver.core.layout import Layout
from paramserver.core.scheduler import io
from paramserver.core.scheduler.core import SchedulerCore
from paramserver.core.selection import select
from paramserver.core.shard.events import AssignPart, SetReceived
from paramserver.errors import PsError
from paramserver.testing.workers import SimClient
from paramserver.testing.world import Script

FIRST: Final = 1000.0
"""The value of every element."""
SEND_S: Final = 2.0
"""Longest time that the values for one shard take."""


class Uploader(SimClient):
    """Uploads whatever the model lacks, or restores it whole, as long as it is trained."""

    def work(self) -> Script:
        """Upload or restore until the run is over."""
        document = self.sim.spec.document()
        while not self.sim.over:
            missing, lost = yield from self.read("missing", self._lacks)
            if missing and self.sim.given == "restore":
                yield from self._restore()
            elif missing:
                made = yield from self.ask(lambda r: io.CreateModel(r, document, "nonce"))
                for name in missing if not isinstance(made, PsError) else ():
                    yield from self._upload(name, lost, made.get("upload_token"))
            yield 0.3

    def _lacks(self, core: SchedulerCore) -> tuple[Sequence[str], set[int]]:
        model = core._c.models[self.sim.spec.name]
        return sorted(model.initial.missing), set(model.initial.lost)

    def _upload(self, name: str, lost: set[int], token: str | None) -> Script:
        """Send a parameter's values to their owners, only to those that lost them if any did, and tell the leader."""
        parts: dict[int, AssignPart] = {}
        for p in select(Layout(self.sim.spec), [name]).parts:
            if not lost or p.partition in lost:
                values = np.full(p.stop - p.start, FIRST, np.float32)
                parts[p.partition] = AssignPart(p.partition, values, "float32", True, p.ranges)
        given: list[tuple[int, int]] = []
        left = set(parts)
        while left:
            for shard, indices in (yield from self.owners(left)).items():
                sent = tuple(parts[i] for i in indices)
                event = SetReceived(self.sim.spec.name, sent, generation=self.sim.operator.generation, first=True)
                done = yield from self._set(shard, f"upload {name} {indices}", event)
                if isinstance(done, PsError):
                    yield from self.failed()
                    return  # as the shard that sends them on does
                given += [(p.partition, p.incarnation) for p in done.parts]
                left -= set(indices)
                yield self.sim.world.rng.uniform(0.0, SEND_S)
        yield from self.ask(lambda r: io.ParameterUploaded(r, self.sim.spec.name, name, token, given))

    def _restore(self) -> Script:
        """Set every partition as a client does, again those whose owner has died meanwhile, and tell the leader."""
        model, layout, owners = self.sim.spec.name, Layout(self.sim.spec), dict[int, int]()
        while True:
            doc = yield from self.model()
            left = {p["index"] for p in doc["partitions"] if owners.get(p["index"]) != p["incarnation"]}
            if not left:
                break
            for shard, indices in (yield from self.owners(left)).items():
                values = {i: np.full(layout.partition_size(i), FIRST, np.float32) for i in indices}
                parts = tuple(AssignPart(i, v, "float32", True, slots=()) for i, v in values.items())
                event = SetReceived(model, parts, generation=doc["generation"], restore=True)
                done = yield from self._set(shard, f"restore {indices}", event)
                if isinstance(done, PsError):
                    yield from self.failed()
                else:
                    owners |= {p.partition: p.incarnation for p in done.parts}
                yield self.sim.world.rng.uniform(0.0, SEND_S)
        given = list(owners.items())
        yield from self.ask(lambda r: io.ModelRestored(r, model, doc["generation"], doc["timeline"], given=given))

    def _set(self, shard: str, what: str, event: SetReceived) -> Script:
        """Have a shard set values; return its answer."""
        return (yield self.sim.shards[shard].ask(self.name, what, lambda r: replace(event, request=r)))
