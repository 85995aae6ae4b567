"""The name of a codec, taken apart: `fp32`, `fp16`, `bf16`, `int8`, `topk:0.01`, each with `+zstd` or `+lz4` or not."""

from dataclasses import dataclass
from math import isfinite
from typing import Final, Self, cast

from paramserver.errors import problem
from paramserver.types import ITEMSIZE, Coding

ELEMENTS: Final[dict[str, Coding]] = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float64": "float64",
}
"""Codecs that send elements of a dtype, and the dtype; the dtypes' own names mean the same."""
WHOLE: Final = ("int8", "topk")
"""Codecs that encode whole partitions and lose something, which the worker adds to its next gradient."""
STAGES: Final = ("zstd", "lz4")
"""Lossless second stages."""
NAMES: Final = ("fp32", "fp16", "bf16", *WHOLE)
FRACTION: Final = 0.01
"""What `topk` sends of a partition unless it says otherwise."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How a gradient travels."""

    coding: Coding
    """What a part's bytes are once the second stage is undone."""
    stage: str | None = None
    fraction: float = FRACTION
    """topk: the part of each partition's elements that is sent."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The codec that a caller names.  Raises RequestError (`unknown_codec`, or `invalid_field` for a fraction)."""
        if not isinstance(text, str):
            raise _unknown(repr(text))
        base, plus, stage = text.partition("+")
        name, colon, number = base.partition(":")
        coding = name if name in WHOLE else ELEMENTS.get(name)
        if coding is None or (plus and stage not in STAGES) or (colon and name != "topk"):
            raise _unknown(text)
        fraction = FRACTION
        if colon:
            try:
                fraction = float(number)
            except ValueError:
                fraction = -1.0
            if not (isfinite(fraction) and 0.0 < fraction <= 0.5):
                raise problem("invalid_field", f"codec '{text:.40}': the fraction must be above 0 and at most 0.5")
        return cls(cast(Coding, coding), stage or None, fraction)

    @classmethod
    def of_frame(cls, text: str) -> Self:
        """The codec that a frame names, which says no fraction.  Raises RequestError (`unknown_codec`)."""
        codec = cls.parse(text) if ":" not in text else None
        if codec is None:
            raise _unknown(text)
        return codec

    @property
    def whole(self) -> bool:
        """Whether it takes whole partitions only, and forgets nothing only with error feedback."""
        return self.coding in WHOLE

    @property
    def text(self) -> str:
        """Its name in a frame."""
        name = self.coding if self.whole else next(n for n, dtype in ELEMENTS.items() if dtype == self.coding)
        return f"{name}+{self.stage}" if self.stage else name

    def exact_bytes(self, elements: int) -> int | None:
        """Bytes of a part of so many elements before the second stage; None where they depend on its content."""
        match self.coding:
            case "topk":
                return None
            case "int8":
                return int8_bytes(elements)
            case _:
                return elements * ITEMSIZE[self.coding]


INT8_BLOCK: Final = 256
"""Elements that share one scale."""


def int8_bytes(elements: int) -> int:
    """A scale for each block of 256, and a byte for each element."""
    return 4 * -(-elements // INT8_BLOCK) + elements


def topk_count_max(elements: int) -> int:
    """With more indices and values, of 4 bytes each, a partition would be larger than as float32."""
    return max(1, elements // 2)


def _unknown(text: str) -> Exception:
    known = f"{', '.join(NAMES)}; each may be followed by {' or '.join('+' + s for s in STAGES)}"
    return problem("unknown_codec", f"codec '{text:.40}' is not known", hint=known)
