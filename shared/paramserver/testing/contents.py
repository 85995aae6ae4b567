"""What partitions hold over a whole run: whatever names a content, an ETag or a commit, names only one."""

from collections.abc import Hashable, Iterable
from typing import Final

from paramserver.core.partition_state import PartitionState
from paramserver.core.shard.partition import Partition
from paramserver.core.shard.served_model import ServedModel
from paramserver.types import PartitionKey, Token

Element = tuple[float, ...]
"""One element's value, optimizer state and step count."""
_SYNC: Final = "sync"


class Contents:
    """The contents that any shard has had; asserts that none of their names had two."""

    def __init__(self) -> None:
        self.elements: dict[tuple[int, int, int], dict[int, Element]] = {}
        """(generation, timeline, clock) -> partition -> its first element, of synchronous models."""
        self._named: dict[Hashable, int] = {}
        self._last: dict[tuple[PartitionKey, Token], tuple[PartitionState, tuple[int, int, int]]] = {}

    def note(self, model: ServedModel, p: Partition, restored: bool) -> None:
        """Record what a partition holds now; `restored`: a restore may have set it since its last commit."""
        if p.state is None or not model.ready or p.operations:
            return
        state, at, numbers = p.state, (p.key, p.token), (p.version, p.clock, model.timeline)
        before = self._last.get(at)
        if before is not None and before[0] is state and before[1] == numbers:
            return
        self._last[at] = state, numbers
        # As ETags name it: the token is of one ownership of one partition of one model.
        self._note(("version", p.token, p.version), hash(state.values.tobytes()), p)
        if p.spec.consistency.mode == _SYNC and model.sync and p.clock >= model.view.began and not restored:
            line = p.key.model.generation, model.timeline, p.clock
            # Before its first update a partition has the optimizer that its owner knew, which the next commit replaces.
            arrays = (state.values, *state.slots) if p.version else (state.values,)
            whole = hash((state.steps, *(a.tobytes() for a in arrays)))
            self._note(("clock", p.key.model.name, *line, p.version, p.index), whole, p)
            self.elements.setdefault(line, {})[p.index] = (*(float(a[0]) for a in arrays), float(state.steps[0]))

    def _note(self, name: Hashable, content: int, p: Partition) -> None:
        before = self._named.setdefault(name, content)
        assert before == content, f"partition {p.index} has two contents by the name of {name}"

    def check_alike(self, generation: int, timelines: Iterable[int]) -> None:
        """Assert that on these timelines, which began with all partitions alike, they were so at every clock."""
        lines = set(timelines)
        for (of, line, clock), found in self.elements.items():
            alike = of != generation or line not in lines or len(set(found.values())) == 1
            assert alike, f"at clock {clock} of timeline {line} partitions differ: {found}"
