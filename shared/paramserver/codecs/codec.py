"""Parses codec names: `fp32`, `fp16`, `bf16`, `int8`, `topk:0.01`, each optionally followed by `+zstd` or `+lz4`."""

from dataclasses import dataclass
from math import isfinite
from typing import Final, Self, cast

from paramserver.errors import problem
from paramserver.types import INT8_BLOCK, ITEMSIZE, PER_PARTITION, Coding

ELEMENTS: Final[dict[str, Coding]] = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float64": "float64",
}
"""Codecs that send elements of a dtype, and that dtype; the dtypes' own names mean the same."""
STAGES: Final = ("zstd", "lz4")
"""Lossless second stages."""
NAMES: Final = ("fp32", "fp16", "bf16", *PER_PARTITION)
FRACTION: Final = 0.01
"""Fraction of a partition's elements that `topk` sends by default."""


@dataclass(frozen=True, slots=True)
class Codec:
    """A parsed codec name."""

    coding: Coding
    """Encoding of a part's bytes once the second stage is undone."""
    stage: str | None = None
    fraction: float = FRACTION
    """topk: fraction of each partition's elements that is sent."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a name given by a caller.  Raises RequestError (`unknown_codec`, or `invalid_field` for a fraction)."""
        if not isinstance(text, str):
            raise _unknown(repr(text))
        base, plus, stage = text.partition("+")
        name, colon, number = base.partition(":")
        coding = name if name in PER_PARTITION else ELEMENTS.get(name)
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
        """Parse a name from a frame, where a fraction is not allowed.  Raises RequestError (`unknown_codec`)."""
        if ":" in text:
            raise _unknown(text)
        return cls.parse(text)

    @property
    def per_partition(self) -> bool:
        """Whether it encodes whole partitions only, and needs error feedback to lose nothing."""
        return self.coding in PER_PARTITION

    @property
    def text(self) -> str:
        """The codec's name in a frame, which has no fraction."""
        name = self.coding if self.per_partition else next(n for n, dtype in ELEMENTS.items() if dtype == self.coding)
        return f"{name}+{self.stage}" if self.stage else name

    def exact_bytes(self, elements: int) -> int | None:
        """Return the bytes of a part of `elements` elements before the second stage; None for topk, where they vary."""
        match self.coding:
            case "topk":
                return None
            case "int8":
                return int8_bytes(elements)
            case _:
                return elements * ITEMSIZE[self.coding]


def int8_bytes(elements: int) -> int:
    """Return the bytes of a partition in int8: a float32 scale per block of 256, and a byte per element."""
    return 4 * -(-elements // INT8_BLOCK) + elements


def topk_count_max(elements: int) -> int:
    """Return the most elements that topk may send: beyond that, indices and values outgrow plain float32."""
    return max(1, elements // 2)


def _unknown(text: str) -> Exception:
    known = f"{', '.join(NAMES)}; each may be followed by {' or '.join('+' + s for s in STAGES)}"
    return problem("unknown_codec", f"codec '{text:.40}' is not known", hint=known)
