"""Write codecs.npz: three gradients with every kind of value, and their bytes in each codec with error feedback.

    python tests/golden/codecs/generate.py

The file was made once and stays: what older versions stored in journals and older clients send must remain readable.
"""

from pathlib import Path
from typing import Any

import numpy as np

from paramserver.codecs.codec import Codec
from paramserver.codecs.parts import encode_partition
from paramserver.codecs.stage import pack

HERE = Path(__file__).parent
CODECS = ("int8", "topk:0.05")
STAGES = ("zstd", "lz4")
SIZE = 1000
"""Three full blocks of 256 elements and a short one."""


def gradients() -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """Return three gradients [SIZE], float32: noise of many magnitudes, a block of zeros, subnormals, ties, spikes."""
    rng = np.random.default_rng(5)
    out = []
    for _ in range(3):
        g = (rng.standard_normal(SIZE) * 10.0 ** rng.uniform(-8, 2, SIZE)).astype(np.float32)
        g[256:512] = 0.0
        g[512:560] = np.float32(1e-40)
        g[600:640] = np.float32(50.0)
        g[640:660] = np.float32(-50.0)
        g[-1] = np.float32(1e30)
        out.append(g)
    out[1][512:768] = np.float32(3e-38)  # the scale of this block is subnormal
    return out


def encoded(text: str) -> tuple[list[Any], Any]:
    """Return the bytes of the three gradients, encoded in turn, and the residual after the last."""
    residual, parts = None, []
    for g in gradients():
        new_residual = np.empty(SIZE, np.float32)
        parts.append(encode_partition(Codec.parse(text), g, residual, new_residual)[0])
        residual = new_residual
    return parts, residual


def main() -> None:
    """Write the file."""
    arrays: dict[str, Any] = {f"gradient.{i}": g for i, g in enumerate(gradients())}
    for text in CODECS:
        parts, left = encoded(text)
        arrays |= {f"{text}.{i}": part for i, part in enumerate(parts)} | {f"{text}.left": left}
        for stage in STAGES:
            arrays[f"{text}+{stage}"] = pack(stage, parts[0])
    np.savez_compressed(HERE / "codecs.npz", **arrays)


if __name__ == "__main__":
    main()
