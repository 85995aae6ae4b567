"""Parameters as a pull returns them: arrays under names that are views of one flat vector."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from msgspec import Struct

from paramserver.core.selection import Selection
from paramserver.types import AnyArray


class Origin(Struct, frozen=True):
    """The model, timeline and versions that the values of one pull come from."""

    model: str
    generation: int
    timeline: int
    version: int
    """The lowest version of the partitions touched."""
    incarnation: int
    """The highest incarnation of the partitions touched."""
    versions: Mapping[int, tuple[int, int]]
    """partition -> (version, incarnation)."""

    @classmethod
    def of(cls, model: str, generation: int, timeline: int, versions: Mapping[int, tuple[int, int]]) -> "Origin":
        """Return the origin of values with these versions: partition -> (version, incarnation)."""
        oldest, newest = min([v for v, _ in versions.values()]), max([i for _, i in versions.values()])
        return cls(model, generation, timeline, oldest, newest, versions)


class NamedArrays(Mapping[str, AnyArray]):
    """Arrays by parameter name, each a view of `flat`: 1-D, the parameters end to end in the model's order."""

    __slots__ = ("_arrays", "flat")

    def __init__(self, selection: Selection, flat: AnyArray) -> None:
        self.flat: Final = flat
        at = selection.offsets
        self._arrays = {
            p.name: flat[at[i] : at[i + 1]].reshape(selection.shape(i)) for i, p in enumerate(selection.params)
        }

    def __getitem__(self, name: str) -> AnyArray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class Params(NamedArrays):
    """The parameters of one pull: a mapping from names to arrays, each a view of `flat`.

    `flat` is 1-D: the parameters end to end in the model's order, in C order.  The arrays are the caller's own and
    writable, unless the pull was made with `copy=False`.
    """

    __slots__ = ("_origin", "_selection")

    def __init__(self, selection: Selection, flat: AnyArray, origin: Origin) -> None:
        super().__init__(selection, flat)
        self._selection = selection
        self._origin = origin

    def __reduce__(self) -> tuple[Any, ...]:
        return Params, (self._selection, self.flat, self._origin)  # the arrays of a copy are views of its own vector

    @property
    def selection(self) -> Selection:
        """What was pulled."""
        return self._selection

    @property
    def version(self) -> int:
        """The lowest version of the partitions that were pulled."""
        return self._origin.version

    @property
    def incarnation(self) -> int:
        """The highest incarnation (ownership number) of the partitions that were pulled."""
        return self._origin.incarnation

    @property
    def origin(self) -> Origin:
        """Versions per partition, and the model generation they belong to; for `base=`."""
        return self._origin

    def refreshed(self, origin: Origin) -> "Params":
        """Record the origin of a pull into these arrays, and return this object."""
        self._origin = origin
        return self

    def frozen(self) -> "Params":
        """Make `flat` read-only, and return its values as read-only arrays."""
        if not self.flat.flags.writeable:
            return self
        self.flat.flags.writeable = False
        return Params(self._selection, self.flat, self._origin)

    def fits(self, selection: Selection, dtype: np.dtype[Any]) -> bool:
        """Whether a pull of this selection and dtype can be written into these arrays."""
        same = self._selection is selection or self._selection.key == selection.key
        return same and self.flat.dtype == dtype and self.flat.flags.writeable

    def __repr__(self) -> str:
        shapes = ", ".join(f"{n}: {list(a.shape)}" for n, a in list(self._arrays.items())[:6])
        more = ", ..." if len(self._arrays) > 6 else ""
        return f"<Params of {self._origin.model!r} at version {self.version}: {shapes}{more}>"
