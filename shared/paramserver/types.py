"""Types that every part of paramserver shares."""

from collections.abc import Mapping
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

F32: TypeAlias = npt.NDArray[np.float32]
U8: TypeAlias = npt.NDArray[np.uint8]
AnyArray: TypeAlias = npt.NDArray[Any]
Json: TypeAlias = Mapping[str, Any]
"""A JSON object."""

DType: TypeAlias = Literal["float16", "bfloat16", "float32", "float64"]
"""Element types on the wire; values and optimizer state are kept in float32."""


class TorchDType(Protocol):
    """A `torch.dtype`; torch is not imported for it."""

    @property
    def is_floating_point(self) -> bool:
        """Whether it is one."""


DTypeLike: TypeAlias = str | np.dtype[Any] | type[np.generic] | TorchDType
"""How a user may name a dtype: "float16", `np.float16`, `array.dtype`, `torch.float16`."""

Coding: TypeAlias = Literal["float16", "bfloat16", "float32", "float64", "int8", "topk"]
"""How the bytes of a gradient are encoded: as elements of a dtype, or a whole partition by a codec."""

PER_PARTITION: Final = ("int8", "topk")
"""Codings that encode whole partitions, and lose something; the worker adds that to its next gradient."""

INT8_BLOCK: Final = 256
"""Elements that share one scale in int8."""

ABS_BITS: Final = np.uint32(0x7FFFFFFF)
"""The bits of a float32 but its sign: they have the same order as the magnitudes, and NaNs are the largest."""
INF_BITS: Final = np.uint32(0x7F800000)

ITEMSIZE: Final[dict[str, int]] = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

LEVELS: Final[dict[str, int]] = {"applied": 0, "journaled": 1, "fsynced": 2}
"""What an acknowledged push survives: nothing; the end of the process; also a crash of Redis's machine."""

PushState: TypeAlias = Literal["applied", "staged", "buffered"]


class PushId(Struct, frozen=True, weakref=True):
    """The id (worker, epoch, seq) by which repeated deliveries are recognized as the same push."""

    worker: str
    epoch: int
    seq: int


class ModelKey(Struct, frozen=True):
    """One creation of a model: its name and generation."""

    name: str
    generation: int

    def __str__(self) -> str:
        return f"{self.name}.{self.generation}"


class PartitionKey(Struct, frozen=True):
    """One partition of one creation of a model."""

    model: ModelKey
    index: int

    def __str__(self) -> str:
        return f"{self.model}/{self.index}"


Token: TypeAlias = int
"""Owner token of one ownership of one partition, which is also its incarnation: leader term << 32 | counter."""


def make_token(term: int, counter: int) -> Token:
    """Return the owner token of the `counter`-th ownership granted in leader term `term`."""
    return (term << 32) | counter
